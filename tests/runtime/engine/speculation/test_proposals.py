"""What the model proposed is told from what came, one token after the other."""

from __future__ import annotations

import numpy as np
import pytest
from support.engine.simulated_engine import request

from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.engine.speculation.proposals import Proposals


def sequence_of(tokens: int) -> Sequence:
    return Sequence(request("r", list(range(1, tokens + 1)), 50), b"", (0, 0), tokens + 50, 0.0)


def proposed(sequence: Sequence, *tokens: int) -> Proposals:
    proposals = Proposals()
    assert proposals.advance(sequence) == []
    proposals.propose(np.array(tokens, np.int32), sequence.num_tokens)
    return proposals


def test_nothing_is_guessed_before_something_is_proposed() -> None:
    proposals, sequence = Proposals(), sequence_of(3)
    assert proposals.advance(sequence) == []
    assert not len(proposals.kinds(4))
    assert not len(proposals.guesses(4))


def test_a_kind_is_how_many_were_proposed_before() -> None:
    proposals = proposed(sequence_of(3), 7, 8, 9)
    assert proposals.kinds(2).tolist() == [0, 1]
    assert proposals.kinds(8).tolist() == [0, 1, 2]
    assert proposals.guesses(2).tolist() == [7, 8]


def test_tokens_that_come_one_by_one_leave_the_rest_as_guesses() -> None:
    sequence = sequence_of(3)
    proposals = proposed(sequence, 7, 8, 9)
    sequence.output.append(7)
    assert proposals.advance(sequence) == [(0, True)]
    assert proposals.advance(sequence) == [], "it was told"
    assert proposals.kinds(8).tolist() == [1, 2]
    assert proposals.guesses(1).tolist() == [8]
    sequence.output += [8, 9, 10]
    assert proposals.advance(sequence) == [(1, True), (2, True)]
    assert not len(proposals.guesses(8))


@pytest.mark.parametrize("right", [0, 1, 2])
def test_behind_a_wrong_one_nothing_is_told_or_guessed(right: int) -> None:
    sequence = sequence_of(3)
    proposals = proposed(sequence, 7, 8, 9)
    sequence.output += [*[7, 8, 9][:right], 1, 9]
    assert proposals.advance(sequence) == [*((kind, True) for kind in range(right)), (right, False)]
    assert not len(proposals.kinds(8))
    sequence.output.append(9)
    assert proposals.advance(sequence) == []


def test_newer_ones_take_the_place_of_older_ones() -> None:
    sequence = sequence_of(3)
    proposals = proposed(sequence, 7, 8, 9)
    sequence.output.append(7)
    proposals.advance(sequence)
    proposals.propose(np.array([4, 5], np.int32), sequence.num_tokens)
    assert proposals.guesses(8).tolist() == [4, 5]
    sequence.output.append(4)
    assert proposals.advance(sequence) == [(0, True)]
