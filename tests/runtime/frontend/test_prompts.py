"""Texts and chats as token ids, within the bounds of what can fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.tiny_models import CHAT_TEMPLATE, byte_level_tokenizer

from headwise.errors import InvalidRequestError
from headwise.runtime.frontend.prompts import LocalPromptEncoder, TextLimits, prompt_bytes
from headwise.runtime.loader.tokenizer import Tokenizer

TOKENS = 16
TINY = Tokenizer(byte_level_tokenizer(), {}, CHAT_TEMPLATE, None, ())
LIMITS = TextLimits(TOKENS, TINY.longest_token)
ENCODER = LocalPromptEncoder(TINY, LIMITS)


class Untouched(Tokenizer):
    """A tokenizer that must not be given any text."""

    def __init__(self) -> None:
        pass

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise AssertionError(f"{len(text)} characters were tokenised")


def test_what_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    with pytest.raises(InvalidRequestError, match="a text of at least 12000000 bytes cannot fit: send at most 208, as"):
        LocalPromptEncoder(Untouched(), LIMITS).text("1" * 12_000_000)


@settings(max_examples=100)
@example(["<|endoftext|>"] * 10)  # slices cut them
@given(st.lists(st.sampled_from(["<|endoftext|>", "two words", " the", "1", "é", "😀", "=" * 70]), max_size=24))
def test_no_text_is_refused_that_fits(pieces: list[str]) -> None:
    text = "".join(pieces)
    ids = TINY.encode(text)
    try:
        assert ENCODER.text(text).tolist() == ids
    except InvalidRequestError:
        assert len(ids) > TOKENS


def test_a_text_that_is_far_too_long_is_not_tokenised_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    encode = TINY.encode
    monkeypatch.setattr(TINY, "encode", lambda text, **options: asked.append(len(text)) or encode(text, **options))
    with pytest.raises(InvalidRequestError, match="its first 64 make about 64 tokens, and 16 fit"):
        ENCODER.text("1" * 200)
    assert asked == [64]


def test_a_rendered_chat_has_the_limits_of_a_text() -> None:
    with pytest.raises(InvalidRequestError, match=r"a text of at least 2\d\d bytes cannot fit"):
        ENCODER.chat([{"role": "user", "content": "1" * 200}])


def test_a_chat_is_not_rendered_at_all_that_is_far_too_long() -> None:
    with pytest.raises(InvalidRequestError, match=r"a chat of at least .* bytes cannot fit: send at most 1049408"):
        LocalPromptEncoder(Untouched(), LIMITS).chat([{"role": "user", "content": "1" * 2_000_000}])


@pytest.mark.parametrize("text", ["\ud800", "a" * 500 + "\udc00"])
def test_text_that_is_no_unicode_is_refused_by_its_place(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"character {len(text) - 1} is half of a surrogate pair"):
        ENCODER.text(text)
    with pytest.raises(InvalidRequestError, match="half of a surrogate pair"):
        ENCODER.chat([{"role": "user", "content": text}])


@pytest.mark.parametrize(
    ("prompt", "messages", "least"),
    [
        ("é", None, 2),
        ([1, 2, 3], None, 0),
        (None, [{"role": "user", "content": "x" * 100}], 100),
        (None, [{"role": "user", "content": [{"type": "text", "text": "x" * 100}]}], 100),
        (None, [{"role": "user", "content": "", "extra": {"x" * 100: [["y" * 100]]}}], 200),
        (None, 5, 0),
    ],
)
def test_the_bytes_of_a_prompt_are_those_of_all_its_text(prompt: Any, messages: Any, least: int) -> None:
    assert least <= prompt_bytes(prompt, messages, 1 << 20) <= 10 * least + 300


def test_counting_ends_where_there_is_too_much() -> None:
    messages = [{"role": "user", "content": ["x" * 1000] * 1000}]
    assert 200_000 < prompt_bytes(None, messages, 200_000) < 210_000
