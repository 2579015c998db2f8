"""An owner that says nothing is started again; a scheduler that is none yet is not called."""

from __future__ import annotations

import pytest
import ray

from headwise.actors.owner_watch import OwnerWatch


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: name)
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: names.append(actor))
    return names


def test_an_owner_that_hangs_is_started_again_and_has_more_and_more_time_for_that(killed: list[str]) -> None:
    watch = OwnerWatch("d", 10.0)
    counts = []
    for _ in range(7):
        watch._silent()
        counts.append(len(killed))
    assert counts == [1, 1, 2, 2, 2, 2, 3]
    assert set(killed) == {"d/owner"}


def test_a_successor_that_is_not_called_before_its_turn_holds_nobody_for_dead(killed: list[str]) -> None:
    watch = OwnerWatch("d", 10.0, first_s=60.0)
    for _ in range(5):
        watch._silent()
    assert killed == []
    for _ in range(2):
        watch._silent()
    assert killed == ["d/owner"], "an owner that dies at the switch, and hangs"


def test_once_it_was_called_it_waits_no_longer_than_others(killed: list[str]) -> None:
    watch = OwnerWatch("d", 10.0, first_s=60.0)
    watch._silent()
    watch.called()
    watch._silent()
    assert killed == ["d/owner"]
