"""Prompts of thousands of tokens, made rather than stored: a chronicle whose first pages its last line asks about.

Text and tokens are the same on every machine and Python: the draws are this module's own, and a digest of the tokens is
kept with what transformers makes of them (see `tests/references/make_long_references.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from support.reference import Answer

from headwise.runtime.loader.tokenizer import Tokenizer

MODEL = "gemma3-270m"

_PEOPLE = (
    "Mara", "Tobias", "Ines", "Yusuf", "Greta", "Anselm", "Priya", "Oskar", "Leonie", "Dario", "Hanna", "Kofi",
    "Ludmila", "Pascal", "Ravi", "Selma", "Tadeusz", "Ursula", "Viktor", "Wanda", "Ximena", "Yvette", "Zoltan", "Alma",
)  # fmt: skip
_DEEDS = (
    "repaired the clock of the town hall", "sold a basket of smoked eel", "drew a map of the northern coast",
    "counted the boats that came home", "wrote a long letter to the governor", "taught the children an old song",
    "painted the door of the chapel blue", "found a coin from the time of the old kings", "lost a bet about the tide",
    "carried water to the upper village", "measured the depth of the harbour", "read aloud from the almanac",
)  # fmt: skip
_WEATHER = (
    "while it rained without end", "on a cold and very clear morning", "as the first snow fell on the quay",
    "in a wind that tore at the sails", "when the fog would not lift", "under a sky full of swallows",
)  # fmt: skip
_REMARKS = (
    "Nobody thought much of it at the time.", "The innkeeper still tells the story.", "It took the whole afternoon.",
    "Some say that the price was far too high.", "The mayor was not amused.", "After that the bell was rung twice.",
)  # fmt: skip


@dataclass(frozen=True)
class LongPrompt:
    """A chronicle's first ``tokens`` tokens or a few more, up to the end of a day, and a question about ``asked``."""

    name: str
    seed: int
    tokens: int
    asked: str


LONG_PROMPTS = (
    LongPrompt("harbour_4000", seed=1, tokens=4000, asked="Greta"),
    LongPrompt("harbour_6000", seed=1, tokens=6000, asked="Wanda"),
    LongPrompt("island_8000", seed=2, tokens=8000, asked="Kofi"),
)
"""The two of one seed have their first 4,000 tokens in common."""


class _Draw:
    """A linear congruential generator (Knuth's MMIX)."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, limit: int) -> int:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._state >> 33) % limit

    def of(self, choices: Sequence[str]) -> str:
        return choices[self.below(len(choices))]


def prompt_ids(prompt: LongPrompt, tokenizer: Tokenizer) -> list[int]:
    """The prompt's tokens. A day's are its own, so that prompts of one seed agree up to the shorter one's last day."""
    draw, day = _Draw(prompt.seed), 0
    ids = tokenizer.encode(f"The chronicle of the town, volume {prompt.seed}.\n")
    while len(ids) < prompt.tokens:
        day += 1
        ids += tokenizer.encode(_entry(draw, day), add_special_tokens=False)
    question = f"\nWhich locker does each key open? The key of {prompt.asked} opens locker number"
    return ids + tokenizer.encode(question, add_special_tokens=False)


def _entry(draw: _Draw, day: int) -> str:
    """A day, and in the first ones a fact that no later one repeats: whose key opens which locker."""
    deed = f"Day {day}: {draw.of(_PEOPLE)} {draw.of(_DEEDS)} {draw.of(_WEATHER)}. {draw.of(_REMARKS)}"
    if day > len(_PEOPLE):
        return deed + "\n"
    return f"{deed} The key of {_PEOPLE[day - 1]} opens locker number {1000 + draw.below(9000)}.\n"


def digest(ids: Sequence[int]) -> str:
    """Of a prompt's tokens, to notice that they are not those which a reference was made for."""
    return sha256(np.array(ids, dtype="<i4").tobytes()).hexdigest()[:16]


def long_answers(tokenizer: Tokenizer) -> dict[str, Answer]:
    """The prompts and their greedy tokens, by name."""
    path = Path(__file__).parent.parent / "references" / f"{MODEL}-long.json"
    entries = {entry["name"]: entry for entry in json.loads(path.read_text())}
    answers = {}
    for prompt in LONG_PROMPTS:
        ids, entry = prompt_ids(prompt, tokenizer), entries[prompt.name]
        assert digest(ids) == entry["digest"], f"{prompt.name} is not the prompt that its reference was made for"
        answers[prompt.name] = Answer(prompt.name, ids, entry["output_ids"], entry["gaps"], [], [], [], [])
    return answers
