"""Drafts by a model's own layer (multi-token prediction) beside vLLM's on this machine's CPU: the same weights, in turns.

    python benchmarks/peers_drafts.py [--quick] [--rounds 3] [--right 0.85] [--drafts 3] [--engine KEY=VALUE]

The model is of random numbers, and as often right as `--right` says, which may be given several times
(`runtimes.random_drafting`): published models' first drafts are right 0.8 to 0.9 times (DeepSeek-V3, arXiv 2412.19437).
Both runtimes compute in bfloat16, greedily, each with drafts and without. Rates are those while all requests decode.

The last line is JSON: `cases`, of each share and scenario tokens a second, medians over the rounds, and ratios, medians
likewise: `over_plain` of each runtime with drafts over itself without, `over_vllm` with drafts and without.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers import PEERS_PYTHON, Measured, measure
from peers import peers as specs_of_peers
from runtimes.control import Spec
from runtimes.model_files import ModelFiles, find_drafting
from runtimes.ours import add_engine_options, engine_fields, headwise_spec
from runtimes.scenarios import Scenario, decode_rate

from headwise.runtime.cli.terminal import progress

MAX_TOKENS = 1024
RIGHT = (0.85, 0.5, 0.0)
OURS, OURS_DRAFTING, VLLM, VLLM_DRAFTING = "headwise", "headwise_mtp", "vllm", "vllm_mtp"


def scenarios(quick: bool) -> list[Scenario]:
    """Of few tokens, as what such a model says runs in circles sooner or later, and then other guesses would be right."""
    if quick:
        return [Scenario("decode1", "decode, batch 1", 1, 8, 16, decode_rate)]
    return [
        Scenario("decode1", "decode, batch 1", 1, 32, 128, decode_rate),
        Scenario("decode4", "decode, 4 requests at 256 tokens", 4, 256, 96, decode_rate, repeat=True),
        Scenario("decode16", "decode, 16 requests at 256 tokens", 16, 256, 64, decode_rate, repeat=True),
    ]


def runtimes(directory: Path, drafts: int, python: Path, engine: Mapping[str, Any]) -> dict[str, Spec]:
    base = {"model": str(directory), "max_model_len": MAX_TOKENS, "kv_cache": "1GiB", **engine}
    files = ModelFiles(str(directory), directory, directory)
    found = {OURS: headwise_spec(**base), OURS_DRAFTING: headwise_spec(**{**base, "speculation": drafts})}
    theirs = specs_of_peers(python, ("vllm_bf16",) if python.exists() else (), files, MAX_TOKENS, slots=16)
    for spec in theirs.values():
        options = {**spec.options, "drafts": drafts}
        found |= {VLLM: spec, VLLM_DRAFTING: Spec(spec.module, spec.python, options, spec.environment)}
    return found


def over(found: Mapping[str, Measured], first: str, second: str, key: str) -> float | None:
    """The median ratio of both, if both were measured."""
    if first not in found or second not in found:
        return None
    pairs = zip(found[first].rates[key], found[second].rates[key], strict=True)
    return round(statistics.median(a / b for a, b in pairs), 3)


def cases(right: float, found: Mapping[str, Measured], todo: Sequence[Scenario]) -> list[dict[str, Any]]:
    return [
        {
            "right": right,
            "scenario": scenario.key,
            "rates": {name: measured.medians[scenario.key] for name, measured in found.items()},
            "over_plain": {
                "headwise": over(found, OURS_DRAFTING, OURS, scenario.key),
                "vllm": over(found, VLLM_DRAFTING, VLLM, scenario.key),
            },
            "over_vllm": {
                "plain": over(found, OURS, VLLM, scenario.key),
                "drafting": over(found, OURS_DRAFTING, VLLM_DRAFTING, scenario.key),
            },
        }
        for scenario in todo
    ]


def show(right: float, names: Sequence[str], todo: Sequence[Scenario], rows: Sequence[Mapping[str, Any]]) -> None:
    print(f"\n{right:.0%} of drafts are right\n{'tokens a second':>40}" + "".join(f"{name:>14}" for name in names))
    for scenario, row in zip(todo, rows, strict=True):
        print(f"{scenario.what:>40}" + "".join(f"{row['rates'][name]:14.1f}" for name in names))
        ratios = ", ".join(
            f"{what} {name} {ratio:.2f}"
            for what in ("over_plain", "over_vllm")
            for name, ratio in row[what].items()
            if ratio is not None
        )
        print(f"{'':>40}  {ratios}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--right", type=float, action="append", help=f"share of right drafts; default: {RIGHT}")
    parser.add_argument("--drafts", type=int, default=3, help="most of a sequence in a step")
    add_engine_options(parser)
    parser.add_argument("--peers-python", type=Path, default=PEERS_PYTHON, help="of the environment with vLLM")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round, headwise alone: seconds")
    args = parser.parse_args(arguments)
    todo, shares = scenarios(args.quick), args.right or (RIGHT[:1] if args.quick else RIGHT)
    engine = {"dtype": "bfloat16", **engine_fields(args)}
    python = Path("none") if args.quick else args.peers_python
    rows: list[dict[str, Any]] = []
    for right in shares:
        with progress() as bar:
            directory = find_drafting(right, bar, is_tiny=args.quick)
        found = measure(runtimes(directory, args.drafts, python, engine), todo, 1 if args.quick else args.rounds)
        rows += cases(right, found, todo)
        show(right, list(found), todo, rows[-len(todo) :])
    about = {name: measured.about for name, measured in found.items()}
    print(json.dumps({"rounds": args.rounds, "drafts": args.drafts, "cases": rows, "about": about}))


if __name__ == "__main__":
    main()
