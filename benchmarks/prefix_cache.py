"""What a cached prefix saves: time to first token of a request whose prefix was served before, over that of the first.

    python benchmarks/prefix_cache.py [--quick] [--prefix-tokens 1500] [--prefixes 7]

For each of several distinct prefixes, two requests with the prefix and a short text of their own are served, one
after the other, by an engine in this process. The last line is JSON; `ttft_ratio` is the median over the prefixes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence

import numpy as np

from headwise.runtime.client.local_engine import LocalEngine
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.protocol.request import GenerationResult, SamplingParams

OWN_TOKENS = 32
"""Tokens of each request behind the shared prefix."""


def serve(engine: LocalEngine, prompt: np.ndarray) -> GenerationResult:
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    return engine.generate([prompt.tolist()], sampling)[0]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prefix-tokens", type=int)
    parser.add_argument("--prefixes", type=int)
    parser.add_argument("--quick", action="store_true", help="two short prefixes: seconds")
    args = parser.parse_args(arguments)
    prefix_tokens = args.prefix_tokens or (256 if args.quick else 1500)
    rng = np.random.default_rng(0)
    cold, cached, hits = [], [], []
    with LocalEngine(EngineConfig(model=args.model, kv_cache="64MiB" if args.quick else "1GiB")) as engine:
        serve(engine, rng.integers(1000, 30000, min(prefix_tokens, 600)))  # first calls of the kernels at this size
        print(f"{'prefix':>6} {'first TTFT, ms':>15} {'second TTFT, ms':>16} {'cached tokens':>14} {'ratio':>7}")
        for index in range(args.prefixes or (2 if args.quick else 7)):
            prefix = rng.integers(1000, 30000, prefix_tokens)
            first, second = (serve(engine, np.append(prefix, rng.integers(1000, 30000, OWN_TOKENS))) for _ in range(2))
            cold.append(first.timings.ttft_s)
            cached.append(second.timings.ttft_s)
            hits.append(second.usage.cached_tokens)
            print(
                f"{index:>6} {1000 * cold[-1]:>15.1f} {1000 * cached[-1]:>16.1f} "
                f"{second.usage.cached_tokens:>14} {cached[-1] / cold[-1]:>7.3f}"
            )
    result = {
        "ttft_ratio": statistics.median(second / first for first, second in zip(cold, cached, strict=True)),
        "cold_ttft_s": statistics.median(cold),
        "cached_ttft_s": statistics.median(cached),
        "prefix_tokens": prefix_tokens,
        "cached_tokens": statistics.median(hits),
        "prefixes": len(cold),
        "model": args.model,
        "cores": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
