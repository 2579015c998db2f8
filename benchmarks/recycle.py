"""What recycling brings where memory is short: the same requests in the same memory, with recycling and without.

    python benchmarks/recycle.py [--quick] [--model gemma3-270m] [--rounds 1]

Three engines serve the same greedy requests, all sent at once: `off` and `on` have the memory of a few whole requests
and differ in the configuration's `recycling` only; `unlimited` recycles, too, and has room for everything. They take
turns in one process, each on a clock of its own, so that other load on the machine meets all of them. Window heads mask
alike in all three, so they must produce the same tokens: a request may take another way only where two tokens were as
good as equal, which is looked up.

The last line is JSON: `throughput_ratio` is on over off, `of_unlimited` on over unlimited; medians over the rounds,
each of the model where it is lowest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from smoke import lightly

from headwise.runtime.cli.terminal import progress
from headwise.runtime.client.local_engine import LocalEngine
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.loader.progress import Progress
from headwise.runtime.protocol.request import FinishReason, GenerationResult, OutputDelta, SamplingParams

MODES = ("off", "on", "unlimited")
SLICE_S = 1.0
"""Seconds of a turn; at least one step."""
CLOSE = 1e-3
"""Two tokens whose log-probabilities differ by less may change places with the order of a sum."""
PATTERN = Path(__file__).parent / "data" / "smollm2-135m-heads.json"


@dataclass(frozen=True)
class Setting:
    """A model and its load.

    engine: all of the configuration but `recycling` and `kv_cache`
    whole:  requests, at full length, whose every block the memory of `off` and `on` holds
    """

    engine: EngineConfig
    requests: int
    input_tokens: int
    output_tokens: int
    whole: float

    @property
    def card(self) -> ModelCard:
        return Preprocessor.open(self.engine).card

    def config(self, mode: str) -> EngineConfig:
        card, requests = self.card, self.requests if mode == "unlimited" else self.whole
        columns = -(-(self.input_tokens + self.output_tokens) // card.layout.block_size)
        blocks = round(requests * columns * len(card.plan.groups))
        return replace(self.engine, recycling=mode != "off", kv_cache=str(blocks * card.layout.block_bytes))

    def prompts(self, seed: int) -> list[list[int]]:
        drawn = np.random.default_rng(seed).integers(1000, 30000, (self.requests, self.input_tokens))
        return [prompt.tolist() for prompt in drawn]


def settings(quick: bool) -> list[Setting]:
    """A tenth of the published 10,600 tokens in and 4,000 out; longer for Gemma 3, whose window is 512 tokens."""
    shared = EngineConfig(dtype="float32", block_size=16, max_batched_tokens=64, async_scheduling=False)
    smollm2 = replace(shared, model="smollm2-135m", head_pattern=str(PATTERN), sparsity=0.75, sink=32, window=128)
    gemma3 = replace(shared, model="gemma3-270m")
    if quick:
        short = replace(lightly(smollm2), sink=16, window=16)
        return [Setting(short, requests=3, input_tokens=96, output_tokens=16, whole=2.2)]
    return [
        Setting(smollm2, requests=6, input_tokens=1060, output_tokens=400, whole=2),
        Setting(gemma3, requests=5, input_tokens=1590, output_tokens=600, whole=2),
    ]


@dataclass(frozen=True)
class Outcome:
    """What an engine made of the requests; ``ttft_s`` is the mean."""

    pool_blocks: int
    output_tokens_per_s: float
    ttft_s: float
    peak_running: int
    preemptions: int


class Run:
    """An engine of its own that serves all prompts, sent at once. Its clock runs only while it is stepped.

    first_token_s: by request, the clock's seconds at which its first token came
    """

    def __init__(self, config: EngineConfig, prompts: Sequence[list[int]], output_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        self.engine = LocalEngine(config)
        self.engine.generate(
            [[1000] * min(200, len(prompts[0]) // 3)], replace(sampling, max_tokens=4)
        )  # the kernels' first calls
        self.core = self.engine.core
        self.total = len(prompts) * output_tokens
        self.done = 0
        self.seconds = 0.0
        self.peak = 0
        self.first_token_s: dict[str, float] = {}
        self.results: dict[str, GenerationResult] = {}
        for prompt in prompts:
            request = self.engine.preprocessor.prepare(prompt=prompt, sampling=sampling)
            self.results[request.request_id] = GenerationResult(request.request_id)
            self.core.add(request)

    @property
    def outputs(self) -> list[list[int]]:
        return [result.token_ids for result in self.results.values()]

    def outcome(self) -> Outcome:
        stats = self.core.stats()
        return Outcome(
            pool_blocks=stats["cache"]["total_blocks"],
            output_tokens_per_s=self.done / self.seconds,
            ttft_s=statistics.mean(self.first_token_s.values()),
            peak_running=self.peak,
            preemptions=stats["requests"]["preemptions"],
        )

    def advance(self, seconds: float) -> None:
        """Step for so long. Nothing is in flight afterwards: steps are scheduled one at a time."""
        began = time.perf_counter()
        before, end = self.seconds, began + seconds
        while self.core.has_work() and time.perf_counter() < end:
            deltas = self.core.step(None)
            self.seconds = before + time.perf_counter() - began
            self.peak = max(self.peak, len(self.core.resources.running))
            for delta in deltas:
                self._take(delta)

    def _take(self, delta: OutputDelta) -> None:
        if delta.finish_reason is FinishReason.ERROR:
            raise SystemExit(f"a request failed: {delta.error}")
        self.first_token_s.setdefault(delta.request_id, self.seconds)
        self.results[delta.request_id].add(delta)
        self.done += len(delta.token_ids)


def run_round(setting: Setting, prompts: Sequence[list[int]], bar: Progress) -> tuple[dict[str, Outcome], int]:
    """All modes side by side: the one that is furthest behind runs next, so that all see the same machine.

    Also the number of requests of `off` and `on` that took another way than in `unlimited`.
    """
    runs = {mode: Run(setting.config(mode), prompts, setting.output_tokens) for mode in MODES}
    total = sum(run.total for run in runs.values())
    while behind := [run for run in runs.values() if run.done < run.total]:
        min(behind, key=lambda run: (run.done, run.seconds)).advance(SLICE_S)
        bar.update(sum(run.done for run in runs.values()), total)
    ties = sum(check_tokens(prompts, runs["unlimited"], runs[mode], mode) for mode in ("off", "on"))
    for run in runs.values():
        run.engine.close()
    return {mode: run.outcome() for mode, run in runs.items()}, ties


# ---- the same tokens ----


def forks(prompts: Sequence[list[int]], first: Run, second: Run) -> Iterator[tuple[list[int], int, int]]:
    """Where two runs part: the tokens up to there, and what each of them sampled next."""
    for prompt, one, other in zip(prompts, first.outputs, second.outputs, strict=True):
        at = next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        if at is not None:
            yield [*prompt, *one[:at]], one[at], other[at]


def check_tokens(prompts: Sequence[list[int]], unlimited: Run, run: Run, mode: str) -> int:
    """Requests whose tokens differ; exits if one does where the two tokens were not as good as equal."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2, ignore_eos=True)
    found = list(forks(prompts, unlimited, run))
    for tokens, expected, sampled in found:
        best = dict(unlimited.engine.generate([tokens], sampling)[0].logprobs[0].top)
        if set(best) != {expected, sampled} or abs(best[expected] - best[sampled]) > CLOSE:
            raise SystemExit(
                f"{mode} sampled token {sampled} after {len(tokens)} tokens, unlimited {expected}; log-probabilities "
                f"of the best: {best}. Recycling must not change a token"
            )
    return len(found)


# ---- results ----


def median(outcomes: Sequence[Outcome]) -> Outcome:
    """Each figure's median over the rounds."""
    columns = zip(*(asdict(outcome).values() for outcome in outcomes), strict=True)
    return Outcome(*(statistics.median(column) for column in columns))


def ratio(rounds: Sequence[Mapping[str, Outcome]], mode: str, base: str) -> float:
    """Throughput of a mode over that of ``base``, the rounds' median."""
    return statistics.median(r[mode].output_tokens_per_s / r[base].output_tokens_per_s for r in rounds)


def show_setting(setting: Setting) -> None:
    engine, card = setting.engine, setting.card
    policies, block_size = card.plan.policies, card.layout.block_size
    windows = {f"{p.window} tokens" + (f" and a sink of {p.sink}" if p.sink else "") for p in policies if not p.is_full}
    print(
        f"\n{engine.model}: {setting.requests} requests at once, {setting.input_tokens} tokens in and "
        f"{setting.output_tokens} out; memory of {setting.whole:g} whole requests.\n{len(policies)} head groups, "
        f"{sum(not p.is_full for p in policies)} with a window of {', '.join(windows)}; blocks of {block_size} "
        f"tokens, {engine.most_batched_tokens} tokens a step",
        flush=True,
    )


def show_rounds(rounds: Sequence[Mapping[str, Outcome]]) -> None:
    print(
        f"{'':>10} {'pool blocks':>12} {'output tokens/s':>16} {'mean TTFT, s':>13} {'peak running':>13} "
        f"{'preemptions':>12} {'over off':>9}"
    )
    for mode in MODES:
        row = median([r[mode] for r in rounds])
        print(
            f"{mode:>10} {row.pool_blocks:>12g} {row.output_tokens_per_s:>16.1f} {row.ttft_s:>13.1f} "
            f"{row.peak_running:>13g} {row.preemptions:>12g} {ratio(rounds, mode, 'off'):>9.2f}",
            flush=True,
        )


def figures(rounds: Sequence[Mapping[str, Outcome]]) -> dict[str, Any]:
    return {
        "throughput_ratio": ratio(rounds, "on", "off"),
        "of_unlimited": ratio(rounds, "on", "unlimited"),
        **{mode: asdict(median([r[mode] for r in rounds])) for mode in MODES},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="this one alone")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="SmolLM2 alone, short requests: seconds")
    args = parser.parse_args(arguments)
    chosen = [setting for setting in settings(args.quick) if args.model in (None, setting.engine.model)]
    if not chosen:
        known = ", ".join(setting.engine.model for setting in settings(args.quick))
        parser.error(f"--model {args.model} is not measured here; choose from {known}")
    models = {}
    for setting in chosen:
        show_setting(setting)
        rounds, ties = [], 0
        with progress() as bar:
            for index in range(args.rounds):
                bar.stage(f"{setting.engine.model}, round {index + 1} of {args.rounds}")
                outcomes, found = run_round(setting, setting.prompts(index), bar)
                rounds.append(outcomes)
                ties += found
        show_rounds(rounds)
        models[setting.engine.model] = {**figures(rounds), "other_way_at_ties": ties}
    result = {
        "throughput_ratio": min(model["throughput_ratio"] for model in models.values()),
        "of_unlimited": min(model["of_unlimited"] for model in models.values()),
        "models": models,
        "rounds": args.rounds,
        "cores": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
