"""A model's layers as two stages of a pipeline, both on one card: the section stages of `gpu_checks.py`.

What NCCL would carry goes through host memory, as it does between ranks that share a GPU. All else is a stage's: graphs
that read their stream where it comes in, and what the next stage is given of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from gpu.bench import Bench
from gpu.checkpoint import LLAMA, decoder_tensors, kv_token_bytes, random_models, write_checkpoint
from gpu.engine import engine_config, greedy, random_prompts, serving
from gpu.rig import Rig
from numpy.typing import NDArray

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.ops.stage_links import HostIncoming, HostOutgoing, LinkedStage, place_for
from headwise.runtime.protocol.batch import BatchRequest
from headwise.runtime.protocol.copies import MergedReports
from headwise.runtime.protocol.running_step import DoneStep
from headwise.runtime.worker.worker import ModelWorker

STAGES, LAYERS = 2, 4
PROMPT, TOKENS, SPAN = 24, 12, 64
"""Tokens of a prompt, which is one step in any case, and behind it; and of both at most."""

CROSSING = (64, 8192)
"""Tokens of steps whose streams are timed."""


def stages(bench: Bench) -> None:
    """Tokens of a few layers of Llama-3.2-1B's geometry in float32, with random weights: those of one rank and of two
    stages; and what a stream takes from one to the next through host memory."""
    rig = bench.rig
    changes = {"num_hidden_layers": LAYERS, "tie_word_embeddings": False}  # tied, it would say the same again and again
    config = {**random_models(bench.sizes, bench.options.layers)[LLAMA], **changes}
    head = "lm_head.weight", (config["vocab_size"], config["hidden_size"])
    directory = write_checkpoint(rig.work / "stages", config, tensors=[*decoder_tensors(config), head])
    shared = {"dtype": "float32", "max_num_seqs": 2, "max_batched_tokens": 256, "max_model_len": SPAN}
    room = str(8 * SPAN * 4 * kv_token_bytes(config))
    whole = engine_config(rig, directory, **shared, kv_cache=room)
    prompt = random_prompts(1, PROMPT, config["vocab_size"], seed=5)[0]
    with bench.rows.case("tokens") as begin:
        begin()
        with serving(rig, whole) as opened:
            (request,) = opened.submit([prompt], TOKENS)
            opened.finish()
            expected = opened.tokens[request]
        with _stages(rig, replace(whole, pipeline_parallel_size=STAGES), directory) as workers:
            found = _tokens(workers, prompt)
            graphs = [each.served.runner.graphs.captured if each.served.runner.graphs else 0 for each in workers.each]
        bench.rows.check("recorded", all(graphs), f"{graphs} graphs")
        bench.rows.check("same_tokens", found == expected, f"{found} by stages, {expected} by one rank")
    with bench.rows.case("crossing") as begin:
        begin()
        _time_crossings(bench, whole, config["hidden_size"])


class _HostLink:
    """The `HostLink` of two ends within a process. given, taken: by this end"""

    def __init__(self, given: SimpleQueue[Any], taken: SimpleQueue[Any]) -> None:
        self._given, self._taken = given, taken

    def send(self, array: NDArray[np.float32]) -> None:
        self._given.put(np.array(array, np.float32))

    def receive(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        array: NDArray[np.float32] = self._taken.get()
        assert array.shape == shape, f"a stream of {array.shape}, not of {shape}"
        return array

    answer, answered = send, receive

    def close(self) -> None:
        pass


class _Workers:
    """A `Worker` that is one of each stage, on a thread each. A step is over when it is in all."""

    exports = ()

    def __init__(self, rig: Rig, config: EngineConfig, directory: Path) -> None:
        there, back = SimpleQueue[Any](), SimpleQueue[Any]()
        links = _HostLink(there, back), _HostLink(back, there)
        self._threads = [ThreadPoolExecutor(1) for _ in links]
        self._reports = MergedReports(STAGES)

        def opened(rank: int) -> ModelWorker:
            return ModelWorker(config, directory, rank, SingleRank(), rig.device(config), link=links[rank])

        self.each: list[ModelWorker] = self._on_all(opened)
        self._on_all(lambda rank: self.each[rank].initialize_cache())

    def _on_all(self, work: Callable[[int], Any]) -> list[Any]:
        begun: list[Future[Any]] = [thread.submit(work, rank) for rank, thread in enumerate(self._threads)]
        return [future.result() for future in begun]

    def begin(self, batch: BatchRequest) -> DoneStep:
        results = self._on_all(lambda rank: self.each[rank].execute(batch))
        copies = self._reports.merge([result.copies for result in results])
        return DoneStep(replace(results[-1], rank=0, copies=copies))

    @property
    def num_blocks(self) -> int:
        return min(worker.num_blocks for worker in self.each)

    def close(self) -> None:
        self._on_all(lambda rank: self.each[rank].close())


@contextmanager
def _stages(rig: Rig, config: EngineConfig, directory: Path) -> Iterator[_Workers]:
    workers = _Workers(rig, config, directory)
    try:
        yield workers
    finally:
        workers.close()


def _tokens(workers: _Workers, prompt: list[int]) -> list[int]:
    """What is said behind a prompt, greedily."""
    config = workers.each[0].served.config
    preprocessor, executor = Preprocessor.open(config), LocalExecutor(workers)
    engine, said = EngineCore(config, preprocessor.card, preprocessor.tokenizer, executor), list[int]()
    engine.add(preprocessor.prepare(prompt=prompt, sampling=greedy(TOKENS)))
    while engine.has_work():
        for delta in engine.step(None):
            said += [int(token) for token in delta.token_ids]
    executor.close()
    return said


def _time_crossings(bench: Bench, config: EngineConfig, hidden: int) -> None:
    """From where a stage computed streams in bfloat16 to where the next one reads them."""
    ops: Any = bench.rig.device(replace(config, dtype="bfloat16")).ops
    for tokens in CROSSING if bench.sizes.long else CROSSING[:1]:
        queue = SimpleQueue[Any]()
        link, stage = _HostLink(queue, queue), LinkedStage(1, hidden, tokens, is_first=False, is_last=True)
        going, coming = HostOutgoing(ops, link), HostIncoming(ops, link, hidden, place_for(ops, stage))
        stream = ops.tensor(np.ones((tokens, hidden), np.float32))

        def cross(going: HostOutgoing = going, coming: HostIncoming = coming, stream: Any = stream) -> None:
            going.send(stream)
            coming.receive(len(stream))

        seconds = bench.seconds({"crossing": cross}, ahead=False)["crossing"]
        note = f"{stream.nbytes / 1e6:.1f} MB of {tokens} tokens, as float32 on the host"
        bench.rows.add(f"host_{tokens}", seconds * 1e3, "ms", note=note)
