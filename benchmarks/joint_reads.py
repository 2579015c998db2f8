"""What decodes gain that read what they share once for all: tokens a second, over those when each reads it by itself.

Requests go on from one cached prefix, each with a few tokens of its own, and decode together; the same engine serves
them in turns, once told of what they share, once not. Time counts while all of them decode. Both ways give the same
tokens.

    python benchmarks/joint_reads.py [--quick] [--rounds 5] [--tokens 64]

The last line is JSON: `cases`, each with its KV dtype, tokens of the prefix and number of requests, `alone` and `joint`
tokens a second, and `ratio`, the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from decodes import decode_rate

from headwise import EngineConfig, LocalEngine
from headwise.cache_controller.joint_reads import JointReads
from headwise.runtime.protocol.request import SamplingParams

MODEL = "smollm2-135m"
OWN_TOKENS = 16
"""Of each prompt, behind the prefix."""
NEVER = 1 << 30
"""Tokens that no requests share."""


@dataclass(frozen=True)
class Case:
    """alone, joint: tokens a second, medians, as is their ratio"""

    kv_dtype: str
    prefix: int
    requests: int
    alone: float
    joint: float
    ratio: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--quick", action="store_true", help="a short prefix, few tokens, one round: seconds")
    args = parser.parse_args(arguments)
    rounds, tokens, dtypes, prefixes, numbers = args.rounds, args.tokens, ["float32", "bfloat16"], [2000, 7500], [4, 16]
    if args.quick:
        rounds, tokens, dtypes, prefixes, numbers = 1, 8, ["float32"], [600], [2, 4]
    print(f"{'KV':>8} {'prefix':>6} {'requests':>8} {'alone, tok/s':>12} {'joint':>6} {'ratio':>6}")
    cases = list[Case]()
    for kv_dtype in dtypes:
        config = {"model": MODEL, "dtype": "bfloat16", "kv_dtype": kv_dtype, "kv_cache": "1GiB"}
        with LocalEngine(EngineConfig.from_dict(config), worker_process=False) as engine:
            for prefix in prefixes:
                for requests in numbers:
                    cases.append(measured(engine, kv_dtype, prefix, requests, rounds, tokens))
    print(json.dumps({"rounds": rounds, "model": MODEL, "cases": [asdict(case) for case in cases]}))


def measured(engine: LocalEngine, kv_dtype: str, prefix: int, requests: int, rounds: int, tokens: int) -> Case:
    rng = np.random.default_rng(prefix)
    shared = rng.integers(1000, 30000, prefix).tolist()
    prompts = [[*shared, *rng.integers(1000, 30000, OWN_TOKENS).tolist()] for _ in range(requests)]
    engine.generate([shared], SamplingParams(temperature=0.0, max_tokens=1))
    rates = list[tuple[float, float]]()
    resources = engine.core.resources
    for _ in range(rounds):
        pair = list[float]()
        for reads in (JointReads(resources.cache, NEVER), JointReads(resources.cache)):
            resources.steps.joint_reads = reads
            pair.append(decode_rate(engine, prompts, tokens))
        rates.append((pair[0], pair[1]))
    alone, joint = (statistics.median(column) for column in zip(*rates, strict=True))
    case = Case(kv_dtype, prefix, requests, alone, joint, statistics.median(b / a for a, b in rates))
    print(f"{kv_dtype:>8} {prefix:>6} {requests:>8} {alone:>12.0f} {joint:>6.0f} {case.ratio:>6.2f}", flush=True)
    return case


if __name__ == "__main__":
    main()
