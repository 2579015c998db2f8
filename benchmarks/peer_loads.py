"""Engines that fetch blocks from each other, and prefill apart from decode, over a trace of conversations.

    python benchmarks/peer_loads.py [--quick] [--trace FILE.jsonl.gz] [--requests N] [--load 1.0] [--jobs 2]

Eight simulated engines serve the trace behind the scheduler's router, as in `routing.py`: once as if engines knew
nothing of each other (``today``), once with peer loads over a fast link, over a slow one, and without shared storage;
and with some engines for prompts and the others to decode (``5 + 3``: five for prompts). ``moved`` is what engines
fetched from each other. Where a prompt is computed apart, hits are those of the engine that computes it.

The table says where it does not pay: a row that is no better than the one it is compared with. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from capacity import TRACE
from routing import ENGINES, hardware, print_assumptions, run
from simulation.machine import StepTime

from headwise.runtime.frontend.routing.base import EngineRole

SLOW_BYTES_S = 1.25e9
"""Ten gigabit Ethernet."""


@dataclass(frozen=True)
class Case:
    """bytes_s:   between two hosts; 0: engines do not fetch from each other
    has_storage: whether there is shared storage
    prefill:     engines for prompts, of all; 0: all serve whole requests
    over:        the case that it is compared with
    """

    bytes_s: float = 12.5e9
    has_storage: bool = True
    prefill: int = 0
    over: str = "today"


TODAY, WITHOUT = "today", "today, no storage"
CASES = {
    TODAY: Case(0.0),
    "peer loads": Case(),
    "peer loads, slow link": Case(SLOW_BYTES_S),
    WITHOUT: Case(0.0, has_storage=False, over=WITHOUT),
    "peer loads, no storage": Case(has_storage=False, over=WITHOUT),
    "5 + 3": Case(prefill=5),
    "6 + 2": Case(prefill=6),
    "7 + 1": Case(prefill=7),
}


@dataclass(frozen=True)
class Served:
    """bytes_moved: between engines
    tbt_p99_s:   time between two tokens
    output_s:    output tokens a second, from the first arrival to the last end
    """

    hit_rate: float
    ttft_s: tuple[float, float, float]
    ttft_mean_s: float
    tbt_p99_s: float
    tokens_s: float
    bytes_moved: float
    decision_us: float


def serve(name: str, trace: Path, count: int, load: float) -> Served:
    case, machine = CASES[name], hardware()
    kv_bytes = StepTime(machine.gpu, machine.model).kv_bytes
    machine = replace(
        machine,
        storage=machine.storage if case.has_storage else 0,
        peer_token_s=kv_bytes / case.bytes_s if case.bytes_s else 0.0,
    )
    kinds: tuple[EngineRole, EngineRole] = ("decode", "prefill")
    roles = {f"engine-{number}": kinds[number < case.prefill] for number in range(ENGINES)} if case.prefill else {}
    found = run("cache_aware", trace, count, load, machine, case.bytes_s > 0, roles)
    p50, p90, p99 = np.percentile(found.ttft_s, (50, 90, 99))
    return Served(
        found.hit_rate if not case.prefill else found.expected_hits,
        (float(p50), float(p90), float(p99)),
        float(found.ttft_s.mean()),
        found.gap_s(99),
        found.tokens / found.served_s,
        found.tiers[3] * found.prompt_tokens * kv_bytes,
        found.decision_us,
    )


def show(served: dict[str, Served]) -> None:
    print(
        f"{'':24}{'hits':>7}{'TTFT p50':>10}{'p90':>8}{'p99':>8}{'mean, s':>9}{'TBT p99, ms':>13}{'tokens/s':>10}"
        f"{'moved, GB':>11}{'decision, us':>14}  does not pay for"
    )
    for name, one in served.items():
        p50, p90, p99 = one.ttft_s
        print(
            f"{name:24}{one.hit_rate:>7.1%}{p50:>10.2f}{p90:>8.2f}{p99:>8.2f}{one.ttft_mean_s:>9.2f}"
            f"{one.tbt_p99_s * 1e3:>13.1f}{one.tokens_s:>10.0f}{one.bytes_moved / 1e9:>11.0f}{one.decision_us:>14.0f}"
            f"  {', '.join(losses(one, served[CASES[name].over]))}"
        )


def losses(one: Served, other: Served) -> list[str]:
    """What is worse by more than a hundredth than in the case that it is compared with."""
    pairs = {
        "TTFT p50": (one.ttft_s[0], other.ttft_s[0]),
        "p90": (one.ttft_s[1], other.ttft_s[1]),
        "p99": (one.ttft_s[2], other.ttft_s[2]),
        "TBT p99": (one.tbt_p99_s, other.tbt_p99_s),
        "tokens/s": (other.tokens_s, one.tokens_s),
    }
    return [name for name, (ours, theirs) in pairs.items() if ours > 1.01 * theirs]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first 60 requests: seconds")
    parser.add_argument("--trace", type=Path, default=TRACE, help="Mooncake's conversation trace")
    parser.add_argument("--requests", type=int, default=1 << 30, help="so many of its requests, from the first on")
    parser.add_argument("--load", type=float, default=1.0, help="how many times as fast as in the trace they arrive")
    parser.add_argument("--jobs", type=int, default=2, help="simulations at a time")
    args = parser.parse_args(arguments)
    if not args.trace.exists():
        print(f"{args.trace} is not there: nothing was served; give a trace with --trace")
        print(json.dumps({"hit_rate": {}, "ttft_p50_s": {}, "tbt_p99_s": {}}))
        return
    one = partial(serve, trace=args.trace, count=60 if args.quick else args.requests, load=args.load)
    if args.quick or args.jobs == 1:
        served = {name: one(name) for name in CASES}
    else:
        with ProcessPoolExecutor(args.jobs) as pool:
            served = dict(zip(CASES, pool.map(one, CASES), strict=True))
    print_assumptions()
    print(f"Slow link: {SLOW_BYTES_S / 1e9:g} GB/s.\n\n{args.trace.name}, arriving {args.load:g} times as fast")
    show(served)
    print(
        json.dumps(
            {
                "hit_rate": {name: round(one.hit_rate, 4) for name, one in served.items()},
                "ttft_p50_s": {name: round(one.ttft_s[0], 3) for name, one in served.items()},
                "ttft_p90_s": {name: round(one.ttft_s[1], 3) for name, one in served.items()},
                "tbt_p99_s": {name: round(one.tbt_p99_s, 4) for name, one in served.items()},
                "tokens_per_s": {name: round(one.tokens_s, 1) for name, one in served.items()},
                "moved_gb": {name: round(one.bytes_moved / 1e9, 1) for name, one in served.items()},
                "does_not_pay": {name: losses(one, served[CASES[name].over]) for name, one in served.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
