"""What a deployment's actors are called, and which of them is the one that serves."""

from __future__ import annotations

from headwise.actors.found import Found, serving_names
from headwise.actors.names import next_name, role_of, turn_of


def test_an_actor_is_called_by_its_role_unless_another_one_of_it_is_still_there() -> None:
    assert next_name("http-0", []) == "http-0"
    assert next_name("http-0", ["scheduler", "http-1", "http-10.4"]) == "http-0"
    assert next_name("http-0", ["http-0"]) == "http-0.1"
    assert next_name("http-0", ["http-0.3", "http-0"]) == "http-0.4", "later than all, also where one before has gone"


def test_a_name_tells_its_role_and_whose_turn_it_is() -> None:
    assert [role_of(name) for name in ("http-0", "http-0.12", "scheduler-standby.1")] == [
        "http-0",
        "http-0",
        "scheduler-standby",
    ]
    assert (turn_of("http-0"), turn_of("http-0.12")) == (0, 12)
    assert role_of("a.b/scheduler") == "a.b/scheduler"
    assert turn_of("a.b/scheduler") == 0, "of a deployment whose name begins like another's"


def test_of_several_actors_of_a_role_the_last_one_serves() -> None:
    names = ["store", "http-0", "http-1", "http-0.10", "http-0.9", "engine-0"]
    assert serving_names(names, ["engine-0"]) == {"http-0": "http-0.10"}


def test_the_scheduler_is_the_one_that_knows_where_it_is_whatever_it_is_called() -> None:
    standby = "scheduler-standby"
    assert serving_names(["scheduler", standby], ["scheduler"]) == {}
    assert serving_names(["scheduler", standby], [standby]) == {"scheduler": standby}
    assert serving_names(["scheduler.2", standby], ["scheduler.2"]) == {"scheduler": "scheduler.2"}
    assert serving_names(["scheduler.2", standby], [standby]) == {"scheduler": standby}
    assert serving_names(["scheduler.2", standby], []) == {"scheduler": "scheduler.2"}, "it is starting"


def test_who_is_called_by_its_role_is_found_by_it() -> None:
    found = Found(known_as={"http-0": "http-0.1"})
    assert (found.name_of("http-0"), found.name_of("http-1")) == ("http-0.1", "http-1")
