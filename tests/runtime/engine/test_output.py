from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.tiny_models import byte_level_tokenizer

from headwise.runtime.engine.output import OutputText
from headwise.runtime.loader.tokenizer import Tokenizer
from headwise.runtime.protocol.request import FinishReason, SamplingParams

EOS = 0


class Letters:
    """Token t is one letter of "abc", emitted one token late as real detokenizers may do."""

    eos_token_ids = (EOS,)

    def __init__(self) -> None:
        self._late = ""

    def detokenizer(self, shown_tokens: tuple[str, ...] = ()) -> Letters:
        return Letters()

    def push(self, ids: Sequence[int]) -> str:
        ready, self._late = self._late, "".join(" abc"[i] for i in ids)
        return ready

    def flush(self) -> str:
        ready, self._late = self._late, ""
        return ready


def text_of(letters: str, *stop: str) -> tuple[str, FinishReason | None]:
    output = OutputText(Letters(), SamplingParams(stop=stop))
    text = ""
    for letter in letters:
        piece, reason = output.push(" abc".index(letter))
        text += piece
        if reason is not None:
            return text, reason
    return text + output.flush(), None


def expected(letters: str, *stop: str) -> str:
    ends = [letters.index(s) for s in stop if s in letters]
    return letters[: min(ends, default=len(letters))]


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_first_stop_string_and_is_whole_without_one(letters, stop) -> None:
    text, _ = text_of(letters, *stop)
    shortest = expected(letters, *stop)
    assert text == shortest or (len(text) < len(letters) and any(letters[len(text) :].startswith(s) for s in stop))


def test_text_that_may_begin_a_stop_string_is_held_back_and_released_when_it_does_not() -> None:
    output = OutputText(Letters(), SamplingParams(stop=("abb",)))
    pieces = [output.push(" abc".index(letter))[0] for letter in "abac"]
    assert pieces == ["", "", "", "ab"]
    assert output.flush() == "ac"


def test_an_end_token_ends_the_text_and_releases_what_was_held() -> None:
    output = OutputText(Letters(), SamplingParams(stop=("ab",)))
    assert output.push(1) == ("", None)
    assert output.push(EOS) == ("a", FinishReason.STOP)


def test_ignore_eos_goes_on() -> None:
    output = OutputText(Letters(), SamplingParams(ignore_eos=True))
    assert output.push(EOS)[1] is None


def test_a_stop_string_counts_only_behind_the_tokens_that_are_wanted_at_least() -> None:
    output = OutputText(Letters(), SamplingParams(stop=("ab",), min_tokens=5))
    pieces = [output.push(" abc".index(letter)) for letter in "abcabcabc"]
    texts = [text for text, _ in pieces]
    reasons = [reason for _, reason in pieces]
    assert reasons.index(FinishReason.STOP) == 8, "letters come one token late"
    assert "".join(texts[:9]) == "abcabc"


def test_one_that_comes_with_output_counts_it_too() -> None:
    """What a lost engine had said is not wanted again."""
    output = OutputText(Letters(), SamplingParams(stop=("ab",), min_tokens=5))
    output.replay([" abc".index(letter) for letter in "abcabc"])
    pieces = [output.push(" abc".index(letter)) for letter in "abc"]
    assert [reason for _, reason in pieces] == [None, None, FinishReason.STOP]


def test_the_tokens_that_end_it_are_told() -> None:
    assert OutputText(Letters(), SamplingParams(stop_token_ids=(3,))).ends == {EOS, 3}
    assert OutputText(Letters(), SamplingParams(stop_token_ids=(3,), ignore_eos=True)).ends == {3}


def test_control_tokens_that_were_asked_for_are_text_and_may_be_part_of_a_stop_string() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(), {}, None, None, ())
    ids = tokenizer.encode("a<|im_start|>b<|im_end|>")

    def text(**sampling: Any) -> str:
        output = OutputText(tokenizer, SamplingParams(**sampling))
        return "".join(output.push(token)[0] for token in ids) + output.flush()

    assert text() == "ab"
    assert text(shown_tokens=("<|im_start|>",)) == "a<|im_start|>b"
    assert text(shown_tokens=("<|im_start|>",), stop="start|>b").startswith("a<|im_")
