"""What recycling the cache of windowed heads is worth: bytes and requests by arithmetic, throughput by simulation.

    python benchmarks/capacity.py [--quick] [--pattern FILE.tsv] [--trace FILE.jsonl.gz] [--jobs 2]

The scheduler, the cache, the planner and the head policies are the engine's own. Only the GPU is a model
(`simulation/gpu.py`), so no GPU and no weights are needed, and nothing here proves what a GPU will do. "on" gives
windows' blocks back, "off" keeps all; kernels read what a head sees either way.

The published geometries of many models (`geometries.py`) are planned on one rank, in bfloat16, in blocks of 64 tokens,
and compared with pages of one layer each, whose bytes a pool must make equal (`headwise/cache_controller/
unified_pages.py` has the arithmetic): padded to the largest layer's or state's, of 64 tokens; or lengthened, so that
small layers' pages have more tokens, which is what vLLM does where sizes divide, and beside states. States are counted
once a sequence. The last line is JSON: of each model, ``over_padded_pages`` and ``over_lengthened_pages`` are how many
times as many requests fit, the least of 8k, 32k and 128k tokens, and ``padding`` is the share of our own blocks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from model_fits import print_models
from simulation.gpu import A800, BYTES, H200, Gpu, SimulatedGpu, weights_of
from simulation.serving import KV_DTYPE, Load, Outcome, SimulatedEngine, random_load, read_trace

from headwise.cache_controller.head_pattern import HeadPattern, policies_from_scores
from headwise.cache_controller.planner import plan_head_groups
from headwise.cache_controller.policy import FULL
from headwise.cache_controller.windows import GroupWindows
from headwise.kernels.gqa import gqa_layout
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import load_pattern
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.registry import model_config

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
PATTERN = DATA / "duo-llama-3.1-8b-full-attention-heads.tsv"
TRACE = DATA / "mooncake-conversation-trace.jsonl.gz"

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
"""Llama-3.1-8B."""

ERNIE = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "vocab_size": 103424,
    "max_position_embeddings": 131072,
}
"""ERNIE-4.5-21B-A3B; its mixture of experts is the architecture's default."""

ERNIE_WINDOWS = {"window_size": 4096, "sink_size": 0, "head_wise_swa_ratio": 0.75}
"""The published config.json has no windows, and the published measurement does not say which it used. 0.75 is what
PaddlePaddle/FastDeploy#6702 takes where a config is silent; a window of 4096 and no sink in every layer are what the
design document of its successor (PaddlePaddle/community, head_wise_swa_cache) injects for its tests."""

DUO_SINK, DUO_WINDOW = 64, 256
LENGTHS = (4096, 16384, 65536, 131072)
KV_SHARE = 0.5
"""Of the memory that the weights leave, for the cache: the published measurement's."""

TRACE_KV_SHARE = 0.9
TRACE_STRETCH = {A800.name: 2.0, H200.name: 1.0}
"""The trace has three requests of 14,000 tokens a second; an A800 computes half of that."""

DECODING = 2
"""Tokens of a decoding sequence in steps in flight."""

PUBLISHED = "published, A800: 722.93 -> 1270.87 tok/s (1.758), mean TTFT 0.52"
ASSUMED = """\
Assumed: ERNIE-4.5-21B-A3B in bfloat16 ({weights:.1f} GB), window 4096, no sink, 3 of 4 KV heads, all layers windowed;
prompts of 5.3k to 15.9k tokens and outputs of 2k to 6k, uniform, 8 requests a second, Poisson, seed 0; {share:.0%} of
the memory that weights leave for the cache; at most 512 sequences and {budget} tokens a step; {compute:.0%} of peak
flops, {memory:.0%} of peak bandwidth, {overhead:.1f} ms a step besides."""


# ---- arithmetic ----


@dataclass(frozen=True)
class Footprint:
    """What one sequence of a model takes.

    sequence_bytes: by its length, while it decodes; a prompt under way holds a chunk more in each window
    """

    groups: int
    slots: int
    sequence_bytes: dict[int, int]


def footprint(config: ModelConfig, lengths: Sequence[int], block_size: int = 64) -> Footprint:
    plan = plan_head_groups(config.policies)
    layout = gqa_layout(block_size, plan.slots, config.head_dim, KV_DTYPE)
    blocks = GroupWindows(plan.policies, block_size).peak_blocks(np.array(lengths), DECODING)
    return Footprint(
        len(plan.groups), plan.slots, dict(zip(lengths, (blocks * layout.block_bytes).tolist(), strict=True))
    )


def all_full(config: ModelConfig) -> ModelConfig:
    return replace(config, policies=((FULL,) * config.num_kv_heads,) * config.num_layers)


def pattern_or_random(path: Path) -> tuple[HeadPattern, str]:
    """The pattern of a file, and where it comes from; a random one where there is no such file."""
    if path.exists():
        return load_pattern(path), path.name
    print(f"{path} is not there: a random pattern (seed 0) stands for DuoAttention's; give one with --pattern")
    return HeadPattern(np.random.default_rng(0).random((32, 8)), "random"), "random pattern"


def print_footprints(pattern: HeadPattern, source: str) -> dict[str, float]:
    llama, ernie = model_config(LLAMA), model_config(ERNIE)

    def duo(sparsity: float) -> ModelConfig:
        return replace(llama, policies=policies_from_scores(pattern.scores, sparsity, DUO_SINK, DUO_WINDOW))

    def windowed(window: int, ratio: float, skip: int | None = None) -> ModelConfig:
        windows = {"window_size": window, "head_wise_swa_ratio": ratio, "window_attn_skip_freq": skip}
        return model_config({**ERNIE, **ERNIE_WINDOWS, **windows})

    tables = {
        f"Llama-3.1-8B, {source}, sink {DUO_SINK}, window {DUO_WINDOW}": (
            llama,
            [(f"{sparsity:.0%} of heads windowed", duo(sparsity)) for sparsity in (0.25, 0.5, 0.75)],
        ),
        "ERNIE-4.5-21B-A3B, windows of config.json": (
            ernie,
            [
                ("4096, ratio 0.75 (default here)", windowed(4096, 0.75)),
                ("4096, ratio 0.5", windowed(4096, 0.5)),
                ("1024, ratio 0.75", windowed(1024, 0.75)),
                ("1024, 0.75, every 4th layer full", windowed(1024, 0.75, 4)),
            ],
        ),
    }
    longest, ratios = LENGTHS[-1], []
    for title, (model, policies) in tables.items():
        pool = KV_SHARE * (A800.memory - weights_of(model).total * BYTES)
        print(f"\n{title}\nGB of cache of a sequence, and how many fit into {pool / 1e9:.1f} GB, half of what an A800")
        print(f"has left; bytes per token are those of {longest:,} tokens")
        print(f"{'policy':34}{'groups':>8}{'bytes/token':>12}{'ratio':>7}" + "".join(f"{n:>14,}" for n in LENGTHS))
        full = footprint(all_full(model), LENGTHS)
        for name, config in [("all heads full", all_full(model)), *policies]:
            one = footprint(config, LENGTHS)
            ratios.append(full.sequence_bytes[longest] / one.sequence_bytes[longest])
            cells = "".join(f"{size / 1e9:>9.2f}{int(pool // size):>5}" for size in one.sequence_bytes.values())
            size = one.sequence_bytes[longest] / longest
            print(f"{name:34}{f'{one.groups}x{one.slots}':>8}{size:>12,.0f}{ratios[-1]:>7.2f}{cells}")
    return {"bytes_per_token_ratio": ratios[5], "duo_50_bytes_per_token_ratio": ratios[2]}


# ---- simulation ----


@dataclass(frozen=True)
class Run:
    """One load served once; ``make_load`` is made in the process that serves it."""

    make_load: Callable[[], Load]
    gpu: Gpu
    recycling: bool
    windows: tuple[tuple[str, Any], ...] = tuple(ERNIE_WINDOWS.items())
    max_batched_tokens: int = 8192
    kv_share: float = KV_SHARE


def serve(run: Run) -> Outcome:
    config, load = model_config({**ERNIE, **dict(run.windows)}), run.make_load()
    gpu = SimulatedGpu(run.gpu, config)
    engine = EngineConfig(max_num_seqs=512, max_batched_tokens=run.max_batched_tokens, recycling=run.recycling)
    return SimulatedEngine(config, gpu, engine, gpu.free_memory * run.kv_share, load.longest).serve(load)


@dataclass(frozen=True)
class Size:
    """Of the load, and the share of the memory left for its cache."""

    requests: int
    input_tokens: int = 10_600
    output_tokens: int = 4_000
    kv_share: float = KV_SHARE


FULL_SIZE = Size(requests=1024)
"""The published load."""
QUICK = Size(requests=16, output_tokens=200, kv_share=0.08)


def published(size: Size) -> Callable[[], Load]:
    return partial(random_load, size.requests, size.input_tokens, size.output_tokens, 8.0)


Pairs = dict[str, tuple[Run, Run]]
"""Runs by name, without and with recycling."""


def pair(**fields: Any) -> tuple[Run, Run]:
    return Run(recycling=False, **fields), Run(recycling=True, **fields)


def main_runs(gpus: Sequence[Gpu], size: Size) -> Pairs:
    return {gpu.name: pair(make_load=published(size), gpu=gpu, kv_share=size.kv_share) for gpu in gpus}


def trace_runs(gpus: Sequence[Gpu], trace: Path, requests: int) -> Pairs:
    return {
        f"{gpu.name} x{TRACE_STRETCH[gpu.name]:g}": pair(
            make_load=partial(read_trace, trace, requests, TRACE_STRETCH[gpu.name]), gpu=gpu, kv_share=TRACE_KV_SHARE
        )
        for gpu in gpus
    }


def sensitivity_runs(requests: int) -> Pairs:
    """The default's neighbours."""
    load = published(Size(requests))
    pairs = {
        f"window {window}, ratio {ratio}": pair(
            make_load=load,
            gpu=A800,
            windows=tuple({**ERNIE_WINDOWS, "window_size": window, "head_wise_swa_ratio": ratio}.items()),
        )
        for ratio in (0.5, 0.75)
        for window in (512, 1024, 4096)
    }
    for budget in (512, 2048):
        pairs[f"default, {budget} tokens a step"] = pair(make_load=load, gpu=A800, max_batched_tokens=budget)
    return pairs


def simulate(pairs: Pairs, jobs: int) -> dict[str, tuple[Outcome, Outcome]]:
    """Serve all of them, ``jobs`` at a time, one in this process; progress of several goes to stderr."""
    from rich.console import Console
    from rich.progress import Progress

    if jobs == 1:
        return {name: (serve(off), serve(on)) for name, (off, on) in pairs.items()}
    context = multiprocessing.get_context("spawn")
    with Progress(console=Console(stderr=True)) as bars, ProcessPoolExecutor(jobs, mp_context=context) as pool:
        bar = bars.add_task("simulating", total=2 * len(pairs))
        futures = {pool.submit(serve, run): (name, run) for name, runs in pairs.items() for run in runs}
        outcomes: dict[tuple[str, bool], Outcome] = {}
        for future in as_completed(futures):
            name, run = futures[future]
            outcome = outcomes[name, run.recycling] = future.result()
            label = f"{name}, recycling {'on' if run.recycling else 'off'}"
            bars.console.print(f"{label}: {outcome.steps:,} steps, {outcome.seconds:,.0f} simulated seconds")
            bars.advance(bar)
    return {name: (outcomes[name, False], outcomes[name, True]) for name in pairs}


def print_outcomes(title: str, results: dict[str, tuple[Outcome, Outcome]]) -> None:
    print(f"\n{title}")
    print(
        f"{'':30}{'tok/s':>8}{'TTFT mean':>11}{'median, s':>10}{'peak reqs':>10}{'preempted':>10}{'hits':>7}"
        f"{'lost hits':>10}{'computed':>9}"
    )
    for name, (off, on) in results.items():
        for label, one in ((f"{name}, off", off), (f"{name}, on", on)):
            lost = one.lost_window_tokens / one.prompt_tokens
            print(
                f"{label:30}{one.output_rate:>8.0f}{one.ttft_s.mean():>11.1f}{np.median(one.ttft_s):>10.1f}"
                f"{one.peak_running:>10}{one.preemptions:>10}{one.hit_rate:>7.1%}{lost:>10.1%}"
                f"{one.computed_share:>9.3f}"
            )
        print(f"{'  on / off':30}{rate_ratio(off, on):>8.2f}{ttft_ratio(off, on):>11.2f}")


def rate_ratio(off: Outcome, on: Outcome) -> float:
    return on.output_rate / off.output_rate


def ttft_ratio(off: Outcome, on: Outcome) -> float:
    return float(on.ttft_s.mean() / off.ttft_s.mean())


# ---- the report ----


def simulated_keys(gpu: Gpu, results: dict[str, tuple[Outcome, Outcome]]) -> dict[str, float]:
    name, (off, on) = gpu.name.split("-")[0].lower(), results[gpu.name]
    return {
        f"simulated_ratio_{name}": rate_ratio(off, on),
        f"simulated_ttft_ratio_{name}": ttft_ratio(off, on),
        f"simulated_rate_{name}": on.output_rate,
    }


def print_assumptions() -> None:
    print()
    print(
        ASSUMED.format(
            weights=weights_of(model_config(ERNIE)).total * BYTES / 1e9,
            share=KV_SHARE,
            budget=Run.max_batched_tokens,
            compute=A800.compute_efficiency,
            memory=A800.memory_efficiency,
            overhead=A800.overhead_s * 1e3,
        )
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few, short requests on an A800 with less memory: seconds")
    parser.add_argument("--pattern", type=Path, default=PATTERN, help="DuoAttention's scores of Llama-3.1-8B")
    parser.add_argument("--trace", type=Path, default=TRACE, help="Mooncake's conversation trace")
    parser.add_argument("--jobs", type=int, default=2, help="simulations at a time")
    args = parser.parse_args(arguments)
    # An H200 is not short of memory before several hundred requests.
    gpus, size, trace_requests = ([A800], QUICK, 20) if args.quick else ([A800, H200], FULL_SIZE, 1000)

    result: dict[str, Any] = print_footprints(*pattern_or_random(args.pattern))
    models = print_models(KV_SHARE * A800.memory, DECODING)
    main_pairs = main_runs(gpus, size)
    sensitivity = {} if args.quick else sensitivity_runs(128)
    traces = trace_runs(gpus, args.trace, trace_requests) if args.trace.exists() else {}
    outcomes = simulate({**main_pairs, **sensitivity, **traces}, 1 if args.quick else args.jobs)

    def of(pairs: Pairs) -> dict[str, tuple[Outcome, Outcome]]:
        return {name: outcomes[name] for name in pairs}

    print_assumptions()
    lengths = f"{size.input_tokens:,} + {size.output_tokens:,} tokens"
    print_outcomes(f"{size.requests:,} requests of {lengths} ({PUBLISHED})", of(main_pairs))
    for gpu in gpus:
        result |= simulated_keys(gpu, outcomes)
    if sensitivity:
        print_outcomes("the first 128 of them, on an A800", of(sensitivity))
    if traces:
        title = f"the first {trace_requests:,} requests of {args.trace.name}, arrivals stretched, prefix caching,"
        print_outcomes(f"{title} {TRACE_KV_SHARE:.0%} of the memory left", of(traces))
        off, on = next(iter(of(traces).values()))
        result |= {"trace_ratio_a800": rate_ratio(off, on), "trace_ttft_ratio_a800": ttft_ratio(off, on)}
        result |= {"trace_hit_rate_off": off.hit_rate, "trace_hit_rate_on": on.hit_rate}
    else:
        print(f"\n{args.trace} is not there: no trace was served; give one with --trace")
    print(json.dumps({**{name: round(value, 3) for name, value in result.items()}, "models": models}))


if __name__ == "__main__":
    main()
