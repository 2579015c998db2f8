"""How long an engine may take to go."""

from __future__ import annotations

import math

import pytest

from headwise.actors import placement
from headwise.actors.fleet import drain_time


@pytest.mark.parametrize(
    ("timeout_s", "left_s", "drain_s"),
    [
        (60.0, math.inf, 60.0),
        (60.0, 90.0, 60.0),
        (60.0, 62.0, 57.0),
        (60.0, 30.0, 27.0),
        (60.0, 1.0, 0.9),
        (60.0, 0.0, 0.0),
        (60.0, -10.0, 0.0),
        (0.0, 90.0, 0.0),
    ],
)
def test_an_engine_is_gone_before_its_node_is(timeout_s: float, left_s: float, drain_s: float) -> None:
    assert drain_time(timeout_s, left_s) == pytest.approx(drain_s)


def test_a_node_that_is_drained_without_a_deadline_is_not_taken_away_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.state, "get_draining_nodes", lambda: {"a": 0, "b": 1_700_000_000_500})
    assert placement.draining_nodes() == {"a": math.inf, "b": 1_700_000_000.5}
