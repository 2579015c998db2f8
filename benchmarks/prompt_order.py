"""Short questions beside long prompts, in one engine on this CPU: how long each waits for its first token.

Books come several at once now and then, and short questions all the time; nothing is cached. The books alone take half
of the time of the slowest of those compared. Compared are headwise's two orders of prompts (`prompt_order`), which
differ in nothing else, and vLLM, which has them in the order in which they come; it comes with `make peers`, and is
left out where it is missing. All serve the same tokens at the same times, in turns; SmolLM2 in bfloat16.

    python benchmarks/prompt_order.py [--quick] [--rounds 3] [--books 6] [--engine KEY=VALUE]

The last line is JSON: `ttft_s`, by runtime and kind of prompt (`questions`, `books`) median and 90th percentile of the
seconds to a first token, medians over the rounds; `over_arrival` and `over_vllm`, those of the fair order over the
others', medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from peers import PEERS_PYTHON, THREADS, started
from peers import peers as specs_of_peers
from prompts import tokens
from runtimes.control import Process, tell
from runtimes.model_files import find_model
from runtimes.ours import add_engine_options, engine_fields, headwise_spec

from headwise.runtime.cli.terminal import progress

MODEL = "smollm2-135m"
FAIR, ARRIVAL, VLLM = "fair", "arrival", "vllm_bf16"
MAX_TOKENS = 8192
"""What the model was trained for."""
KINDS = ("questions", "books")
PERCENTS = (50, 90)

Times = dict[str, list[float]]
"""Percentiles of `PERCENTS` of seconds to a first token, by kind of prompt."""


@dataclass(frozen=True)
class Load:
    """books:    in a round, of ``book`` tokens, ``together`` at once; ``questions`` of ``question`` tokens come to each
    answer:   tokens of each output
    """

    books: int = 6
    together: int = 3
    book: int = 6000
    questions: int = 12
    question: int = 96
    answer: int = 16

    def prompts(self, round_: int, book_s: float) -> tuple[list[list[int]], list[float], list[str]]:
        """In the order in which they come, when, and of which kind each is. book_s: of one alone, in the slowest"""
        rng = np.random.default_rng([5, round_])
        span = 2 * book_s * self.books
        comes = [2 * book_s * (number - number % self.together) for number in range(self.books)]
        books = [(at, KINDS[1], tokens(rng, self.book)) for at in comes]
        times = np.sort(rng.uniform(0, span, self.questions * self.books)).tolist()
        questions = [(at, KINDS[0], tokens(rng, self.question)) for at in times]
        times, kinds, prompts = zip(*sorted(books + questions), strict=True)
        return list(prompts), list(times), list(kinds)


FULL = Load()
QUICK = Load(books=2, together=2, book=300, questions=3, question=16, answer=2)


def seconds_of_a_book(running: Mapping[str, Process], load: Load) -> float:
    """Of the slowest, once its kernels and memory are there."""
    slowest = 0.0
    for number, (name, process) in enumerate(running.items()):
        rng = np.random.default_rng([7, number])
        for _ in range(2):
            (served,) = process.serve([tokens(rng, load.book)], 1)
        slowest = max(slowest, served.marks[0][0])
        tell(f"{name}: a book takes {served.marks[0][0]:.2f} s")
    return slowest


def measured(process: Process, load: Load, round_: int, book_s: float) -> Times:
    prompts, at, kinds = load.prompts(round_, book_s)
    served = process.serve(prompts, load.answer, at)
    first = {kind: [one.marks[0][0] for one, its in zip(served, kinds, strict=True) if its == kind] for kind in KINDS}
    return {kind: np.percentile(seconds, PERCENTS).tolist() for kind, seconds in first.items()}


def over(found: Mapping[str, list[Times]], other: str) -> dict[str, list[float]]:
    """Medians of the rounds' ratios."""
    return {
        kind: [
            statistics.median(
                mine[kind][index] / theirs[kind][index] for mine, theirs in zip(found[FAIR], found[other], strict=True)
            )
            for index in range(len(PERCENTS))
        ]
        for kind in KINDS
    }


def show(found: Mapping[str, list[Times]], ttft_s: Mapping[str, Times]) -> None:
    columns = [f"{kind}, p{percent}" for kind in KINDS for percent in PERCENTS]
    print(f"\n{'seconds to a first token':>26}" + "".join(f"{column:>16}" for column in columns))
    for name, times in ttft_s.items():
        print(f"{name:>26}" + "".join(f"{each:>16.3f}" for kind in KINDS for each in times[kind]))
    for name in found:
        if name != FAIR:
            ratios = [each for kind in KINDS for each in over(found, name)[kind]]
            print(f"{f'fair over {name}':>26}" + "".join(f"{ratio:>16.2f}" for ratio in ratios))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--books", type=int, default=FULL.books, help="of a round")
    add_engine_options(parser)
    parser.add_argument("--peers-python", type=Path, default=PEERS_PYTHON, help="of the environment with vLLM")
    parser.add_argument("--quick", action="store_true", help="two short books, headwise alone: seconds")
    args = parser.parse_args(arguments)
    rounds, load = (1, QUICK) if args.quick else (args.rounds, replace(FULL, books=args.books))
    most, cache = (1024, "64MiB") if args.quick else (MAX_TOKENS, "1GiB")
    base = {"model": MODEL, "dtype": "bfloat16", "max_model_len": most, "kv_cache": cache, **engine_fields(args)}
    with progress() as bar:
        files = find_model(MODEL, bar)
    specs = {order: headwise_spec(**base, prompt_order=order) for order in (FAIR, ARRIVAL)}
    specs |= specs_of_peers(args.peers_python, () if args.quick else (VLLM,), files, most, slots=16)
    found: dict[str, list[Times]] = {name: [] for name in specs}
    with started(specs) as running:
        book_s = seconds_of_a_book(running, load)
        for round_ in range(rounds):
            for name in list(running)[round_ % len(running) :] + list(running)[: round_ % len(running)]:
                found[name].append(measured(running[name], load, round_, book_s))
                tell(f"round {round_ + 1} of {rounds}: {name}")
        about = {name: process.about for name, process in running.items()}
    ttft_s = {
        name: {kind: np.median([times[kind] for times in all_], axis=0).tolist() for kind in KINDS}
        for name, all_ in found.items()
    }
    show(found, ttft_s)
    result = {
        "ttft_s": ttft_s,
        "over_arrival": over(found, ARRIVAL),
        **({"over_vllm": over(found, VLLM)} if VLLM in found else {}),
        "about": about,
        "book_s": book_s,
        "load": vars(load),
        "rounds": rounds,
        "cores": THREADS,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
