"""Long inputs for calibration, made up from a seed: a town's chronicle in which pass keys are hidden.

The chronicle's names, trades and places come again and again, so that attention has far things to look at; the pass
keys are asked for at the end, all of them, one after the other. The text to judge perplexity by has other sentences.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ConfigError

_PEOPLE = (
    "Agnes Thorne", "Bartholomew Quill", "Clara Venn", "Dorian Ashby", "Edith Marlow", "Felix Oakes", "Greta Lund",
    "Hector Pym", "Isolde Crane", "Jasper Wren", "Katrin Holt", "Leopold Finch", "Mabel Stroud", "Nathaniel Grey",
)  # fmt: skip
_TRADES = (
    "baker", "ferryman", "clockmaker", "schoolteacher", "printer", "weaver", "gardener", "locksmith", "surveyor",
    "beekeeper", "carpenter", "glazier",
)  # fmt: skip
_PLACES = (
    "the old mill", "the north gate", "the fish market", "the chapel yard", "the salt road", "the upper bridge",
    "the town library", "the brickworks", "the orchard hill", "the ferry landing",
)  # fmt: skip
_THINGS = (
    "a cartload of timber", "three barrels of cider", "a broken weather vane", "the minutes of the last meeting",
    "a map of the river", "two lost goats", "a letter without a sender", "a crate of oranges", "an unpaid bill",
    "the choir's new songbooks",
)  # fmt: skip
_CHRONICLE = (
    "On the {n}th of {month}, {a}, the {t}, brought {x} to {p}.",
    "{a} and {b} could not agree on who should repair {p}, and so nobody did.",
    "It rained for {n} days, and the path to {p} was under water.",
    "Near {p} somebody found {x}, which {a} said belonged to {b}.",
    "The council asked {a} for an account of {x}.",
    "{b}, who had been a {t} before the flood, now kept the keys of {p}.",
    "At noon the bells rang, and {a} closed the shop to walk to {p}.",
    "Nobody had seen {a} since {month}, when {x} was sold to {b}.",
    "The {t} from {p} lent {n} coins to {b} and asked for no receipt.",
    "In {month} the children of {a} planted {n} young trees behind {p}.",
    "A stranger came over {p} and asked for {a}, the {t}.",
    "{a} wrote down the price of {x} and pinned the paper to the door of {p}.",
    "That winter {b} mended the roof of {p} with the help of {a}.",
    "For {n} evenings {a} told the same story about {x}.",
)
_HELD_OUT = (
    "{a} kept a ledger of every visitor to {p}, and in {month} it had {n} names in it.",
    "When the {t} fell ill, {b} took over the work at {p} without a word.",
    "There was a dispute over {x}: {a} had paid for it, but {b} had carried it home.",
    "The road past {p} was closed in {month}, which cost {a} {n} days of trade.",
    "{b} remembered that {a} had once been a {t}, and asked for advice about {x}.",
    "By {month} the repairs on {p} were done, and {a} sent the council a bill for {n} coins.",
    "What {a} liked best about {p} was the quiet; what {b} liked best was the view.",
    "After the fair, {x} was left behind at {p}, and the {t} took care of it.",
)
_PROSE = (
    "A river that is left alone does not keep to one bed. In flood it carries gravel from the hills and drops it where "
    "the valley widens; the bar grows, the water goes around it, and what was the bank is cut away. After some years "
    "the bar has willows on it, and a farmer who looks at an old map wonders where his grandfather's meadow went. "
    "Engineers who straighten such a river gain land and lose time: the water that used to wander for two days now "
    "arrives within a few hours, all of it together, at the bridge of the next town.",
    "To tune a piano is to spread an error evenly. Twelve perfect fifths do not make seven octaves; they overshoot by "
    "about a quarter of a semitone, and that surplus must go somewhere. Older tuners hid it in an interval that nobody "
    "played, and the others rang pure. Now each fifth is made a little too narrow, by an amount that few people hear, "
    "so that every key is equally usable and none is quite right.",
    "Bread dough rises because yeast cannot finish its meal. The flour's starch is cut into sugar by enzymes that wake "
    "up when the flour is wetted; the yeast eats the sugar, and without enough air it makes gas and alcohol of it. "
    "Gluten, the net of protein that kneading has stretched, holds the gas in small rooms. In the oven the rooms grow "
    "once more, the walls set, the alcohol leaves with the steam, and what stays is a foam that one can cut.",
    "Before there were clocks at sea, a captain knew how far north he was and could but guess how far east. The height "
    "of the pole star gives the one; the other is a difference of time, and a pendulum is of no use on a rolling "
    "deck. The prize for a method went, late and with bad grace, to a carpenter who built a watch that kept time in "
    "heat and cold. Astronomers had offered the moon instead, with tables and an hour of arithmetic.",
)
_MONTHS = ("January", "March", "April", "June", "August", "October", "November")
_COLOURS = ("red", "green", "blue", "white", "black", "yellow", "silver", "brown", "golden", "purple")
_OWNERS = ("door", "box", "safe", "gate", "boat", "cellar", "chest", "tower", "garden", "barn")


MAX_KEYS = len(_COLOURS)


class Encoder(Protocol):
    """The part of a tokenizer that is needed here."""

    bos_token_id: int | None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class PasskeyInput:
    """A text with pass keys hidden in it, and all of them asked for at its end.

    token_ids: ``int32 [tokens]``, the right answers included
    answers:   token ranges ``(start, stop)`` of the answers; token ``i`` is predicted by the query at ``i - 1``
    """

    token_ids: NDArray[np.int32]
    answers: tuple[tuple[int, int], ...]

    @property
    def retrieving(self) -> NDArray[np.int64]:
        """The query positions that must find a pass key."""
        return np.concatenate([np.arange(start - 1, stop - 1) for start, stop in self.answers])


def passkey_input(encoder: Encoder, tokens: int, keys: int, seed: int) -> PasskeyInput:
    """An input of ``tokens`` tokens, or a few less, with ``keys`` pass keys evenly spread over its chronicle.

    Raises `ConfigError` if there are more keys than names for them, or no room for so many.
    """
    if not 1 <= keys <= MAX_KEYS:
        raise ConfigError(f"{keys} pass keys cannot be hidden in one input; choose from 1 to {MAX_KEYS}")
    draw = random.Random(seed)
    # No two names share a word: what is measured is retrieval, not how well a small model tells them apart.
    names = zip(draw.sample(_COLOURS, keys), draw.sample(_OWNERS, keys), strict=True)
    pairs = [(f"{colour} {owner}", str(draw.randrange(10_000, 100_000))) for colour, owner in names]
    needles = [
        _ids(encoder, f" Remember this: the pass key of the {name} is {key}. The {name} opens with {key}.")
        for name, key in pairs
    ]
    draw.shuffle(pairs)
    questions = [(_ids(encoder, f" The pass key of the {name} is"), _ids(encoder, f" {key}")) for name, key in pairs]
    text, stop = _start(encoder), _ids(encoder, ".")
    asked = sum(len(question) + len(answer) + len(stop) for question, answer in questions)
    room = tokens - len(text) - asked - sum(map(len, needles))
    if room < keys + 1:
        raise ConfigError(f"{tokens} tokens have no room for {keys} pass keys; use longer inputs or fewer keys")
    for needle in needles:
        text += _story(encoder, draw, _CHRONICLE, room // (keys + 1)) + needle
    text += _story(encoder, draw, _CHRONICLE, tokens - asked - len(text))
    answers = []
    for question, answer in questions:
        text += question
        answers.append((len(text), len(text) + len(answer)))
        text += answer + stop
    return PasskeyInput(np.array(text, dtype=np.int32), tuple(answers))


def held_out_text(encoder: Encoder, tokens: int, seed: int) -> NDArray[np.int32]:
    """``int32 [tokens]``: sentences that no pass key input has, and paragraphs of plain prose between them."""
    draw = random.Random(seed)
    text, paragraphs = _start(encoder), draw.sample(_PROSE, len(_PROSE))
    prose = [_ids(encoder, f"\n\n{paragraph}\n\n") for paragraph in paragraphs]
    for paragraph in prose:
        text += _story(encoder, draw, _HELD_OUT, (tokens - sum(map(len, prose))) // len(prose)) + paragraph
    while len(text) < tokens:
        text += _story(encoder, draw, _HELD_OUT, 256)
    return np.array(text[:tokens], dtype=np.int32)


def _story(encoder: Encoder, draw: random.Random, sentences: Sequence[str], tokens: int) -> list[int]:
    """Sentences with names and things filled in, as many as fit in ``tokens`` tokens."""
    story: list[int] = []
    while True:
        a, b = draw.sample(_PEOPLE, 2)
        words = {
            "t": draw.choice(_TRADES), "p": draw.choice(_PLACES), "x": draw.choice(_THINGS),
            "n": draw.randrange(2, 29), "month": draw.choice(_MONTHS),
        }  # fmt: skip
        sentence = draw.choice(sentences).format(a=a, b=b, **words)
        ids = _ids(encoder, " " + sentence[0].upper() + sentence[1:])
        if len(story) + len(ids) > tokens:
            return story
        story += ids


def _start(encoder: Encoder) -> list[int]:
    return [] if encoder.bos_token_id is None else [encoder.bos_token_id]


def _ids(encoder: Encoder, text: str) -> list[int]:
    return encoder.encode(text, add_special_tokens=False)
