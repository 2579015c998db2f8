"""Tensor-parallel ranks on GPUs reduce by NCCL, if they can: here as threads, by a stand-in for CuPy's binding."""

from __future__ import annotations

import gc
import logging
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.gpu.cuda_shim import LIBRARIES, ShimPrograms
from support.gpu.emulated_gpu import EmulatedGpu
from support.gpu.host_ipc import HostGpu, host_sharing
from support.gpu.host_nccl import HostNccl, NcclError, host_cupy_with, way
from support.gpu.nccl_ranks import RankGpu, Ranks
from support.gpu.tiny_engine import PROMPT, SHORT_PROMPTS, configuration, lose_numbers, tokens_and_errors, write_model
from support.tiny_checkpoints import checkpoint

from headwise import EngineConfig, LocalEngine
from headwise.cache_controller.dtypes import numpy_dtype
from headwise.errors import ConfigError, DeploymentError, EngineDiedError
from headwise.kernels.cuda.all_reduce import RankSums
from headwise.kernels.cuda.programs import Defines
from headwise.runtime.client import local_engine as local
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.ops.numpy_ops import NumpyOps
from headwise.runtime.ops.one_shot import connect_one_shot
from headwise.runtime.protocol.batch import BatchRequest, StepResult
from headwise.runtime.protocol.request import SamplingParams
from headwise.runtime.protocol.running_step import RunningStep
from headwise.runtime.worker import rank_graphs
from headwise.runtime.worker.sampler import NOT_FINITE
from headwise.runtime.worker.shared_memory_comm import SharedMemoryComm
from headwise.runtime.worker.worker import ModelWorker

MODULE = "headwise.runtime.ops.nccl"


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostNccl]:
    nccl = HostNccl()
    for name, module in host_cupy_with(nccl).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    yield nccl
    sys.modules.pop(MODULE, None)


@pytest.fixture
def module(nccl: HostNccl) -> ModuleType:
    return import_module(MODULE)


def part(rank: int, *shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(shape).astype(numpy_dtype(dtype))


# ---- collectives ----


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_all_reduce_sums_in_place_in_the_dtype(nccl: HostNccl, module: ModuleType, dtype: str) -> None:
    ranks = Ranks(nccl, 3)
    connected = ranks.each(lambda rank: module.connect_gpus(ranks.comms[rank]))
    mine = [part(rank, 5, 8, dtype=dtype) for rank in range(3)]
    expected = mine[0] + mine[1] + mine[2]
    for rank, total in enumerate(ranks.each(lambda rank: connected[rank].all_reduce(mine[rank]))):
        assert total is mine[rank]
        np.testing.assert_array_equal(total, expected)
    code = {"float32": 7, "float16": 6, "bfloat16": 9}[dtype]
    assert [nccl.log[rank] for rank in range(3)] == [[("eager", "allReduce", 40, code)]] * 3


def test_parts_of_larger_tensors_are_reduced_by_themselves(nccl: HostNccl, module: ModuleType) -> None:
    ranks = Ranks(nccl, 2)
    connected = ranks.each(lambda rank: module.connect_gpus(ranks.comms[rank]))
    whole = [part(rank, 4, 6) for rank in range(2)]
    before = [each.copy() for each in whole]
    for total in ranks.each(lambda rank: connected[rank].all_reduce(whole[rank][:, 2:4])):
        np.testing.assert_array_equal(total, before[0][:, 2:4] + before[1][:, 2:4])
    np.testing.assert_array_equal(whole, before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gather_joins_uneven_columns_on_rank_0_alone(nccl: HostNccl, module: ModuleType, dtype: str) -> None:
    ranks, widths = Ranks(nccl, 3), (7, 5, 6)
    connected = ranks.each(lambda rank: module.connect_gpus(ranks.comms[rank]))
    for rows in (4, 1, 4):
        mine = [part(rank, rows, widths[rank], dtype=dtype) for rank in range(3)]
        whole, *others = ranks.each(lambda rank, mine=mine: connected[rank].gather(mine[rank]))
        np.testing.assert_array_equal(whole, np.concatenate(mine, axis=1))
        assert others == [None, None]


def test_all_ranks_have_the_tokens_that_rank_0_sampled(nccl: HostNccl, module: ModuleType) -> None:
    ranks = Ranks(nccl, 3)
    connected = ranks.each(lambda rank: module.connect_gpus(ranks.comms[rank]))
    sampled = np.array([7, 0, 9], np.int32), np.array([1.5, np.nan, -2], np.float32)
    for shared in ranks.each(lambda rank: connected[rank].share(None if rank else sampled, 3)):
        assert [array.dtype for array in shared] == [np.int32, np.float32]
        for array, expected in zip(shared, sampled, strict=True):
            np.testing.assert_array_equal(array, expected)
    assert nccl.log[0] == nccl.log[1] == nccl.log[2] == [("eager", "broadcast", 3, 2), ("eager", "broadcast", 3, 7)]


GROUPS = [[range(4)], [range(2), range(2, 4)], [range(1), range(1, 4)]]
"""Of four ranks, that call each other at the same time."""


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
@pytest.mark.parametrize("groups", GROUPS)
def test_ranks_of_a_group_have_what_each_of_them_has(
    nccl: HostNccl, module: ModuleType, groups: list[range], dtype: str
) -> None:
    ranks = Ranks(nccl, 4)
    connected = ranks.each(lambda rank: module.connect_gpus(ranks.comms[rank]))
    group_of = {rank: group for group in groups for rank in group}
    wide = [part(rank, 3, 2, 10, dtype=dtype) for rank in range(4)]
    for gathered in (lambda rank: wide[rank][:, :, 2:7], lambda rank: wide[rank]):  # one with gaps
        found = ranks.each(lambda rank, gathered=gathered: connected[rank].all_gather(gathered(rank), group_of[rank]))
        for rank, whole in enumerate(found):
            np.testing.assert_array_equal(whole, np.stack([gathered(other) for other in group_of[rank]]))
            assert whole.dtype == numpy_dtype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("groups", GROUPS)
def test_ranks_of_a_group_exchange_what_each_has_for_each(
    nccl: HostNccl, module: ModuleType, groups: list[range], dtype: str
) -> None:
    ranks = Ranks(nccl, 4)
    connected = ranks.each(lambda rank: module.connect_gpus(ranks.comms[rank]))
    group_of = {rank: group for group in groups for rank in group}
    mine = [part(rank, len(group_of[rank]), 2, 5, dtype=dtype) for rank in range(4)]
    before = [each.copy() for each in mine]
    for rank, whole in enumerate(ranks.each(lambda rank: connected[rank].exchange(mine[rank], group_of[rank]))):
        group = group_of[rank]
        np.testing.assert_array_equal(whole, np.stack([before[other][group.index(rank)] for other in group]))
        assert not np.shares_memory(whole, mine[rank])
    np.testing.assert_array_equal(np.concatenate(mine), np.concatenate(before))
    code = {"float32": 7, "bfloat16": 9}[dtype]
    others = [other for other in group_of[1] if other != 1]
    assert sorted(nccl.log[1]) == sorted(
        ("eager", name, 10, code, other) for other in others for name in ("send", "recv")
    )  # fmt: skip


def test_what_ranks_tell_each_other_is_recorded_and_told_by_a_replay(nccl: HostNccl, module: ModuleType) -> None:
    ranks = Ranks(nccl, 2)
    connected = ranks.each(lambda rank: module.connect_gpus(ranks.comms[rank]))
    mine = [part(rank, 2, 6) for rank in range(2)]

    def work(rank: int, how: str) -> Any:
        with way(nccl, how):
            return connected[rank].exchange(connected[rank].all_gather(mine[rank], range(2)), range(2))

    recorded = ranks.each(lambda rank: work(rank, "recorded"))
    assert np.isnan(recorded[0][1]).all(), "nothing was sent"
    for rank, found in enumerate(ranks.each(lambda rank: work(rank, "graph"))):
        np.testing.assert_array_equal(found, np.stack([mine[rank]] * 2), "what both had gathered of this one")


def test_ranks_that_send_before_they_receive_would_be_noticed(nccl: HostNccl, module: ModuleType) -> None:
    """On GPUs they would wait for each other for ever."""
    ranks, nccl.patience_s = Ranks(nccl, 2), 0.2
    connected = ranks.each(lambda rank: module.connect_gpus(ranks.comms[rank]))
    nccl.groupStart = nccl.groupEnd = lambda: None
    for future in ranks.tell(lambda rank: connected[rank].all_gather(part(rank, 3), range(2))):
        with pytest.raises(EngineDiedError, match="what was sent is not received"):
            future.result()


def test_a_rank_that_recorded_nothing_would_be_noticed(nccl: HostNccl, module: ModuleType) -> None:
    ranks = Ranks(nccl, 2)
    connected = ranks.each(lambda rank: module.connect_gpus(ranks.comms[rank]))

    def reduce(rank: int) -> None:
        with way(nccl, "graph" if rank else "eager"):
            connected[rank].all_reduce(part(rank, 3))

    for rank, future in enumerate(ranks.tell(reduce)):
        with pytest.raises(EngineDiedError, match=f"NCCL failed on TP rank {rank}: ranks differ"):
            future.result()


def test_a_group_that_fails_is_ended(nccl: HostNccl, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(nccl, 2)
    connected = ranks.each(lambda rank: module.connect_gpus(ranks.comms[rank]))

    def fail(*arguments: int) -> None:
        raise NcclError("NCCL_ERROR_INTERNAL_ERROR: internal error")

    monkeypatch.setattr(connected[0]._communicator, "recv", fail, raising=False)
    first, second = ranks.tell(lambda rank: connected[rank].gather(part(rank, 2, 3)))
    with pytest.raises(EngineDiedError, match="NCCL failed on TP rank 0: NCCL_ERROR_INTERNAL_ERROR"):
        first.result()
    assert second.result() is None
    assert ranks.each(lambda rank: nccl.thread.group) == [None, None]


def test_no_rank_waits_for_others_to_let_go_of_its_communicator(nccl: HostNccl, module: ModuleType) -> None:
    ranks = Ranks(nccl, 2)
    connected = ranks.each(lambda rank: module.connect_gpus(ranks.comms[rank]))
    known = [weakref.ref(each._communicator) for each in connected]
    connected.clear()
    gc.collect()
    assert None not in [each() for each in known]


# ---- start ----


def test_captures_need_no_other_rank(nccl: HostNccl, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(module.os, "environ", environment)
    ranks = Ranks(nccl, 2)
    ranks.each(lambda rank: module.connect_gpus(ranks.comms[rank]))
    assert environment == {"NCCL_GRAPH_REGISTER": "0"}


@pytest.mark.parametrize(
    ("gpus", "available", "reason"),
    [
        (1, True, "two of them have the same GPU"),
        (2, True, "two of them have the same GPU"),
        (3, False, r"NCCL is not to be had on every rank \(`pip install nvidia-nccl-cu12`, for CUDA 13 -cu13\)"),
    ],
)
def test_ranks_that_cannot_connect_say_why_once(
    nccl: HostNccl, module: ModuleType, caplog: pytest.LogCaptureFixture, gpus: int, available: bool, reason: str
) -> None:
    nccl.available = available
    ranks = Ranks(nccl, 3, gpus)
    with caplog.at_level(logging.INFO):
        assert ranks.each(lambda rank: module.connect_gpus(ranks.comms[rank])) == [None] * 3
    (record,) = caplog.records
    assert record.message == "tensor-parallel ranks reduce through host memory: " + reason.replace("\\", "")
    assert not nccl.log


def test_ranks_on_several_nodes_cannot_do_without(
    nccl: HostNccl, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl.available = False
    monkeypatch.setattr(SharedMemoryComm, "spans_nodes", True)
    ranks = Ranks(nccl, 2)
    for future in ranks.tell(lambda rank: module.connect_gpus(ranks.comms[rank])):
        with pytest.raises(DeploymentError, match="ranks on several nodes need NCCL, and NCCL is not to be had"):
            future.result()


def test_gpus_of_the_same_place_in_different_machines_are_different_ones(
    nccl: HostNccl, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "this_node", lambda: nccl.thread.machine)

    def connect(ranks: Ranks, rank: int) -> Any:
        nccl.thread.machine = f"machine {rank % 2}"
        return module.connect_gpus(ranks.comms[rank])

    apart, shared = Ranks(nccl, 2, gpus=1), Ranks(nccl, 3, gpus=1)
    assert None not in apart.each(lambda rank: connect(apart, rank))
    assert shared.each(lambda rank: connect(shared, rank)) == [None] * 3, "two of them are on one machine"


def test_one_rank_without_the_library_is_enough(
    nccl: HostNccl, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "load_nccl", lambda: None if nccl.thread.stream == 0x5001 else nccl)
    ranks = Ranks(nccl, 2)
    assert ranks.each(lambda rank: module.connect_gpus(ranks.comms[rank])) == [None, None]


def test_a_failure_to_connect_names_the_rank_and_the_remedy(
    nccl: HostNccl, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(ndev: int, unique_id: bytes, rank: int) -> None:
        raise NcclError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error (run with NCCL_DEBUG=INFO for details)")

    monkeypatch.setattr(nccl, "NcclCommunicator", refuse, raising=False)
    ranks = Ranks(nccl, 2)
    for rank, future in enumerate(ranks.tell(lambda rank: module.connect_gpus(ranks.comms[rank]))):
        with pytest.raises(
            DeploymentError, match=rf"GPU of TP rank {rank} .*SYSTEM_ERROR.*NCCL_DEBUG=INFO.*--shm-size"
        ):
            future.result()


# ---- a whole engine ----


@dataclass(frozen=True)
class RanksStep:
    """The `RunningStep` of all ranks."""

    ranks: Ranks
    steps: list[RunningStep]

    @property
    def is_done(self) -> bool:
        return all(step.is_done for step in self.steps)

    def result(self) -> StepResult:
        results = self.ranks.each(lambda rank: self.steps[rank].result())
        assert [result.error for result in results] == [None] * len(results)
        assert all(np.array_equal(result.token_ids, results[0].token_ids) for result in results), "all know the tokens"
        first: StepResult = results[0]
        return first


class RanksAsThreads:
    """In the place of a `ModelWorker`: one for each rank."""

    def __init__(self, ranks: Ranks, gpus: list[RankGpu], config: EngineConfig, model_dir: Path) -> None:
        self._ranks = ranks
        self.workers = ranks.each(
            lambda rank: ModelWorker(config, model_dir, rank, ranks.comms[rank], gpus[rank] if gpus else None)
        )
        self.describe = self.workers[0].describe

    @property
    def card(self) -> ModelCard:
        return self.workers[0].card

    def initialize_cache(self) -> None:
        self._ranks.each(lambda rank: self.workers[rank].initialize_cache())

    def begin(self, batch: BatchRequest) -> RanksStep:
        return RanksStep(self._ranks, self._ranks.each(lambda rank: self.workers[rank].begin(batch)))

    def close(self) -> None:
        self._ranks.each(lambda rank: self.workers[rank].close())

    @property
    def captured(self) -> list[int]:
        """Graphs of each rank."""
        return [worker.served.runner.graphs.captured if worker.served.runner.graphs else 0 for worker in self.workers]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def libraries() -> Path:
    return LIBRARIES


FEW_GRAPHS = {"max_num_seqs": 4, "max_model_len": 120, "prefill_graphs": 24, "kv_cache": "1MiB", "tp_size": 2}
"""Recording runs all of them."""
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


def answers(engine: LocalEngine, params: SamplingParams = GREEDY) -> list[list[int]]:
    with engine:
        return [list(result.token_ids) for result in engine.generate([PROMPT[:20], PROMPT[3:12]], params)]


@pytest.fixture(scope="module")
def expected(model: Path, libraries: Path) -> Callable[[str], list[list[int]]]:
    """What one rank says, greedily, in a dtype."""

    @cache
    def say(dtype: str) -> list[list[int]]:
        config = configuration(model, device="cuda", dtype=dtype, kv_cache="1MiB")
        return answers(LocalEngine(config, EmulatedGpu(libraries, dtype)))

    return say


def two_ranks(
    nccl: HostNccl,
    libraries: Path | None,
    config: EngineConfig,
    gpus: int = 2,
    unable: int | None = None,
    memories: tuple[HostGpu | None, HostGpu | None] = (None, None),
) -> tuple[LocalEngine, list[RankGpu], RanksAsThreads]:
    """``libraries``: of emulated GPUs; None: the ranks compute on the configured device. unable: to record, a rank

    memories: of the GPUs, that other ranks can read
    """
    ranks = Ranks(nccl, 2, gpus)
    devices = [] if libraries is None else [RankGpu(nccl, libraries, config, rank, memories[rank]) for rank in range(2)]
    if unable is not None:
        devices[unable].forget_to_record()
    made: list[RanksAsThreads] = []

    def make(config: EngineConfig, model_dir: Path, *others: Any) -> RanksAsThreads:
        made.append(RanksAsThreads(ranks, devices, config, model_dir))
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "ModelWorker", make)
        return LocalEngine(config, worker_process=False), devices, made[0]


@pytest.mark.parametrize(("dtype", "graphs"), [("float32", True), ("float32", False), ("bfloat16", True)])
def test_two_ranks_say_what_one_says(
    nccl: HostNccl, model: Path, libraries: Path, expected: Callable[[str], list[list[int]]], dtype: str, graphs: bool
) -> None:
    config = configuration(model, device="cuda", dtype=dtype, cuda_graphs=graphs, **FEW_GRAPHS)
    engine, _, worker = two_ranks(nccl, libraries, config)
    assert "collectives=nccl" in worker.describe()
    assert answers(engine) == expected(dtype)
    assert worker.captured == ([5, 5] if graphs else [0, 0])
    assert {launched[0] for launched in nccl.log[0]} == ({"eager", "recorded", "graph"} if graphs else {"eager"})
    reduced = [[launched for launched in nccl.log[rank] if launched[1] == "allReduce"] for rank in range(2)]
    assert reduced[0] == reduced[1]
    assert ("eager", "broadcast", 2, nccl.NCCL_INT32) in nccl.log[1], "tokens come to the others without the host"


@pytest.mark.parametrize(
    ("kept", "graphs"),
    [
        ("deepseek-v3", True),
        ("deepseek-v3.2", False),
        ("a KV head", True),
        *(
            pytest.param(kept, graphs, marks=pytest.mark.soak)
            for kept, graphs in (("deepseek-v3", False), ("deepseek-v3.2", True), ("a KV head", False))
        ),
    ],
)
def test_two_ranks_that_keep_tokens_together_say_what_one_says(
    nccl: HostNccl, libraries: Path, tmp_path: Path, graphs: bool, kept: str
) -> None:
    """Prompts by pieces of graphs with attention between them, decodes by graphs that send what is seen."""
    one_head = {"num_key_value_heads": 1, "head_wise_swa_ratio": 0.0}
    model = write_model(tmp_path, **one_head) if kept == "a KV head" else checkpoint(kept)
    config = configuration(model, device="cuda", dtype="float32", kv_cache="1MiB")
    alone = answers(LocalEngine(config, EmulatedGpu(libraries, "float32")))
    shared = replace(config, **FEW_GRAPHS, cuda_graphs=graphs, context_parallel_size=2)
    engine, _, worker = two_ranks(nccl, libraries, shared)
    assert "context_parallel=2" in worker.describe()
    assert answers(engine) == alone
    assert worker.captured == ([3, 3] if graphs else [0, 0])
    decoding, layers = "graph" if graphs else "eager", worker.card.config.num_layers
    sent = [launched for launched in nccl.log[0] if launched[:2] == (decoding, "send")]
    each = 3 if model == "deepseek-v3.2" else 2
    assert len(sent) >= each * layers * (GREEDY.max_tokens - 1), "best tokens, queries, and what they see"


def test_ranks_on_unlike_cards_record_prefill_of_the_same_sizes(
    nccl: HostNccl, model: Path, libraries: Path, expected: Callable[[str], list[list[int]]], monkeypatch: Any
) -> None:
    wanted, of_cards = expected("float32"), iter([48, 24])
    monkeypatch.setattr(rank_graphs, "worthwhile_tokens", lambda *asked: next(of_cards))
    given = {**FEW_GRAPHS, "prefill_graphs": -1, "max_num_seqs": 2}
    engine, _, worker = two_ranks(nccl, libraries, configuration(model, device="cuda", dtype="float32", **given))
    assert [each.served.prefill.sizes for each in worker.workers if each.served.prefill] == [[16, 24]] * 2
    assert answers(engine) == wanted


@pytest.mark.parametrize(("dtype", "graphs"), [("float32", True), ("bfloat16", False)])
def test_ranks_that_share_memory_sum_and_norm_decodes_in_one_launch(
    nccl: HostNccl, model: Path, libraries: Path, expected: Callable[[str], list[list[int]]], dtype: str, graphs: bool
) -> None:
    memories = HostGpu(may_open_own=True), HostGpu(may_open_own=True)
    config = configuration(model, device="cuda", dtype=dtype, cuda_graphs=graphs, **FEW_GRAPHS)
    engine, _, worker = two_ranks(nccl, libraries, config, memories=memories)
    assert "collectives=nccl+one-shot" in worker.describe()
    assert answers(engine) == expected(dtype)
    assert worker.captured == ([5, 5] if graphs else [0, 0])
    assert {launched[1] for launched in nccl.log[1]} == {"all_reduce_norm", "send", "broadcast"}
    assert nccl.log[0].count(("graph", "all_reduce_norm")) == nccl.log[1].count(("graph", "all_reduce_norm"))
    assert (nccl.log[0].count(("graph", "all_reduce_norm")) > 0) is graphs


def no_compiler(source: str, defines: Defines) -> None:
    raise ConfigError("no NVRTC")


CANNOT_READ = "it cannot read the memory of another rank's GPU (cudaErrorDeviceUninitialized: invalid device context)"


@pytest.mark.parametrize("unable", [0, 1])
@pytest.mark.parametrize("why", [CANNOT_READ, "there is no kernel for them (no NVRTC)"])
def test_where_one_rank_cannot_all_sums_go_by_nccl(
    nccl: HostNccl, module: ModuleType, caplog: pytest.LogCaptureFixture, unable: int, why: str
) -> None:
    gpus = [HostGpu(may_open_own=rank != unable or why != CANNOT_READ) for rank in range(2)]
    programs = [no_compiler if rank == unable and why != CANNOT_READ else ShimPrograms() for rank in range(2)]
    ops = NumpyOps(np.dtype(np.float32))
    sharings = [host_sharing(gpu) for gpu in gpus]
    ops_of = [SimpleNamespace(empty_bytes=gpu.empty, host=ops.host) for gpu in gpus]
    ranks = Ranks(nccl, 2)
    larges = ranks.each(lambda rank: module.connect_gpus(ranks.comms[rank]))
    connected = ranks.each(
        lambda rank: connect_one_shot(
            larges[rank],
            ranks.comms[rank],
            ops_of[rank],
            sharings[rank],
            programs[rank],
            RankSums("float32", 2, 64),
        )
    )
    assert connected == larges
    assert not gpus[0].opened, "what was mapped is not, any more"
    assert not gpus[1].opened
    (record,) = caplog.records
    assert record.message == f"small sums between tensor-parallel ranks go by NCCL, too: rank {unable}: {why}"


def test_ranks_on_several_nodes_do_not_try_to_share_memory(
    nccl: HostNccl, model: Path, libraries: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SharedMemoryComm, "spans_nodes", True)
    memories = HostGpu(may_open_own=True), HostGpu(may_open_own=True)
    config = configuration(model, device="cuda", dtype="float32", cuda_graphs=False, **FEW_GRAPHS)
    engine, _, worker = two_ranks(nccl, libraries, config, memories=memories)
    with engine:
        assert "collectives=nccl " in worker.describe() + " "
    assert "small sums" not in caplog.text
    assert not memories[0].opened


def test_ranks_are_told_to_leave_all_sums_to_nccl(nccl: HostNccl, model: Path, libraries: Path) -> None:
    memories = HostGpu(may_open_own=True), HostGpu(may_open_own=True)
    few = {**FEW_GRAPHS, "cuda_graphs": False, "one_shot_all_reduce": False}
    config = configuration(model, device="cuda", dtype="float32", **few)
    engine, _, worker = two_ranks(nccl, libraries, config, memories=memories)
    with engine:
        assert "collectives=nccl " in worker.describe() + " "


@pytest.fixture
def two_on_a_cpu(nccl: HostNccl, model: Path) -> tuple[LocalEngine, RanksAsThreads]:
    config = configuration(model, device="cpu", tensor_ops="numpy", kernels="reference", tp_size=2, cpu_threads=1)
    engine, _, worker = two_ranks(nccl, None, config)
    return engine, worker


def test_a_row_without_numbers_fails_its_request_alone_and_all_ranks_go_on(
    two_on_a_cpu: tuple[LocalEngine, RanksAsThreads],
) -> None:
    engine, worker = two_on_a_cpu
    with engine:
        expected = engine.generate(SHORT_PROMPTS, GREEDY)
        lose_numbers(worker.workers[0])
        found = tokens_and_errors(engine, GREEDY)
    assert [error for _, error in found] == [None, NOT_FINITE, None]
    assert [tokens for tokens, _ in found] == [
        expected[0].token_ids,
        expected[1].token_ids[: len(found[1][0])],
        expected[2].token_ids,
    ]
    assert len(found[1][0]) < 5


def test_two_ranks_forbid_and_punish_the_same_tokens_as_one(nccl: HostNccl, tmp_path: Path) -> None:
    """The rank that samples keeps what is known of the output; the others only hear of its tokens."""
    model = write_model(tmp_path, eos_token_id=2)
    params = [
        SamplingParams(max_tokens=12, temperature=0.9, seed=2, guided={"regex": "[a-f]{3}-[0-9]{2,4}"}),
        SamplingParams(max_tokens=12, seed=1, ignore_eos=True, repetition_penalty=1.4, frequency_penalty=0.5),
        SamplingParams(max_tokens=12, temperature=0.0, min_tokens=9, logit_bias={2: 90}),
    ]
    config = configuration(model, device="cpu", tensor_ops="numpy", kernels="reference", cpu_threads=1)
    with LocalEngine(config) as alone:
        expected = alone.generate(SHORT_PROMPTS, params)
    engine, _, worker = two_ranks(nccl, None, replace(config, tp_size=2))
    with engine:
        found = engine.generate(SHORT_PROMPTS, params)
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    assert re.fullmatch("[a-f]{3}-[0-9]{2,4}", found[0].text)
    assert found[2].usage.completion_tokens == 10, "its end token is likeliest from the first on"
    assert [len(worker.workers[rank].served.steps._tokens._editor._rows) for rank in range(2)] == [3, 0]


def test_a_rank_that_fails_within_a_step_ends_the_engine_for_its_peers_are_still_in_it(
    two_on_a_cpu: tuple[LocalEngine, RanksAsThreads],
) -> None:
    def fails(*arguments: Any) -> None:
        raise ValueError("boom")

    engine, worker = two_on_a_cpu
    with engine:
        for each in worker.workers:
            each.served.model.forward = fails
        with pytest.raises(EngineDiedError, match="failed in step 1: ValueError: boom"):
            engine.generate([PROMPT[:9]], GREEDY)


@pytest.mark.parametrize("unable", [0, 1])
def test_where_one_rank_cannot_record_all_run_without_graphs(
    nccl: HostNccl,
    model: Path,
    libraries: Path,
    expected: Callable[[str], list[list[int]]],
    caplog: pytest.LogCaptureFixture,
    unable: int,
) -> None:
    config = configuration(model, device="cuda", dtype="float32", **FEW_GRAPHS)
    engine, _, worker = two_ranks(nccl, libraries, config, unable=unable)
    assert answers(engine) == expected("float32")
    assert worker.captured == [0, 0]
    assert {launched[0] for launched in nccl.log[1 - unable]} == {"eager", "recorded"}
    assert {record.message for record in caplog.records} >= {
        "decode steps run without CUDA graphs, but for none: out of memory",
        "decode steps run without CUDA graphs, but for none: they cannot be recorded on another rank",
        "prefill of 24 tokens and less runs without CUDA graphs: out of memory",
        "prefill of 24 tokens and less runs without CUDA graphs: they cannot be recorded on another rank",
    }


def test_ranks_on_one_gpu_say_what_one_says_through_host_memory(nccl: HostNccl, model: Path, libraries: Path) -> None:
    warm = SamplingParams(max_tokens=4, temperature=0.8, seed=3, ignore_eos=True)
    alone = LocalEngine(configuration(model, device="cuda", dtype="float32"), EmulatedGpu(libraries, "float32"))
    config = configuration(model, device="cuda", dtype="float32", tp_size=2)
    engine, _, worker = two_ranks(nccl, libraries, config, gpus=1)
    assert "collectives=host" in worker.describe()
    assert answers(engine, warm) == answers(alone, warm)
    assert worker.captured == [0, 0]
    assert not nccl.log
