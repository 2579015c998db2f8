"""What a deployment's actors are called."""

from __future__ import annotations

from headwise.actors.found import Found
from headwise.actors.names import in_turn, next_turn, role_of, turn_of


def test_an_actor_is_called_by_its_role_and_later_by_the_turn_of_its_front() -> None:
    assert [in_turn("http-0", turn) for turn in (0, 1, 12)] == ["http-0", "http-0.1", "http-0.12"]
    assert next_turn(["scheduler", "http-0", "engine-7"]) == 1
    assert next_turn(["scheduler.1", "http-0.3", "store.1"]) == 4, "of none that is still there"


def test_a_name_tells_its_role_and_whose_turn_it_is() -> None:
    assert [role_of(name) for name in ("http-0", "http-0.12", "scheduler-standby.1")] == [
        "http-0",
        "http-0",
        "scheduler-standby",
    ]
    assert (turn_of("http-0"), turn_of("http-0.12")) == (0, 12)
    assert role_of("a.b/scheduler") == "a.b/scheduler"
    assert turn_of("a.b/scheduler") == 0, "of a deployment whose name begins like another's"


def test_who_is_called_by_its_role_is_found_by_it() -> None:
    found = Found(known_as={"http-0": "http-0.1"})
    assert (found.name_of("http-0"), found.name_of("http-1")) == ("http-0.1", "http-1")
