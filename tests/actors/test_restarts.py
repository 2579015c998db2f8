from __future__ import annotations

import pytest

from headwise.actors.restarts import Life, Phase, RestartPolicy, Restarts

POLICY = RestartPolicy(at_once=3, first_delay_s=1.0, longest_delay_s=60.0, refill_s=60.0)
START = 5_000.0


def test_the_first_ends_are_followed_by_a_start_at_once_and_further_ones_by_longer_and_longer_waits() -> None:
    restarts = Restarts(POLICY)
    assert [restarts.ended(START) for _ in range(8)] == [0.0, 0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0]


def test_a_thousand_ends_do_not_make_the_wait_longer_than_the_longest() -> None:
    restarts = Restarts(POLICY)
    assert max(restarts.ended(START) for _ in range(1000)) == 60.0
    assert restarts.ended(START + 600.0) <= 1.0, "ten minutes without an end forget most of them"
    assert restarts.ended(START + 4000.0) == 0.0


def test_an_end_a_minute_never_has_to_wait_however_long_that_goes_on() -> None:
    restarts = Restarts(POLICY)
    assert not any(restarts.ended(START + 60.0 * minute) for minute in range(10_000))


def running(*, start_timeout_s: float = 100.0) -> Life:
    life = Life(start_timeout_s, POLICY)
    life.ready(START)
    return life


def test_what_ended_is_due_after_its_wait() -> None:
    life = running()
    for _ in range(3):
        assert life.ended(START, "a") == 0.0
    assert life.is_due(START)
    assert life.ended(START, "a") == 1.0
    assert not life.is_due(START + 0.9)
    assert life.is_due(START + 1.0)
    life.placing(START + 1.0)
    assert not life.is_due(START + 2.0)


def test_a_start_that_is_to_take_less_time_than_others_is_late_sooner_and_the_next_one_is_not() -> None:
    life = running(start_timeout_s=100.0)
    life.ended(START, "a")
    life.created(START, timeout_s=15.0)
    assert not life.is_late(START + 15.0)
    assert life.is_late(START + 16.0)
    life.ended(START + 16.0, "a")
    life.created(START + 16.0)
    assert not life.is_late(START + 116.0)
    assert life.is_late(START + 117.0)


def test_what_ended_too_often_lately_cannot_be_replaced_for_its_silence_until_that_is_forgotten() -> None:
    life = running()
    for _ in range(POLICY.at_once):
        assert life.can_be_replaced(START)
        life.ended(START, "a")
        assert not life.can_be_replaced(START), "it does not serve"
        life.ready(START)
    assert not life.can_be_replaced(START)
    assert not life.can_be_replaced(START + POLICY.refill_s - 1)
    assert life.can_be_replaced(START + POLICY.refill_s)
    assert life.ended(START + POLICY.refill_s, "a") == 0.0


def test_waiting_for_a_node_is_neither_late_nor_silent_nor_an_end() -> None:
    life = running(start_timeout_s=100.0)
    life.ended(START, "a")
    life.placing(START)
    assert not life.is_late(START + 1e6)
    assert not life.has_run_for(20.0, START + 1e6)
    life.created(START + 1e6)
    assert not life.has_run_for(20.0, START + 1e6 + 50.0)
    assert not life.is_late(START + 1e6 + 100.0)
    assert life.is_late(START + 1e6 + 101.0)
    life.ready(START + 1e6 + 101.0)
    assert not life.is_late(START + 2e6)
    assert [life.ended(START + 2e6, "a") for _ in range(3)] == [0.0] * 3


def test_the_silence_of_the_process_before_is_not_that_of_the_one_that_has_just_started() -> None:
    life = running()
    assert not life.has_run_for(20.0, START + 19.0)
    assert life.has_run_for(20.0, START + 20.0)


def test_an_end_with_the_node_is_not_counted_and_starts_at_once() -> None:
    life = running()
    for _ in range(100):
        life.displaced(START)
        assert life.is_due(START)
        life.created(START)
    assert not life.avoided
    assert [life.ended(START, "b") for _ in range(4)] == [0.0, 0.0, 0.0, 1.0]


def test_what_served_and_ended_starts_where_it_was() -> None:
    life = running()
    life.ended(START, "a")
    assert life.next_node("a", {"a", "b"}, ["a", "b"]) == "a"


def test_what_did_not_start_on_a_node_is_started_elsewhere_first() -> None:
    life = running()
    life.created(START)
    life.ended(START, "a")
    assert life.next_node("a", {"a", "b", "c"}, ["a", "c"]) == "c"
    life.created(START)
    life.ended(START, "c")
    assert life.next_node("c", {"a", "b", "c"}, ["a", "b", "c"]) == "b"


def test_where_no_other_node_has_room_it_stays() -> None:
    life = running()
    life.created(START)
    life.ended(START, "a")
    assert life.next_node("a", {"a", "b"}, ["a"]) == "a"


def test_where_all_nodes_failed_they_are_tried_in_turn() -> None:
    life, node, tried = running(), "a", []
    for _ in range(6):
        life.created(START)
        life.ended(START, node)
        node = life.next_node(node, {"a", "b"}, ["a", "b"])
        tried.append(node)
    assert tried == ["b", "a"] * 3


def test_what_ends_again_and_again_leaves_its_node_though_it_starts_there() -> None:
    life = running()
    for _ in range(3):
        life.ended(START, "a")
        life.ready(START)
        assert life.next_node("a", {"a", "b"}, ["b"]) == "a"
    life.ended(START, "a")
    assert life.next_node("a", {"a", "b"}, ["b"]) == "b"


def test_a_node_that_failed_is_good_again_once_its_ends_are_forgotten() -> None:
    life = running()
    life.created(START)
    life.ended(START, "a")
    assert life.avoided == {"a"}
    life.ready(START)
    life.ended(START + 3600.0, "b")
    assert not life.avoided


@pytest.mark.parametrize(("with_room", "target"), [({"b"}, "b"), (set(), "")])
def test_a_dead_node_is_left_for_one_with_room_or_for_whichever_comes(with_room: set[str], target: str) -> None:
    life = running()
    life.ended(START, "a")
    assert life.next_node("a", {"b"}, with_room) == target
    assert life.phase is Phase.DOWN
