"""What guesses bring (`speculation`): tokens a second of decodes with them, over those without.

Two engines with the same weights serve the same requests in turns, greedily. What is asked for: to repeat a text, as
edits of texts and code mostly do; answers about a handbook that is the prompt, which quote it here and there; and
stories, which repeat nothing but turns of phrase. Time counts while all requests decode: from when the last one has its
first token, until the first one is through.

    python benchmarks/speculation.py [--quick] [--rounds 5] [--tokens 200] [--guesses 8]

The last line is JSON: `cases`, each with its weights, task and number of requests, `plain` and `guessed` tokens a
second, `ratio`, the median over the rounds, and how many guesses there were for each token, and how many were right.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from decodes import decode_rate

from headwise import EngineConfig, LocalEngine

MODEL = "smollm2-135m"
HANDBOOK = Path(__file__).resolve().parent / "data" / "perplexity.txt"
QUESTIONS = (
    "When is the museum open, and what does a ticket cost?",
    "What is there to see on the ground floor?",
    "Tell me all about the lighthouse room.",
    "What should visitors with children know?",
)
STORIES = (
    "Write a story about a lighthouse keeper and a storm.",
    "Explain how a refrigerator works.",
    "Give me ten ideas for a birthday party.",
    "What is the difference between weather and climate?",
)
MOST = len(QUESTIONS)
QUICK_PARAGRAPHS = 1 + MOST


@dataclass(frozen=True)
class Case:
    """plain, guessed: tokens a second, medians, as is their ratio; drafts, right: of each token of the output"""

    weights: str
    task: str
    requests: int
    plain: float
    guessed: float
    ratio: float
    drafts: float
    right: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--guesses", type=int, default=8, help="most of a sequence in a step")
    parser.add_argument("--quick", action="store_true", help="a few tokens, one round: seconds")
    args = parser.parse_args(arguments)
    rounds, tokens, weights, numbers = args.rounds, args.tokens, ["bfloat16", "gguf"], [1, MOST]
    asked = tasks()
    if args.quick:
        rounds, tokens, weights, numbers = 1, 24, ["gguf"], [1]
        asked = tasks(QUICK_PARAGRAPHS)
    warm_ups = 0 if args.quick else 1
    print(f"{'weights':>9} {'task':>8} {'requests':>8} {'plain, tok/s':>12} {'guessed':>8} {'ratio':>6} {'right':>6}")
    cases = list[Case]()
    for each in weights:
        cases += measured(each, asked, rounds, warm_ups, tokens, args.guesses, numbers)
    print(json.dumps({"rounds": rounds, "guesses": args.guesses, "cases": [asdict(case) for case in cases]}))


def tasks(most_paragraphs: int | None = None) -> dict[str, list[str]]:
    """What is asked, for `MOST` requests each, of so many paragraphs; None: of all that there are."""
    title, *paragraphs = HANDBOOK.read_text(encoding="utf-8").split("\n\n")[:most_paragraphs]
    handbook = "\n\n".join([title, *paragraphs])
    return {
        "repeats": [f"{paragraphs[index]}\n\nRepeat the text above word for word." for index in range(MOST)],
        "answers": [f"{handbook}\n\n{question}" for question in QUESTIONS],
        "stories": list(STORIES),
    }


def measured(
    weights: str,
    tasks: dict[str, list[str]],
    rounds: int,
    warm_ups: int,
    tokens: int,
    guesses: int,
    numbers: Sequence[int],
) -> Iterator[Case]:
    """Cases of weights of one kind. warm_ups: rounds before those that count"""
    config = {"model": MODEL, "dtype": "bfloat16", "weights_dtype": weights, "prefix_caching": False}
    with ExitStack() as stack:
        plain, guessing = (
            stack.enter_context(
                LocalEngine(EngineConfig.from_dict({**config, "speculation": most}), worker_process=False)
            )
            for most in (0, guesses)
        )
        for task, asked in tasks.items():
            for requests in numbers:
                rates, before = list[tuple[float, float]](), guessing.core.stats()
                for turn in range(warm_ups + rounds):
                    pair = decode_rate(plain, asked[:requests], tokens), decode_rate(guessing, asked[:requests], tokens)
                    if turn >= warm_ups:
                        rates.append(pair)
                slow, fast = (statistics.median(column) for column in zip(*rates, strict=True))
                ratio = statistics.median(second / first for first, second in rates)
                found, said = guessing.core.stats(), guessing.core.stats()["output_tokens"] - before["output_tokens"]
                drafts, right = (
                    (found["speculation"][name] - before["speculation"][name]) / said
                    for name in ("drafted", "accepted")
                )
                case = Case(weights, task, requests, slow, fast, ratio, drafts, right)
                print(
                    f"{weights:>9} {task:>8} {requests:>8} {slow:>12.0f} {fast:>8.0f} {ratio:>6.2f} {right:>6.2f}",
                    flush=True,
                )
                yield case


if __name__ == "__main__":
    main()
