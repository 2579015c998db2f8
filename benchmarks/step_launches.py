"""What a step on a GPU asks of the host: calls that enqueue something, and the Python around them; of prefill, a layer.

    python benchmarks/step_launches.py [--quick]

The worker, its kernels' host halves and its graphs are the real ones, on NumPy arrays; what they enqueue is counted
where the driver would be called, and not run; nor is anything at the addresses that it is given, so these are all the
same: NumPy takes 2 us to tell one, CuPy a tenth. So times, of this process alone, are those of our own Python here: on
a GPU each call into CuPy and the driver adds its own, and so do allocations. A layer's share is the difference between
models of 4 and 12 layers, which take turns, each step's least of all rounds.
`graphs` is how steps run by default, `launches` with `prefill_graphs: 0`; mixed steps have a sequence that decodes
beside each that is computed. `decode` is a whole step of sequences that all decode, greedily, one in 64 of which begins
a block: until it is enqueued, and until its result is there. `in a graph` is what a layer of a tiny gpt-oss, which has
all biases that are served, adds to a decode step's graph: kernels, products, and what CuPy would be asked for besides.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from gpu.checkpoint import LLAMA, MOE, random_models, write_checkpoint
from gpu.sizes import TINY

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.gpu.cuda_shim import LIBRARIES
from support.gpu.emulated_gpu import STREAM, EmulatedGpu, EmulatedOps, FixedUpload
from support.gpu.host_cublas import aligned
from support.tiny_checkpoints import TINY_CONFIGS, reference
from support.tiny_checkpoints import write_checkpoint as write_tiny

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.cuda.block_tables import CudaBlockTables
from headwise.kernels.cuda.cublas import Cublas
from headwise.kernels.cuda.driver import Driver, DriverKernel
from headwise.kernels.cuda.launch import Grid, Kernel, Program, Variant
from headwise.kernels.cuda.parameters import Argument
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.cuda.programs import CudaProgram, Defines
from headwise.kernels.cuda.step_tokens import CudaStepTokens
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.ops.base import Between, Cut, Fetch, KernelArray, StepUpload
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.ops.gpu_ops import GpuOps
from headwise.runtime.protocol.batch import LAST_SAMPLED, BatchRequest, NewSequence
from headwise.runtime.protocol.request import SamplingParams
from headwise.runtime.worker.worker import ModelWorker

TOKENS, SEQUENCES = 256, 4
BLOCK = 64
FEW, MANY = 4, 12
"""Layers of the two models."""


ADDRESS = 1 << 20
_PLACE = SimpleNamespace(ptr=ADDRESS)


class Addressed(np.ndarray):
    """Host memory that is addressed as CuPy's arrays are."""

    @property
    def data(self) -> Any:
        return _PLACE


@contextmanager
def all_at_one_address() -> Iterator[None]:
    """Kernels' host halves are told it of every array."""
    halves = [module for name, module in sys.modules.items() if name.startswith("headwise.kernels.cuda")]
    with ExitStack() as stack:
        for half in halves:
            if hasattr(half, "address_of"):
                stack.enter_context(patch.object(half, "address_of", lambda array: ADDRESS))
        yield


class Operated(np.ndarray):
    """Operations on it, and on what they make, are counted in `calls`, by name, as those of CuPy: a launch each."""

    calls: Counter[str] | None = None

    def __array_finalize__(self, made_of: Any) -> None:
        self.calls = getattr(made_of, "calls", None)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **more: Any) -> Any:
        calls = next(each.calls for each in (*inputs, *more.get("out", ())) if isinstance(each, Operated))
        if calls is not None:
            calls[f"cupy.{ufunc.__name__}"] += 1
        with np.errstate(all="ignore"):  # of products that nobody computed
            plain = {**more, **({"out": tuple(map(np.asarray, more["out"]))} if "out" in more else {})}
            made = getattr(ufunc, method)(*map(np.asarray, inputs), **plain)
        if "out" in more:
            return more["out"][0]
        made = made.view(Operated)
        made.calls = calls
        return made


class OperatedNumPy:
    """NumPy, whose new arrays count what is done with them."""

    def __init__(self, calls: Counter[str]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def empty(self, shape: Any, dtype: Any) -> Operated:
        made = np.empty(shape, dtype).view(Operated)
        made.calls = self._calls
        return made


def _nothing(*arguments: Any) -> None:
    pass


class Counted:
    """`Programs`, `TritonLauncher` and cuBLAS in one, which count what they are asked to enqueue.

    graphs: what each whole step that was recorded is made of
    """

    sm, sms = 90, 132

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.graphs: list[Counter[str]] = []
        self._variants: dict[Variant, Kernel] = {}
        self.steps, self.fetches = self._over_cupy("step_upload"), self._over_cupy("pinned_fetch")

    def _over_cupy(self, name: str) -> Any:
        """A module of the runtime, a copy of its own, over as much of CuPy as it needs, which counts copies."""

        def count(*arguments: int) -> None:
            self.calls["memcpyAsync"] += 1

        runtime = SimpleNamespace(
            memcpyAsync=count,
            memcpyHostToDevice=1,
            memcpyDeviceToHost=2,
            eventQuery=lambda event: 0,
            CUDARuntimeError=RuntimeError,
        )
        event = SimpleNamespace(record=_nothing, synchronize=_nothing, ptr=0)
        stream = SimpleNamespace(ptr=STREAM)
        cupy, cupyx = ModuleType("cupy"), ModuleType("cupyx")
        cupy.cuda = SimpleNamespace(  # type: ignore[attr-defined]
            runtime=runtime, Event=lambda disable_timing: event, get_current_stream=lambda: stream
        )
        cupyx.empty_pinned = np.empty  # type: ignore[attr-defined]
        there = {each: sys.modules.get(each) for each in ("cupy", "cupyx")}
        spec = find_spec(f"headwise.runtime.ops.{name}")
        assert spec is not None
        assert spec.loader is not None
        made = module_from_spec(spec)
        sys.modules.update(cupy=cupy, cupyx=cupyx)
        try:
            spec.loader.exec_module(made)
            return made
        finally:
            for each, module in there.items():
                if module is None:
                    del sys.modules[each]
                else:
                    sys.modules[each] = module

    def __call__(self, source: str, defines: Defines) -> Program:
        return CudaProgram(source, self, self.sm)

    def kernel(self, name: str, parameters: str, threads: int, shared_bytes: int = 0, waits: bool = False) -> Kernel:
        """One that is packed for the driver, which is not called."""

        def launch(*given: Any) -> int:
            self.calls[name] += 1
            return 0

        driver = Driver(SimpleNamespace(cuLaunchKernelEx=launch), lambda: STREAM)
        return DriverKernel(driver, SimpleNamespace(ptr=ADDRESS), name, parameters, threads, shared_bytes, waits)

    def prepare(self, variant: Variant) -> Kernel:
        if variant not in self._variants:
            self._variants[variant] = self.kernel(variant.kernel, variant.parameters, 128)
        return self._variants[variant]

    def launch(self, variant: Variant, grid: Grid, arguments: Sequence[Argument]) -> None:
        self.prepare(variant)(grid, arguments)

    def cublas(self) -> SimpleNamespace:
        def function(name: str) -> Callable[..., int]:
            def call(*arguments: Any) -> int:
                self.calls[name] += name.startswith("cublasGemm")
                return 0

            return call

        names = ("Create_v2", "Destroy_v2", "SetStream_v2", "SetWorkspace_v2", "GemmEx", "GemmStridedBatchedEx")
        made = {f"cublas{name}": function(f"cublas{name}") for name in (*names, "GetStatusString")}
        return SimpleNamespace(**made)


class CountedOps(EmulatedOps):
    """Graphs are recorded by running their work once, and are a call each."""

    empty_like = GpuOps.empty_like
    empty_bytes = GpuOps.empty_bytes

    def __init__(self, dtype: str, counted: Counted, xp: Any = np) -> None:
        GpuOps.__init__(self, xp, numpy_dtype(dtype), counted, counted)
        self._cublas, self.is_recorded = Cublas(aligned, counted.cublas(), lambda: STREAM), False
        self._fixed: list[FixedUpload] = []
        self._counted = counted
        self._fetches = counted.fetches.PinnedFetches()

    def matmul(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        out: np.ndarray = self.xp.empty((x.shape[0], weight.shape[1]), self.dtype)
        assert self._cublas.product(x, weight, out)
        return out

    def upload(self, array: np.ndarray) -> np.ndarray:
        if isinstance(array, Addressed):
            return array  # it is there
        there: np.ndarray = super().upload(array)
        return there

    def step_upload(self, capacity: int = 0) -> StepUpload:
        upload = self._counted.steps.PinnedUpload
        made: StepUpload = upload(capacity, lambda size: np.zeros(size, np.int32).view(Addressed))
        return made

    def fetch(self, array: KernelArray) -> Fetch:
        fetch: Fetch = self._fetches(np.asarray(array).view(Addressed))
        return fetch

    def capture(self, work: Callable[[], Sequence[KernelArray]]) -> Callable[[], Sequence[KernelArray]]:
        self._counted.calls.clear()
        results = work()
        self._counted.graphs.append(self._counted.calls.copy())

        def replay() -> Sequence[KernelArray]:
            self._counted.calls["graph"] += 1
            return results

        return replay

    def capture_pieces(
        self, work: Callable[[Cut], Sequence[KernelArray]]
    ) -> Callable[[Between], Sequence[KernelArray]]:
        cuts: list[None] = []
        results = work(lambda: cuts.append(None))

        def replay(between: Between) -> Sequence[KernelArray]:
            for number in range(len(cuts)):
                self._counted.calls["graph"] += 1
                if not between(number):
                    return results
            self._counted.calls["graph"] += 1
            return results

        return replay


class CountedGpu(EmulatedGpu):
    """operates: whether operations on arrays are counted, too, which takes time of its own"""

    def __init__(self, dtype: str, operates: bool = False) -> None:
        self._dtype, self._libraries, self.counted = dtype, LIBRARIES, Counted()
        counted: Any = self.counted
        xp = OperatedNumPy(counted.calls) if operates else np
        self.ops, self.sampler = CountedOps(dtype, counted, xp), None
        self._tables, self._step_tokens = CudaBlockTables(counted), CudaStepTokens(counted)
        self.parts = GpuParts(counted, counted, aligned, np.empty, self.ops.multiply_heads)


def step(tokens: int, sequences: int, *, mixed: bool) -> BatchRequest:
    """Of ``sequences`` that share ``tokens``; and as many that decode."""
    counts = [tokens // sequences] * sequences + [1] * (sequences if mixed else 0)
    starts = [0] * sequences + [300] * (len(counts) - sequences)
    return BatchRequest(
        step_id=1,
        rows=np.arange(len(counts), dtype=np.int32),
        starts=np.array(starts, np.int32),
        query_lens=np.array(counts, np.int32),
        token_ids=np.zeros(sum(counts), np.int32),
        sample=np.zeros(len(counts), np.bool_),
        table_updates=np.empty((0, 4), np.int32),
    )


def worker_of(directory: Path, graphs: int) -> tuple[ModelWorker, Counter[str]]:
    """One that is ready, and what it calls."""
    config = EngineConfig(
        model=str(directory), device="cuda", dtype="bfloat16", kv_cache="64MiB", block_size=16, prefill_graphs=graphs,
        max_model_len=1024,
    )  # fmt: skip
    gpu = CountedGpu("bfloat16")
    worker = ModelWorker(config, directory, 0, SingleRank(), gpu)
    worker.initialize_cache()
    return worker, gpu.counted.calls


def seconds_of(worker: ModelWorker, batch: BatchRequest) -> float:
    """Of this process, for a step."""
    began = time.process_time()
    worker.execute(batch)
    return time.process_time() - began


def decode_step(sequences: int, number: int) -> BatchRequest:
    """The ``number``-th of sequences that decode, as the engine sends it before it knows their tokens."""
    rows = np.arange(sequences, dtype=np.int32)
    begun = rows[number % BLOCK :: BLOCK]
    updates = np.stack([begun, 0 * begun, 0 * begun + number // BLOCK % 16, begun], 1).astype(np.int32)
    new = SamplingParams(temperature=0.0)
    return BatchRequest(
        step_id=number,
        rows=rows,
        starts=np.full(sequences, 100, np.int32),
        query_lens=np.ones(sequences, np.int32),
        token_ids=np.full(sequences, LAST_SAMPLED, np.int32),
        sample=np.ones(sequences, np.bool_),
        table_updates=updates,
        new_sequences=() if number else tuple(NewSequence(row, f"r{row}", new, seed=row) for row in rows.tolist()),
    )


def decode_cost(directory: Path, sequences: int, rounds: int) -> tuple[Counter[str], float, float]:
    """Calls of a decode step, and seconds of this process: until it is enqueued, and with its result."""
    config = EngineConfig(
        model=str(directory), device="cuda", dtype="bfloat16", kv_cache="64MiB", block_size=BLOCK, prefill_graphs=0,
        max_model_len=1024, max_num_seqs=sequences,
    )  # fmt: skip
    gpu = CountedGpu("bfloat16")
    worker = ModelWorker(config, directory, 0, SingleRank(), gpu)
    worker.initialize_cache()
    begins, wholes, calls = [], [], Counter[str]()
    for number in range(rounds):
        batch = decode_step(sequences, number)
        gpu.counted.calls.clear()
        began = time.process_time()
        running = worker.begin(batch)
        begun = time.process_time()
        running.result()
        wholes.append(time.process_time() - began)
        begins.append(begun - began)
        calls = gpu.counted.calls.copy()
    return calls, statistics.median(begins[1:]), statistics.median(wholes[1:])


def graph_of_layer(place: Path, name: str) -> dict[str, float]:
    """What each layer of a tiny model adds to the graph of a decode step."""
    found = []
    for layers in (2, 4):  # of each kind as many
        config = {**TINY_CONFIGS[name], "num_hidden_layers": layers}
        shapes = {}
        for weight, shape in reference(name)["shapes"].items():
            if ".layers." not in weight:
                shapes[weight] = shape
            elif ".layers.0." in weight:
                shapes |= {weight.replace(".layers.0.", f".layers.{layer}."): shape for layer in range(layers)}
        directory = place / f"{name}-{layers}"
        write_tiny(directory, config, shapes)
        gpu = CountedGpu("bfloat16", operates=True)
        engine = EngineConfig(
            model=str(directory), device="cuda", dtype="bfloat16", kv_cache="64MiB", block_size=16, max_model_len=256,
            max_num_seqs=4, prefill_graphs=0,
        )  # fmt: skip
        ModelWorker(engine, directory, 0, SingleRank(), gpu).initialize_cache()
        found.append(gpu.counted.graphs[-1])
    few, many = found
    return {call: (many[call] - few[call]) / 2 for call in many if many[call] > few[call]}


def of_layer(
    directories: Sequence[Path], graphs: int, batch: BatchRequest, rounds: int
) -> tuple[dict[str, float], float]:
    """Calls, and seconds, that each layer adds to a step."""
    made = [worker_of(directory, graphs) for directory in directories]
    counts = []
    for worker, calls in made:
        worker.execute(batch)
        calls.clear()
        worker.execute(batch)
        counts.append(calls.copy())
    (few, many), added = counts, MANY - FEW
    short, long = zip(*([seconds_of(worker, batch) for worker, _ in made] for _ in range(rounds)), strict=True)
    seconds = (min(long) - min(short)) / added
    return {call: (many[call] - few[call]) / added for call in many if many[call] > few[call]}, seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place, all_at_one_address():
        directory = write_checkpoint(Path(place) / LLAMA, random_models(TINY, None)[LLAMA])
        for sequences in (64,) if quick else (64, 256):
            enqueued, begun, whole = decode_cost(directory, sequences, rounds=3 if quick else 2000)
            told = ", ".join(f"{count:g} {call}" for call, count in enqueued.items())
            print(f"llama  decode of {sequences}: {begun * 1e6:.0f} us, with its result {whole * 1e6:.0f}: {told}")
            figures |= {
                f"decode_{sequences}_calls": sum(enqueued.values()),
                f"decode_{sequences}_begin_us": begun * 1e6,
                f"decode_{sequences}_us": whole * 1e6,
            }
        held = graph_of_layer(Path(place), "gpt-oss")
        told = ", ".join(f"{count:g} {call}" for call, count in held.items())
        print(f"gpt-oss decode in a graph: {sum(held.values()):g}: {told}")
        figures["gpt_oss_graph_of_layer"] = sum(held.values())
        for model in (LLAMA,) if quick else (LLAMA, MOE):
            shape, directories = random_models(TINY, None)[model], []
            for layers in (FEW, MANY):
                described = {**shape, "num_hidden_layers": layers}
                directories.append(write_checkpoint(Path(place) / f"{model}-{layers}", described))
            for mixed in (False, True):
                batch, kind = step(TOKENS, SEQUENCES, mixed=mixed), "mixed" if mixed else "prefill"
                for name, graphs in (("launches", 0), ("graphs", 1024)):
                    calls, seconds = of_layer(directories, graphs, batch, rounds=3 if quick else 300)
                    told = ", ".join(f"{count:g} {call}" for call, count in calls.items())
                    print(f"{model:<6} {kind:<8} {name:<9} {seconds * 1e6:>4.0f} us  {sum(calls.values()):g}: {told}")
                    figures[f"{model}_{kind}_{name}_calls"] = sum(calls.values())
                    figures[f"{model}_{kind}_{name}_us"] = seconds * 1e6
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
