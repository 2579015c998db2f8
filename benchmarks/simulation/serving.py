"""Serves a load with the real scheduler and cache, and a modelled GPU: hours of serving in a minute."""

from __future__ import annotations

import gzip
import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from simulation.gpu import SimulatedGpu

from headwise.cache_controller.block_hash import hash_seed
from headwise.cache_controller.cache_manager import CacheManager
from headwise.cache_controller.planner import plan_head_groups
from headwise.kernels.gqa import gqa_layout
from headwise.runtime.cli.bench_workload import BenchRequest, Workload, arrival_times, make_requests
from headwise.runtime.config.block_size import resolve_block_size
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import kept_policies
from headwise.runtime.engine.parts import turns_of
from headwise.runtime.engine.resource_manager import ResourceManager
from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.engine.steps_in_flight import ScheduledStep
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.protocol.request import GenerateRequest, SamplingParams

KV_DTYPE = "float16"
"""Stands for bfloat16, which NumPy lacks: of the same size."""

TRACE_BLOCK = 512
"""Tokens that one id of the trace stands for."""

SEED = hash_seed("simulated")


# ---- what is sent ----


@dataclass(frozen=True)
class Load:
    """Requests and the seconds at which they arrive, ascending."""

    requests: list[BenchRequest]
    arrivals: NDArray[np.float64]

    @property
    def longest(self) -> int:
        return max(len(request.prompt) + request.output_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)


def random_load(count: int, input_tokens: int, output_tokens: int, rate: float, seed: int = 0) -> Load:
    """Distinct random prompts, lengths uniform from half to one and a half times the mean, Poisson arrivals."""
    workload = Workload(
        num_requests=count,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        max_tokens=2 * (input_tokens + output_tokens),
        seed=seed,
    )
    return Load(make_requests(workload), arrival_times(count, rate, seed))


def read_trace(path: Path, count: int, stretch: float) -> Load:
    """The first ``count`` requests of a Mooncake trace, arriving ``stretch`` times as far apart as they did."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]
    return trace_load(records, stretch)


def trace_load(records: Iterable[dict[str, Any]], stretch: float) -> Load:
    """Requests of a trace. Equal ids stand for equal tokens: id ``h`` for ``h * 512 .. h * 512 + 511``."""
    requests, arrivals = [], []
    for record in records:
        first = np.array(record["hash_ids"], dtype=np.int32) * TRACE_BLOCK
        tokens = (first[:, None] + np.arange(TRACE_BLOCK, dtype=np.int32)).ravel().astype(np.int32, copy=False)
        requests.append(BenchRequest(tokens[: record["input_length"]], max(1, record["output_length"])))
        arrivals.append(record["timestamp"] / 1000 * stretch)
    return Load(requests, np.array(arrivals))


# ---- what comes of it ----


@dataclass(frozen=True)
class Outcome:
    """What clients saw, and what the scheduler did.

    output_rate:    output tokens per second, from the first arrival to the last token
    ttft_s:         seconds from arrival to first token, of each request
    peak_running:   most requests in the batch at once
    cached_tokens:  prompt tokens that were served from the cache when their request first started
    computed_tokens: tokens computed, again after a preemption too
    lost_window_tokens: prompt tokens that full heads still had in the cache, and windowed heads did not
    """

    output_rate: float
    ttft_s: NDArray[np.float64]
    peak_running: int
    preemptions: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    computed_tokens: int
    lost_window_tokens: int
    steps: int
    seconds: float

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def computed_share(self) -> float:
        """Tokens computed over those that requests had: less by hits, more by preemptions."""
        return self.computed_tokens / (self.prompt_tokens + self.output_tokens)


@dataclass
class _Counts:
    steps: int = 0
    computed_tokens: int = 0
    peak_running: int = 0
    ended: list[Sequence] = field(default_factory=list)


class SimulatedEngine:
    """An engine's resource manager over a pool of ``kv_bytes``, and a clock that the modelled GPU moves."""

    def __init__(
        self, config: ModelConfig, gpu: SimulatedGpu, engine: EngineConfig, kv_bytes: float, longest: int
    ) -> None:
        plan = plan_head_groups(config.policies)
        block_size = resolve_block_size(engine, config)
        layout = gqa_layout(block_size, plan.slots, config.head_dim, KV_DTYPE)
        self.cache = CacheManager(
            kept_policies(plan, engine.recycling),
            block_size=block_size,
            num_blocks=int(kv_bytes // layout.block_bytes),
            max_rows=engine.most_seqs,
            max_blocks=-(-longest // block_size) + 1,
            step_tokens=engine.tokens_in_flight,
            prefix_caching=engine.prefix_caching,
        )
        self.resources = ResourceManager(
            self.cache,
            max_rows=engine.most_seqs,
            max_batched_tokens=engine.most_batched_tokens,
            prefill_chunk=engine.prefill_chunk,
            turns=turns_of(engine),
        )
        self.now = 0.0
        self._gpu = gpu
        self._depth = engine.steps_in_flight
        self._draw = np.random.default_rng(0)
        self._counts = _Counts()

    def serve(self, load: Load) -> Outcome:
        """Serve the load to its end."""
        waiting = deque(self._sequences(load))
        steps: deque[ScheduledStep] = deque()
        self.now = started = float(load.arrivals[0])
        while len(self._counts.ended) < len(load.requests):
            while waiting and waiting[0].arrived <= self.now:
                self.resources.add(waiting.popleft(), self.now)
            while len(steps) < self._depth and (step := self.resources.schedule(self.now)) is not None:
                steps.append(step)
            if steps:
                self._run(steps.popleft())
            else:
                self.now = waiting[0].arrived
        return self._outcome(load, self.now - started)

    def _sequences(self, load: Load) -> list[Sequence]:
        sampling = SamplingParams(ignore_eos=True)
        return [
            Sequence(
                GenerateRequest(str(index), request.prompt, sampling),
                SEED,
                arrival=(0, index),
                max_length=len(request.prompt) + request.output_tokens,
                arrived=arrived,
            )
            for index, (request, arrived) in enumerate(zip(load.requests, load.arrivals.tolist(), strict=True))
        ]

    def _run(self, step: ScheduledStep) -> None:
        """Let the clock pass the step, and take what it brought."""
        batch = step.batch
        starts, counts = batch.starts.astype(np.int64), batch.query_lens.astype(np.int64)
        self.now += self._gpu.step_seconds(starts, counts, int(batch.sample.sum()))
        self._counts.steps += 1
        self._counts.computed_tokens += batch.num_tokens
        self._counts.peak_running = max(self._counts.peak_running, len(self.resources.running))
        self._counts.ended += finish(self.resources, step, self._draw, self.now)
        self.cache.drain_index_updates()

    def _outcome(self, load: Load, seconds: float) -> Outcome:
        counts, ended = self._counts, sorted(self._counts.ended, key=lambda sequence: sequence.order)
        return Outcome(
            output_rate=load.output_tokens / seconds,
            ttft_s=np.array([(sequence.first_token or 0.0) - sequence.arrived for sequence in ended]),
            peak_running=counts.peak_running,
            preemptions=self.resources.num_preemptions,
            prompt_tokens=sum(sequence.num_prompt for sequence in ended),
            output_tokens=load.output_tokens,
            cached_tokens=sum(sequence.cached_tokens for sequence in ended),
            computed_tokens=counts.computed_tokens,
            lost_window_tokens=self.cache.stats().lost_window_tokens,
            steps=counts.steps,
            seconds=seconds,
        )


def finish(resources: ResourceManager, step: ScheduledStep, draw: np.random.Generator, now: float) -> list[Sequence]:
    """Commit a step with made-up tokens, as the engine does with real ones; the sequences that end with it."""
    tokens = draw.integers(2**31 - 2**20, 2**31 - 1, len(step.sequences), dtype=np.int32)
    ended = []
    for index in resources.commit(step, tokens):
        sequence = step.sequences[index]
        if sequence.first_token is None:
            sequence.first_token = now
        if sequence.num_tokens >= sequence.max_length:
            sequence.finished = True
            resources.leave(sequence)
            ended.append(sequence)
    return ended
