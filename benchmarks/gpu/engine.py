"""An engine on the rig whose steps are timed: what the whole-model sections of `gpu_checks.py` share."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from gpu.rig import Rig

from headwise.runtime.client.local_engine import LocalEngine
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.batch import BatchRequest
from headwise.runtime.protocol.request import FinishReason, OutputDelta, SamplingParams
from headwise.runtime.protocol.running_step import RunningStep


def engine_config(rig: Rig, model: Path, **fields: Any) -> EngineConfig:
    """On a GPU, kernels and prefixes kept where the run keeps its files."""
    values = {"model": str(model), "device": "cuda", "cache_dir": str(rig.work), "prefix_caching": False, **fields}
    return EngineConfig.from_dict(values)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def sampled(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, top_p=0.9, seed=max_tokens, max_tokens=max_tokens, ignore_eos=True)


class Serving:
    """A `LocalEngine` that is stepped by hand. As many steps are in flight when the clock starts as when it stops.

    tokens: of each request, by its id
    """

    def __init__(self, rig: Rig, config: EngineConfig) -> None:
        self._rig = rig
        self.engine = LocalEngine(config, rig.device(config))
        self.core = self.engine.core
        self.tokens: dict[str, list[int]] = {}

    @property
    def captured_graphs(self) -> int:
        """CUDA graphs that steps were recorded as; without any, where they are wanted, steps run as without them."""
        graphs = self.engine._worker.served.runner.graphs
        return 0 if graphs is None else graphs.captured

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        output_tokens: Sequence[int] | int,
        params: Callable[[int], SamplingParams] = greedy,
    ) -> list[str]:
        """Ids of new requests, each of which is to have so many tokens."""
        counts = [output_tokens] * len(prompts) if isinstance(output_tokens, int) else output_tokens
        ids = []
        for prompt, count in zip(prompts, counts, strict=True):
            request = self.engine.preprocessor.prepare(prompt=list(prompt), sampling=params(count))
            self.tokens[request.request_id] = []
            self.core.add(request)
            ids.append(request.request_id)
        return ids

    def step(self) -> int:
        """One step; the number of tokens that came of it. Raises if a request failed."""
        deltas = self.core.step(None)
        for delta in deltas:
            self._take(delta)
        return sum(len(delta.token_ids) for delta in deltas)

    def _take(self, delta: OutputDelta) -> None:
        if delta.finish_reason is FinishReason.ERROR:
            raise RuntimeError(f"a request failed: {delta.error}")
        self.tokens[delta.request_id] += [int(token) for token in delta.token_ids]

    def until_first_tokens(self, ids: Sequence[str]) -> float:
        """Seconds until each of these requests has a token."""
        began = time.perf_counter()
        while not all(self.tokens[request] for request in ids):
            self.step()
        return time.perf_counter() - began

    def decode_steps(self, count: int, batch: int) -> float:
        """Seconds a step, over so many of them, each a token for every one of ``batch`` sequences."""
        tokens, began = 0, time.perf_counter()
        for _ in range(count):
            tokens += self.step()
        seconds = time.perf_counter() - began
        if tokens != count * batch:
            raise RuntimeError(f"{count} decode steps of {batch} sequences gave {tokens} tokens: some had ended")
        return seconds / count

    def host_seconds(self, count: int, batch: int) -> dict[str, float]:
        """Seconds that a worker's thread computes for a decode step until it is enqueued, medians of ``count``: in
        all, and in its parts, of which "message" is what a process of its own is sent, "launch" that of the graph, and
        "tokens" what comes behind it.

        The same step is begun again and again while the engine's thread stands still: as in a process of its own, which
        engines on a GPU have for it, no other thread takes the interpreter.
        """
        worker, spent = self.engine._worker, defaultdict[str, list[float]](list)
        graphs, tokens = worker.served.runner.graphs, worker.served.steps._tokens
        data = wire.encode(self._plain_step(batch))

        def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                began = time.thread_time()
                try:
                    return function(*arguments)
                finally:
                    spent[name].append(time.thread_time() - began)

            return call

        decode = timed("message", wire.decode)
        begin = timed("all", lambda: worker.begin(decode(data, BatchRequest)))

        def again() -> None:
            begun = deque([begin()])
            for _ in range(count):
                begun.append(begin())
                begun.popleft().result()
            begun.popleft().result()

        with ExitStack() as patches:
            patches.enter_context(patch.object(tokens, "choose", timed("tokens", tokens.choose)))
            if graphs is not None:
                replays = {shape: timed("launch", replay) for shape, replay in graphs._replays.items()}
                patches.enter_context(patch.object(graphs, "_upload", timed("upload", graphs._upload)))
                patches.enter_context(patch.dict(graphs._replays, replays))
            self.engine._executor.thread.submit(again).result()
        return {name: statistics.median(times) for name, times in spent.items()}

    def _plain_step(self, batch: int) -> BatchRequest:
        """A step of as many sequences, all of which decode, that changes nothing else."""
        runner, seen = self.engine._executor._runner, list[BatchRequest]()
        begin = runner._begin

        def watched(step: BatchRequest) -> RunningStep:
            seen.append(step)
            return begin(step)

        with patch.object(runner, "_begin", watched):
            while not (seen and len(seen[-1].rows) == batch and not len(seen[-1].table_updates)):
                self.step()
            self.rest()
        return next(step for step in reversed(seen) if len(step.rows) == batch and not len(step.table_updates))

    def rest(self) -> None:
        """Wait until the steps in flight are computed, so that another engine has the GPU and the cores to itself."""
        self.engine._executor.thread.submit(int).result()

    def finish(self) -> None:
        """Serve what is left."""
        while self.core.has_work():
            self.step()

    def close(self) -> None:
        self.engine.close()


@contextmanager
def serving(rig: Rig, config: EngineConfig) -> Iterator[Serving]:
    opened = Serving(rig, config)
    try:
        yield opened
    finally:
        opened.close()


def tokens_until_all_decode(batch: int, context: int, batched_tokens: int) -> int:
    """At most so many tokens the first of ``batch`` prompts decodes while the others are computed."""
    return 2 * -(-batch * context // batched_tokens) + 4


def random_prompts(count: int, tokens: int, vocabulary: int, seed: int) -> list[list[int]]:
    drawn = np.random.default_rng(seed).integers(10, vocabulary, (count, tokens))
    return [prompt.tolist() for prompt in drawn]
