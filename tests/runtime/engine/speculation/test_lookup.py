"""What a sequence's end repeats of it, against a search of all places."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.engine.simulated_engine import request

from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.engine.speculation.lookup import LEAST_MATCH, MOST_MATCH, Echo, longest_match

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=60)


def searched(tokens: list[int]) -> tuple[int, int]:
    """By looking at each place, the latest first."""
    best = (0, 0)
    for place in range(len(tokens) - 1, 0, -1):
        length = 0
        while length < min(place, MOST_MATCH) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        best = max(best, (place, length), key=lambda found: found[1])
    return best if best[1] >= LEAST_MATCH else (0, 0)


@given(TOKENS)
def test_the_longest_match_is_found_and_of_several_the_latest(tokens: list[int]) -> None:
    assert longest_match(np.array(tokens, np.int32)) == searched(tokens)


def sequence_of(prompt: list[int], max_tokens: int) -> Sequence:
    return Sequence(request("r", prompt, max_tokens), b"", (0, 0), len(prompt) + max_tokens, 0.0)


def test_guesses_go_on_as_it_did_before_and_round_and_round_where_that_ends() -> None:
    sequence = sequence_of([1, 2, 3, 4, 5, 1, 2, 3], 10)
    echo = Echo(sequence.max_length)
    assert (echo.advance(sequence), echo.length) == ([], 3)
    assert echo.guesses(7).tolist() == [4, 5, 1, 2, 3, 4, 5]


@given(prompt=TOKENS, output=st.lists(st.integers(0, 2), max_size=40), cuts=st.sets(st.integers(0, 40)))
def test_what_is_told_of_guesses_is_what_they_would_have_been(
    prompt: list[int], output: list[int], cuts: set[int]
) -> None:
    """However many tokens become known at once."""
    sequence = sequence_of(prompt, len(output) + 1)
    echo = Echo(sequence.max_length)
    ends = sorted({*(cut for cut in cuts if cut < len(output)), len(output)})
    for start, end in zip([0, *ends], ends, strict=False):
        expected = list[tuple[int, bool]]()
        if echo.length:
            length = echo.length
            for guess, token in zip(echo.guesses(end - start).tolist(), output[start:end], strict=True):
                expected.append((length, guess == token))
                if guess != token:
                    break
                length = min(length + 1, MOST_MATCH)
        sequence.output += output[start:end]
        told = echo.advance(sequence)
        assert told == expected or start == 0
        if told and not told[-1][1]:  # looked up anew
            known = [*prompt, *sequence.output]
            assert echo.length == searched(known)[1]


def test_a_sequence_that_says_nothing_new_is_not_looked_up_again() -> None:
    sequence = sequence_of([7, 8, 7, 8], 4)
    echo = Echo(sequence.max_length)
    echo.advance(sequence)
    echo._tokens[:] = 0
    assert (echo.advance(sequence), echo.length) == ([], 2)
