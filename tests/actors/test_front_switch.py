"""When the front goes to its successors, and which of two fronts is the one that serves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwise.actors.front_switch import (
    ENGINES_S,
    Seen,
    Step,
    Successors,
    front_turn,
    is_settled,
    next_step,
    patience_s,
    scheduler_to_ask,
    sort_out,
)

MOVING = Seen(is_draining=True, waited_s=2.0, patience_s=45.0, successors=Successors())
SERVE = replace(MOVING, successors=Successors(serve=True))
OLD = "scheduler", "store", "http-0"
NEW = "scheduler.1", "store.1", "http-0.1"


def test_successors_are_begun_as_soon_as_the_node_is_drained() -> None:
    assert next_step(Seen(is_draining=False)) is Step.STAY
    assert next_step(Seen(is_draining=True, has_engines=True)) is Step.BEGIN


def test_who_serves_goes_on_until_its_successors_do() -> None:
    assert next_step(MOVING) is Step.WAIT
    assert next_step(SERVE) is Step.SWITCH


def test_the_engines_of_the_node_are_told_to_go_before_but_nobody_waits_for_that_for_long() -> None:
    assert next_step(replace(SERVE, has_engines=True)) is Step.WAIT
    assert next_step(replace(SERVE, has_engines=True, waited_s=ENGINES_S)) is Step.SWITCH


def test_successors_that_do_not_come_up_are_waited_for_until_the_deadline_nears() -> None:
    assert next_step(replace(MOVING, waited_s=44.0)) is Step.WAIT
    assert next_step(replace(MOVING, waited_s=45.0)) is Step.SWITCH


def test_nobody_waits_where_nobody_serves_any_more() -> None:
    assert next_step(replace(MOVING, is_up=False)) is Step.SWITCH
    assert next_step(replace(MOVING, is_up=False, is_draining=False)) is Step.SWITCH, "the node is gone already"


def test_two_nodes_of_one_address_have_one_port() -> None:
    assert next_step(replace(MOVING, successors=Successors(is_apart=False))) is Step.SWITCH


def test_successors_whose_node_is_to_go_too_are_begun_elsewhere() -> None:
    assert next_step(replace(MOVING, successors=Successors(serve=True, is_well=False))) is Step.BEGIN
    assert next_step(replace(MOVING, waited_s=45.0, successors=Successors(is_well=False))) is Step.SWITCH


@pytest.mark.parametrize(("timeout_s", "left_s"), [(60.0, float("inf")), (600.0, 60.0), (60.0, 30.0), (60.0, -5.0)])
def test_what_was_begun_at_the_node_has_time_to_end_after_the_switch(timeout_s: float, left_s: float) -> None:
    least = min(timeout_s, 30.0 if left_s < 0 else left_s)
    assert 0.5 * least < patience_s(timeout_s, left_s) < 0.8 * least


# ---- an owner that is started again ----


def test_until_the_switch_an_owner_goes_on_with_those_that_serve() -> None:
    found = sort_out([*OLD, *NEW, "scheduler-standby", "engine-0"], [], ["scheduler", "scheduler.1", "engine-0"])
    assert found.turn == 0
    assert found.known_as == {"scheduler": "scheduler", "store": "store", "http-0": "http-0"}
    assert found.idle == {*NEW, "scheduler-standby"}, "the move begins anew"
    assert found.late == set()


def test_from_the_switch_on_it_goes_on_with_the_successors_and_whoever_was_not_told_is_late() -> None:
    found = sort_out(["store", "http-0", *NEW], ["scheduler"], ["scheduler", "scheduler.1"])
    assert found.turn == 1
    assert found.known_as == {"scheduler": "scheduler.1", "store": "store.1", "http-0": "http-0.1"}
    assert (found.late, found.idle) == ({"http-0"}, {"store"})


def test_an_http_server_that_was_told_before_the_scheduler_was_tells_that_the_switch_has_come() -> None:
    found = sort_out(["scheduler", "scheduler-standby", *NEW], ["http-0"], ["scheduler"])
    assert found.turn == 1
    assert found.known_as == {"scheduler": "scheduler.1", "store": "store.1", "http-0": "http-0.1"}, "it is starting"
    assert (found.late, found.idle) == ({"scheduler"}, {"scheduler-standby"})


def test_where_the_switch_has_come_and_no_successor_is_left_their_turn_is_known_all_the_same() -> None:
    assert sort_out(["http-0.1"], ["scheduler.1"], []).turn == 2
    assert sort_out([], [], []).turn == 0


def test_where_no_scheduler_is_left_before_the_switch_the_earlier_ones_go_on() -> None:
    found = sort_out(["store", "http-0", *NEW], [], [])
    assert (found.turn, set(found.known_as.values()), found.idle) == (0, {"store", "http-0"}, set(NEW))


def test_a_scheduler_that_stood_by_once_is_the_scheduler() -> None:
    for turn in ("", ".3"):
        names = [f"scheduler{turn}", f"scheduler-standby{turn}", f"store{turn}"]
        found = sort_out(names, [], [f"scheduler-standby{turn}"])
        assert found.known_as["scheduler"] == f"scheduler-standby{turn}"
        assert found.idle == {f"scheduler{turn}"}


def test_where_the_scheduler_has_died_the_one_that_stands_by_takes_its_place() -> None:
    found = sort_out(["store.3", "scheduler-standby.3", "scheduler-standby.4"], [], [])
    assert found.known_as == {"scheduler": "scheduler-standby.3", "store": "store.3"}
    assert found.idle == {"scheduler-standby.4"}


def test_engines_and_encoders_are_of_no_front() -> None:
    assert sort_out(["engine-0", "engine-1"], ["engine-2"], ["engine-0"]) == sort_out([], [], [])
    found = sort_out(["encoder-0", "store", "http-0", *NEW], ["scheduler"], ["scheduler.1", "encoder-0"])
    assert found == sort_out(["store", "http-0", *NEW], ["scheduler"], ["scheduler.1"])
    assert front_turn([*OLD, "engine-0"], ["engine-1"], ["scheduler"]) == 0


# ---- clients ----


@pytest.mark.parametrize(
    ("leaving", "knowing", "asked"),
    [
        ([], ["scheduler"], "scheduler"),  # its successor starts
        ([], ["scheduler", "scheduler.1"], "scheduler"),  # both serve, and engines report to this one
        (["scheduler"], ["scheduler", "scheduler.1"], "scheduler.1"),
        (["scheduler"], ["scheduler.1"], "scheduler.1"),
        (["scheduler"], ["scheduler"], "scheduler"),  # it knows where the next one will be
        ([], ["scheduler.1"], "scheduler.1"),  # the one before hangs
        ([], [], None),
    ],
)
def test_clients_ask_the_scheduler_that_serves(leaving: list[str], knowing: list[str], asked: str | None) -> None:
    names = ["scheduler-standby.1", "scheduler.1", "scheduler-standby", "scheduler"]
    assert scheduler_to_ask(names, leaving, knowing) == asked


def test_only_schedulers_of_an_earlier_turn_are_waited_for() -> None:
    assert is_settled("scheduler", ["scheduler-standby", "scheduler.1"])
    assert not is_settled("scheduler.1", ["scheduler"])
    assert not is_settled(None, [])
