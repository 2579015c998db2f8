"""What windowed heads bring serving, by ERNIE-4.5-like heads: the sections published, recycling of `gpu_checks.py`."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from gpu.bench import Bench
from gpu.checkpoint import ERNIE, kv_token_bytes, write_checkpoint
from gpu.engine import Serving, engine_config, greedy, random_prompts, serving, tokens_until_all_decode
from gpu.model import BATCHED_TOKENS
from gpu.sizes import WINDOW_FIELDS

SETTLING_STEPS = 3
"""Taken after a rest, before the clock starts: as many are in flight then as when it stops."""


def _checkpoint(bench: Bench) -> Path:
    return write_checkpoint(bench.rig.work / ERNIE, bench.sizes.ernie)


def published(bench: Bench) -> None:
    """One table for all heads, all of which see everything, against a table per window; nothing is recycled.

    Time to the first token of a long prompt, and between the tokens of a batch of long contexts.
    """
    sizes, rig, windowed = bench.sizes, bench.rig, _checkpoint(bench)
    plain = {name: value for name, value in sizes.ernie.items() if name not in WINDOW_FIELDS}
    uniform = write_checkpoint(rig.work / "ernie-uniform", plain, windowed)
    batch, context, steps = sizes.tbt
    output = tokens_until_all_decode(batch, context, BATCHED_TOKENS) + sizes.warm_steps
    output += _rounds(bench) * (SETTLING_STEPS + steps) + 1
    longest = max(sizes.ttft, context) + output + sizes.block_size
    shared = {
        "block_size": sizes.block_size,
        "recycling": False,
        "max_num_seqs": batch,
        "max_batched_tokens": BATCHED_TOKENS,
        "max_model_len": longest,
        "kv_cache": str(batch * (longest + 2 * sizes.block_size) * kv_token_bytes(sizes.ernie)),
    }
    with (
        serving(rig, engine_config(rig, uniform, **shared)) as one,
        serving(rig, engine_config(rig, windowed, **shared)) as two,
    ):
        engines = {"uniform": one, "per_head": two}
        ttft = _first_tokens(bench, engines)
        note = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in ttft.items())
        bench.rows.add(
            "ttft_over_uniform", ttft["per_head"] / ttft["uniform"], most=0.95, note=f"{sizes.ttft} tokens: {note}"
        )
        tbt = _between_tokens(bench, engines, output)
        note = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in tbt.items())
        recorded = [engine.captured_graphs for engine in engines.values()]
        bench.rows.check("tbt_recorded", all(recorded), f"{recorded} graphs")
        bench.rows.add(
            "tbt_over_uniform", tbt["per_head"] / tbt["uniform"], most=0.95,
            note=f"batch {batch}, context {context}: {note}",
        )  # fmt: skip


def _rounds(bench: Bench) -> int:
    return min(5, bench.sizes.rounds)


def _first_tokens(bench: Bench, engines: dict[str, Serving]) -> dict[str, float]:
    prompt = random_prompts(1, bench.sizes.ttft, bench.sizes.ernie["vocab_size"], seed=bench.rig.seed + 1)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(_rounds(bench) + 1):
        for name, engine in engines.items():
            seconds = engine.until_first_tokens(engine.submit(prompt, 1))
            engine.finish()
            if turn:  # the first warms up
                times[name].append(seconds)
    return {name: statistics.median(taken) for name, taken in times.items()}


def _between_tokens(bench: Bench, engines: dict[str, Serving], output: int) -> dict[str, float]:
    """Seconds a decode step: the engines take turns with the same sequences, one of them at rest."""
    batch, context, steps = bench.sizes.tbt
    prompts = random_prompts(batch, context, bench.sizes.ernie["vocab_size"], seed=bench.rig.seed + 2)
    for engine in engines.values():
        engine.until_first_tokens(engine.submit(prompts, output))
        engine.decode_steps(bench.sizes.warm_steps, batch)
        engine.rest()
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(_rounds(bench)):
        for name, engine in engines.items():
            engine.decode_steps(SETTLING_STEPS, batch)
            times[name].append(engine.decode_steps(steps, batch))
            engine.rest()
    for engine in engines.values():
        engine.finish()
    return {name: statistics.median(taken) for name, taken in times.items()}


# ---- the same memory, with recycling and without ----


@dataclass(frozen=True)
class Outcome:
    """peak: most requests at once"""

    tokens: int
    seconds: float
    peak: int

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def recycling(bench: Bench) -> None:
    """Tokens in the same time, in the same memory, for as long as requests wait for memory."""
    sizes, load = bench.sizes, bench.sizes.load
    directory = write_checkpoint(
        bench.rig.work / "ernie-recycled", {**sizes.ernie, **sizes.recycled}, weights=_checkpoint(bench)
    )
    whole = -(-(load.input_tokens + load.output_tokens) // load.block_size) * load.block_size
    shared = {
        "block_size": load.block_size,
        "max_num_seqs": load.requests,
        "max_batched_tokens": load.batched_tokens,
        "max_model_len": load.input_tokens + 2 * load.output_tokens,
        "kv_cache": str(load.whole * whole * kv_token_bytes(sizes.ernie)),
    }
    outcomes: list[Outcome] = []
    for mode, seconds in ((True, load.seconds), (False, None)):
        with serving(bench.rig, engine_config(bench.rig, directory, **shared, recycling=mode)) as engine:
            outcomes.append(_serve(bench, engine, seconds or outcomes[0].seconds, until_none_waits=mode))
    on, off = outcomes
    note = (
        f"{on.rate:.0f} and {off.rate:.0f} tokens/s in {on.seconds:.0f} s, {on.peak} and {off.peak} requests at once; "
        f"{load.input_tokens} tokens in, {load.output_tokens} out, memory of {load.whole} whole requests, window "
        f"{sizes.recycled['window_size']} in {sizes.recycled['head_wise_swa_ratio']:.0%} of heads"
    )
    bench.rows.add("throughput_ratio", on.rate / off.rate, least=1.76, note=note)


def _serve(bench: Bench, engine: Serving, seconds: float, until_none_waits: bool) -> Outcome:
    """Serve the load for so long, or until no request waits for memory."""
    load = bench.sizes.load
    prompts = random_prompts(load.requests, load.input_tokens, bench.sizes.ernie["vocab_size"], seed=bench.rig.seed + 3)
    # Between half and one and a half of the mean, in no order: requests that end together would come in waves.
    outputs = [round(load.output_tokens * (0.5 + index * 0.618 % 1)) for index in range(load.requests)]
    engine.engine.generate([prompts[0][:8]], greedy(bench.sizes.warm_steps))  # the kernels' first calls
    engine.submit(prompts, outputs)
    resources, tokens, peak = engine.core.resources, 0, 0
    began = now = time.perf_counter()
    while engine.core.has_work() and (not tokens or now - began < seconds):
        tokens += engine.step()
        now, peak = time.perf_counter(), max(peak, len(resources.running))
        if until_none_waits and tokens and not len(resources.waiting):
            break
    for request in list(engine.tokens):
        engine.core.abort(request)
    engine.finish()
    return Outcome(tokens, now - began, peak)
