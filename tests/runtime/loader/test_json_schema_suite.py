"""Schemas that others wrote: the JSON Schema Test Suite's. What a schema forbids is never said."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLTokenizer

from headwise.errors import InvalidRequestError
from headwise.runtime.loader.grammar import GrammarError, Vocabulary, check_grammar

SUITE = Path(__file__).parents[2] / "references" / "json_schema_suite.json"
GROUPS: list[dict[str, Any]] = json.loads(SUITE.read_text())["groups"]
NARROWER = {
    "allOf.json": "properties of several schemas come in one order",
    "const.json": "one way to write a number, and one order of properties",
    "enum.json": "one way to write a number",
    "format.json": "formats bind",
    "type.json": "an integer has no fraction",
}
"""Files of which not all that is valid may be said, and why."""
ANSWERS = 2
MOST_BYTES = 400
ENDS = b'"}]'


class Bytes(Vocabulary):
    """A vocabulary of bytes, of which the last token ends the output."""

    def __init__(self) -> None:
        self._tokenizer = LLTokenizer("byte")
        self.words = -(-self._tokenizer.vocab_size // 32)
        self.end = self._tokenizer.eos_token


BYTES = Bytes()


def is_served(group: dict[str, Any]) -> bool:
    try:
        check_grammar("json_schema", json.dumps(group["schema"]))
    except InvalidRequestError:
        return False
    return True


@cache
def served() -> list[dict[str, Any]]:
    return [group for group in GROUPS if is_served(group)]


def may_be_said(schema: Any, instance: Any) -> bool:
    """Whether a model may answer with this, written without white space."""
    matcher = BYTES.matcher("json_schema", json.dumps(schema))
    text = json.dumps(instance, ensure_ascii=False, separators=(",", ":")).encode()
    try:
        matcher.take([*text, BYTES.end])
    except GrammarError:
        return False
    return True


def answer(schema: Any, rng: random.Random) -> bytes | None:
    """What somebody says who takes any byte that may be next, rather one that ends something; None: no end in sight."""
    matcher, said = BYTES.matcher("json_schema", json.dumps(schema)), bytearray()
    while len(said) < MOST_BYTES:
        mask = matcher.mask()
        allowed = [token for token in range(BYTES.end + 1) if mask[token // 32] >> (token % 32) & 1]
        ends = [token for token in allowed if token == BYTES.end or token in ENDS]
        token = rng.choice(ends if ends and rng.random() < 0.5 else allowed)
        if token == BYTES.end:
            return bytes(said)
        matcher.take([token])
        said.append(token)
    return None


def test_over_a_hundred_schemas_are_served_and_the_others_are_refused_by_name() -> None:
    assert len(served()) > 150
    for group in GROUPS:
        if group not in served():
            with pytest.raises(InvalidRequestError, match=r"json_schema cannot be used: ."):
                check_grammar("json_schema", json.dumps(group["schema"]))


def test_what_is_invalid_is_never_said_and_what_is_valid_may_be() -> None:
    for group in served():
        for test in group["tests"]:
            where = group["file"], group["description"], test["description"]
            said = may_be_said(group["schema"], test["data"])
            assert not said or test["valid"], where
            assert said or not test["valid"] or group["file"] in NARROWER, where


def test_answers_are_valid_by_their_schemas() -> None:
    rng, ended = random.Random(1), 0
    for group in served():
        for _ in range(ANSWERS):
            said = answer(group["schema"], rng)
            if said is not None:
                ended += 1
                jsonschema.Draft202012Validator(group["schema"]).validate(json.loads(said))
    assert ended > len(served())
