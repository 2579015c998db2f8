"""What the engine adds to a decode step: `EngineCore` with asynchronous scheduling against the bare model loop.

Both run the same batches in one process, in turns: the engine decodes a batch for a round, then the very same steps
(rows, positions, contexts, tokens) are replayed by `ModelWorker.execute` back to back. The replay writes the same KV
and must sample the same tokens, which is checked. Works for models without window heads: theirs are recycled before the
replay.

    python benchmarks/engine_overhead.py [--quick] [--batch 16] [--context 512]

The last line is JSON; `overhead_ratio` is the median over the rounds of the engine's step time over the bare one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.protocol.batch import BatchRequest, StepResult
from headwise.runtime.protocol.request import SamplingParams
from headwise.runtime.protocol.running_step import DoneStep
from headwise.runtime.worker.worker import ModelWorker

SETTLE = 4
"""Steps at the start of a round that are not counted: the pipeline fills, and caches change hands."""


@dataclass(frozen=True)
class Size:
    batch: int
    context: int
    rounds: int
    steps: int


FULL = Size(batch=16, context=512, rounds=10, steps=32)
QUICK = Size(batch=4, context=32, rounds=2, steps=6)


class RecordingWorker:
    """Passes steps on to a worker and keeps them with their results."""

    def __init__(self, worker: ModelWorker) -> None:
        self.worker = worker
        self.steps: list[tuple[BatchRequest, StepResult]] = []

    @property
    def num_blocks(self) -> int:
        return self.worker.num_blocks

    @property
    def exports(self) -> tuple[bytes, ...]:
        return self.worker.exports

    def begin(self, batch: BatchRequest) -> DoneStep:
        result = self.worker.execute(batch)
        self.steps.append((batch, result))
        return DoneStep(result)


class DecodingEngine:
    """An engine in the middle of decoding a batch of equal prompts."""

    def __init__(self, model: str, batch: int, context: int, tokens: int) -> None:
        config = EngineConfig(model=model, max_num_seqs=batch)
        directory = resolve_model(config.model, config.cache_path)
        card = read_model_card(config, directory, identify=False)
        room = batch * (context + tokens + 2 * card.layout.block_size)
        config = replace(config, kv_cache=f"{room * card.bytes_per_token:.0f}")
        worker = ModelWorker(config, directory, 0, SingleRank())
        worker.initialize_cache()
        self.recorder = RecordingWorker(worker)
        self.executor = LocalExecutor(self.recorder)
        door = Preprocessor.open(config)
        self.core = EngineCore(config, door.card, door.tokenizer, self.executor)
        rng = np.random.default_rng(0)
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for _ in range(batch):
            self.core.add(door.prepare(prompt=rng.integers(1000, 30000, context).tolist(), sampling=sampling))
        while not self._is_steady(batch):
            self.core.step(None)

    def _is_steady(self, batch: int) -> bool:
        last = self.recorder.steps[-1][0] if self.recorder.steps else None
        return last is not None and len(last.rows) == batch == last.num_tokens

    def decode(self, steps: int) -> list[float]:
        """Seconds between the results of ``steps`` steps. Two more are in flight then."""
        times = [time.perf_counter()]
        for _ in range(steps):
            self.core.step(None)
            times.append(time.perf_counter())
        return np.diff(times).tolist()

    def replay(self, first: int) -> list[float]:
        """Seconds of each recorded step from ``first`` on, run again by the bare worker on the same thread."""
        times, results = [], []

        def run_again() -> None:
            recorded, nothing = self.recorder.steps, np.empty((0, 4), dtype=np.int32)
            batches = [replace(batch, table_updates=nothing, new_sequences=()) for batch, _ in recorded[first:]]
            batches[0] = replace(batches[0], token_ids=recorded[first - 1][1].token_ids)
            times.append(time.perf_counter())
            for batch in batches:
                results.append(self.recorder.worker.execute(batch))
                times.append(time.perf_counter())

        self.executor.thread.submit(run_again).result()
        for result, (_, known) in zip(results, self.recorder.steps[first:], strict=True):
            if not np.array_equal(result.token_ids, known.token_ids):
                raise SystemExit(f"step {known.step_id} sampled other tokens when it was run again")
        return np.diff(times).tolist()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--context", type=int, help="prompt tokens of each sequence")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, help="steps of a round that count")
    parser.add_argument("--quick", action="store_true", help="a small batch and few steps: seconds")
    args = parser.parse_args(arguments)
    given = {name: value for name, value in vars(args).items() if name in vars(FULL) and value is not None}
    size = replace(QUICK if args.quick else FULL, **given)
    rounds, steps = size.rounds, size.steps
    print(f"prefill of {size.batch} prompts of {size.context} tokens ...", flush=True)
    engine = DecodingEngine(args.model, size.batch, size.context, rounds * (steps + SETTLE + 2) + 8)
    print(f"{'round':>5} {'engine, ms/step':>16} {'bare, ms/step':>14} {'ratio':>7}")
    with_engine, bare, ratios = [], [], []
    for index in range(rounds):
        first = len(engine.recorder.steps)
        with_engine.append(statistics.median(engine.decode(steps + SETTLE)[SETTLE:]))
        bare.append(statistics.median(engine.replay(first)[SETTLE:]))
        ratios.append(with_engine[-1] / bare[-1])
        print(f"{index:>5} {1000 * with_engine[-1]:>16.2f} {1000 * bare[-1]:>14.2f} {ratios[-1]:>7.3f}", flush=True)
    engine.executor.close()
    result = {
        "overhead_ratio": statistics.median(ratios),
        "engine_step_ms": 1000 * statistics.median(with_engine),
        "bare_step_ms": 1000 * statistics.median(bare),
        "batch": size.batch,
        "context": size.context,
        "rounds": rounds,
        "steps": steps,
        "model": args.model,
        "cores": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
