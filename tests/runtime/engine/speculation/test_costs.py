"""What drafts are taken to cost and to bring follows what is measured."""

from __future__ import annotations

import numpy as np
import pytest

from headwise.runtime.engine.speculation.costs import (
    FIRST_PASS_RATIO,
    FIRST_RATIO,
    MOST_SURE,
    REMEMBERED,
    DraftCosts,
    HitRates,
    Trust,
)
from headwise.runtime.engine.speculation.lookup import LEAST_MATCH, MOST_MATCH


def test_costs_of_a_step_and_of_a_draft_are_told_apart() -> None:
    costs, draw = DraftCosts(), np.random.default_rng(0)
    assert costs.ratio == FIRST_RATIO
    for drafts in draw.integers(0, 9, 300).tolist():
        costs.observe(drafts, (10 + 0.4 * drafts) * draw.uniform(0.95, 1.05) * 1e-3)
    assert costs.ratio == pytest.approx(0.04, rel=0.3)
    for drafts in draw.integers(0, 9, 300).tolist():
        costs.observe(drafts, (2 + 1.0 * drafts) * 1e-3)
    assert costs.ratio == pytest.approx(0.5, rel=0.2)


def test_passes_of_the_model_are_told_apart_too() -> None:
    costs, draw = DraftCosts(), np.random.default_rng(0)
    assert costs.pass_ratio == FIRST_PASS_RATIO
    for drafts, passes in draw.integers(0, 4, (600, 2)).tolist():
        costs.observe(drafts, (10 + 0.4 * drafts + 2.0 * passes) * draw.uniform(0.95, 1.05) * 1e-3, passes)
    assert costs.ratio == pytest.approx(0.04, abs=0.03)
    assert costs.pass_ratio == pytest.approx(0.2, rel=0.2)


def test_one_step_that_was_held_up_says_little() -> None:
    costs = DraftCosts()
    for drafts in (0, 4) * 50:
        costs.observe(drafts, (10 + 0.4 * drafts) * 1e-3)
    before = costs.ratio
    costs.observe(4, 60.0)
    assert costs.ratio == pytest.approx(before, abs=0.06)


def test_a_chance_is_how_often_guesses_behind_such_a_match_were_right() -> None:
    rates = HitRates(MOST_MATCH + 1)
    assert rates.chances(np.arange(3)).tolist() == [0.5, 0.25, 0.125], "nothing is known yet"
    assert not len(rates.chances(np.arange(0)))
    for _ in range(98):
        rates.observe(LEAST_MATCH, False)
        rates.observe(MOST_MATCH, True)
    assert rates.chances(np.array([LEAST_MATCH]))[0] == pytest.approx(0.01)
    np.testing.assert_allclose(rates.chances(np.full(3, MOST_MATCH)), 0.99 ** np.arange(1, 4))


def test_a_sequence_is_trusted_as_far_as_its_guesses_were_right() -> None:
    trust, rates = Trust(), HitRates(5)
    assert trust.factor == 1.0
    for _ in range(20):
        trust.observe(0.5, False)
    assert trust.factor < 0.3
    found = rates.chances(np.array([3, 4]), trust.factor)
    np.testing.assert_allclose(found, [0.5 * trust.factor, (0.5 * trust.factor) ** 2])
    for _ in range(40):
        trust.observe(0.5, True)
    assert trust.factor > 1.5
    assert rates.chances(np.array([4]), 5.0)[0] == MOST_SURE, "nothing is certain"


def test_what_was_long_ago_is_forgotten() -> None:
    rates = HitRates(5)
    for is_right in (True, False):
        for _ in range(4 * REMEMBERED):
            rates.observe(3, is_right)
    assert rates.chances(np.array([3]))[0] < 0.1
