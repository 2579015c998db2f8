"""Who has how many drafts: those that bring more tokens in less time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.engine.simulated_engine import request

from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.engine.speculation.costs import FIRST_RATIO
from headwise.runtime.engine.speculation.lookup import MOST_MATCH
from headwise.runtime.engine.speculation.speculator import GAP_S, MOST_LONGER, MOST_LOOKED_UP, PAUSED, TRIED, Speculator

REPEATING, NEW = [5, 6, 7] * 12, list(range(40))


def sequence_of(prompt: list[int], max_tokens: int = 50, **sampling: Any) -> Sequence:
    return Sequence(request("r", prompt, max_tokens, **sampling), b"", (0, 0), len(prompt) + max_tokens, 0.0)


def counts(speculator: Speculator, *sequences: Sequence) -> list[int]:
    found: list[int] = speculator.chosen(sequences)[0].tolist()
    return found


def sure(most: int = 8, most_of_step: int = 64, *, computes_again: bool = False) -> Speculator:
    """One for which repetitions have always gone on."""
    speculator = Speculator(most, most_of_step, computes_again=computes_again)
    for _ in range(500):
        speculator._rates.observe(MOST_MATCH, True)
    return speculator


def test_what_repeats_itself_has_drafts_and_what_does_not_has_none() -> None:
    repeating, new = counts(sure(), sequence_of(REPEATING), sequence_of(NEW))
    assert (repeating > 4, new) == (True, 0)


def test_a_sequence_has_no_more_than_it_may_still_say() -> None:
    assert [counts(sure(), sequence_of(REPEATING, tokens)) for tokens in (1, 2, 5, 50)] == [[0], [1], [4], [8]]


@pytest.mark.parametrize("sampling", [{"logprobs": 1}, {"presence_penalty": 0.5}, {"min_tokens": 3}])
def test_what_must_be_known_token_by_token_has_none(sampling: dict[str, Any]) -> None:
    assert counts(sure(), sequence_of(REPEATING, **sampling)) == [0]


def test_drawn_tokens_are_guessed_too() -> None:
    assert counts(sure(), sequence_of(REPEATING, temperature=0.8)) == [8]


def test_all_sequences_together_have_no_more_than_a_step_may() -> None:
    assert sum(counts(sure(most_of_step=10), *(sequence_of(REPEATING) for _ in range(5)))) == 10


def test_drafts_that_cost_more_than_they_bring_are_none() -> None:
    speculator, sequences = sure(), [sequence_of(REPEATING) for _ in range(3)]
    assert min(counts(speculator, *sequences)) > 2
    for drafts in (0, 4) * 100:
        speculator.took(drafts, 1e-3 * (1 + 0.6 * drafts))
    assert counts(speculator, *sequences) == [0, 0, 0]
    assert counts(speculator, sequences[0])[0] > 0, "alone it has more time"


def test_where_right_ones_are_computed_once_more_each_costs_twice_as_much() -> None:
    found = []
    for computes_again in (False, True):
        speculator, sequences = sure(computes_again=computes_again), [sequence_of(REPEATING) for _ in range(3)]
        for drafts in (0, 4) * 100:
            speculator.took(drafts, 1e-3 * (1 + 0.3 * drafts))
        found.append(sum(counts(speculator, *sequences)))
    assert found[1] < 0.7 * found[0]


def test_unsure_ones_are_fewer() -> None:
    speculator = Speculator(8, 64)
    assert counts(speculator, sequence_of(REPEATING)) == [2], f"0.5 and 0.25, at a ratio of {FIRST_RATIO}"


def test_waiting_is_worth_it_where_it_takes_less_than_drafts_save() -> None:
    for step_s, is_worth in ((10 * GAP_S, True), (0.1 * GAP_S, False)):
        speculator = sure()
        for drafts in (0, 4) * 100:
            speculator.took(drafts, step_s * (1 + 0.1 * drafts))
        (count,), found = speculator.chosen([sequence_of(REPEATING)])
        assert (count, found) == (8, is_worth)
        assert speculator.chosen([sequence_of(REPEATING), sequence_of(NEW)])[1] is is_worth
        assert speculator.chosen([sequence_of(NEW)])[1] is speculator.chosen([])[1] is False


def test_who_repeats_a_text_does_not_make_others_wait_for_long() -> None:
    speculator = sure()
    for drafts in (0, 4) * 100:
        speculator.took(drafts, 1e-3 * (1 + 0.1 * drafts))
    repeating = [sequence_of(REPEATING) for _ in range(3)]
    new = [sequence_of(NEW) for _ in range(5)]
    for having in (1, 2, 3):
        found = counts(speculator, *repeating[:having], *new[: 8 - having])
        assert sum(found) * 0.1 == pytest.approx(MOST_LONGER * having / 8, abs=0.1)
        assert all(found[:having])
    assert sum(counts(speculator, *repeating)) * 0.1 == pytest.approx(MOST_LONGER, abs=0.1)


def test_a_text_that_goes_its_own_way_is_trusted_less() -> None:
    speculator, sequence = sure(), sequence_of(REPEATING, 400)
    for _ in range(500):
        speculator._rates.observe(2, True)
    before = counts(speculator, sequence)
    for token in range(100, 112):
        sequence.output += [token, 5, 6]  # whose continuation is guessed, each time
        counts(speculator, sequence)
    assert before == [8]
    assert counts(speculator, sequence)[0] < 4
    assert counts(speculator, sequence_of(REPEATING)) == [8], "others are"


def test_only_so_many_sequences_are_looked_up() -> None:
    speculator = sure(most_of_step=10_000)
    speculator.took(0, 1.0)
    speculator._costs._draft_s = 0.0
    found = counts(speculator, *(sequence_of(REPEATING) for _ in range(MOST_LOOKED_UP + 3)))
    assert found == [8] * MOST_LOOKED_UP + [0, 0, 0]


def test_guesses_are_what_was_promised_and_what_is_gone_is_forgotten() -> None:
    speculator, sequence = sure(), sequence_of(REPEATING)
    assert speculator.guesses(sequence, counts(speculator, sequence)[0]).tolist() == [5, 6, 7, 5, 6, 7, 5, 6]
    assert len(speculator._followed) == 1
    del sequence
    assert not len(speculator._followed)


def by_model(right: int = 500, wrong: int = 0, most: int = 4) -> Speculator:
    """One whose model's drafts were right so often, and wrong."""
    speculator = Speculator(most, 64, by_model=True)
    for drafts in (0, 4) * 100:
        speculator.took(drafts, 10 * GAP_S * (1 + 0.1 * drafts))
    for is_right in [True] * right + [False] * wrong:
        for kind in range(most):
            speculator._proposed.observe(kind, is_right)
    return speculator


def test_what_the_model_proposed_is_drafted_where_nothing_is_repeated() -> None:
    speculator, sequence = by_model(), sequence_of(NEW)
    assert counts(speculator, sequence) == [0], "nothing was proposed yet"
    assert speculator.proposals([sequence]).tolist() == [4]
    speculator.proposed(sequence, np.array([8, 7, 6], np.int32))
    assert counts(speculator, sequence) == [3]
    assert speculator.guesses(sequence, 3).tolist() == [8, 7, 6]


def test_of_both_kinds_of_guesses_those_are_drafted_of_which_more_is_expected() -> None:
    for right, wrong, expected in ((500, 0, [8, 7, 6, 5]), (10, 300, [5, 6, 7, 5])):
        speculator, sequence = by_model(right, wrong), sequence_of(REPEATING)
        for _ in range(500):
            speculator._rates.observe(MOST_MATCH, wrong > 0)
        assert (speculator.proposals([sequence])[0] > 0) == (not wrong)
        speculator.proposed(sequence, np.array([8, 7, 6, 5], np.int32))
        assert counts(speculator, sequence) == [4]
        assert speculator.guesses(sequence, 4).tolist() == expected


def test_proposals_that_are_still_to_come_are_worth_waiting_for_if_they_are_mostly_right() -> None:
    for right, wrong, is_worth in ((500, 0, True), (10, 500, False)):
        speculator, sequence = by_model(right, wrong), sequence_of(NEW)
        (count,), found = speculator.chosen([sequence], [False])
        assert (count > 0, found) == (is_worth, is_worth)
        assert speculator.chosen([sequence], [True])[1] is False, "nothing was proposed"


def test_what_all_sequences_are_drafted_for_costs_a_pass_for_all_of_them() -> None:
    found = []
    for number in (1, 3):
        speculator, sequences = by_model(), [sequence_of(NEW) for _ in range(number)]
        for drafts, passes in ((0, 0), (4, 4), (0, 4), (4, 0)) * 100:
            speculator.took(drafts, 1e-1 * (1 + 0.01 * drafts + 0.6 * passes), passes)
        found.append(speculator.proposals(sequences).tolist())
    assert min(*found[0], *found[1]) > 0


def test_now_and_then_nothing_is_proposed_so_that_steps_without_are_known() -> None:
    speculator, sequence = by_model(), sequence_of(NEW)
    told = [int(speculator.proposals([sequence])[0]) for _ in range(2 * PAUSED)]
    assert told.count(0) == 2
    assert told.count(4) == 2 * PAUSED - 2


def test_a_model_whose_drafts_do_not_pay_is_asked_now_and_then() -> None:
    speculator, sequence = by_model(0, 500), sequence_of(NEW)
    told = [int(speculator.proposals([sequence])[0]) for _ in range(3 * TRIED)]
    assert told.count(4) == 3
    assert told.count(0) == 3 * TRIED - 3
    assert [int(speculator.proposals([sequence_of(NEW, logprobs=1)])[0]) for _ in range(TRIED)] == [0] * TRIED
    for _ in range(600):  # now they are right
        for kind in range(4):
            speculator._proposed.observe(kind, True)
    assert speculator.proposals([sequence_of(NEW)])[0] > 0


def test_the_model_proposes_no_more_than_a_sequence_may_still_say() -> None:
    """Behind the token that the step samples, and before the last one, behind which nothing is sampled."""
    found = [int(by_model().proposals([sequence_of(NEW, tokens)])[0]) for tokens in (1, 2, 3, 4, 9)]
    assert found == [0, 0, 1, 2, 4]


def test_how_often_proposals_are_right_is_learnt_of_tokens_that_come() -> None:
    speculator, sequence = by_model(0), sequence_of(NEW, 900)
    for token in range(300):
        speculator.proposed(sequence, np.array([token, token + 1, 0], np.int32))
        sequence.output += [token, token + 1]
    speculator.proposed(sequence, np.array([], np.int32))
    rates = [speculator._proposed.rate(kind) for kind in range(3)]
    assert min(rates[:2]) > 0.99
    assert rates[2] == 0.5, "it was never told"
    assert speculator.proposals([sequence])[0] >= 2


def test_a_speculator_without_a_model_asks_for_nothing() -> None:
    assert sure().proposals([sequence_of(NEW)]).tolist() == [0]
    assert by_model().proposals([]).tolist() == []
