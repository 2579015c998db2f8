from __future__ import annotations

from typing import Any

import pytest

from headwise.actors.rebalance import AFTER_S, Move, Rebalancer, better_place, is_wanted
from headwise.runtime.config.engine_config import EngineConfig


def homes(**engines: int) -> dict[str, str]:
    """So many engines on each node."""
    return {f"{node}{number}": node for node, count in engines.items() for number in range(count)}


@pytest.mark.parametrize(
    ("engines", "with_room", "move"),
    [
        ({"a": 2}, {"b"}, Move(("a0", "a1"), "a", "b", 0)),
        ({"a": 3, "b": 1}, {"b"}, Move(("a0", "a1", "a2"), "a", "b", 1)),
        ({"a": 2, "b": 3}, {"a", "c"}, Move(("b0", "b1", "b2"), "b", "c", 0)),
        ({"a": 1}, {"b"}, None),
        ({"a": 2, "b": 1}, {"b"}, None),
        ({"a": 2}, {"a"}, None),
        ({"a": 2}, set(), None),
        ({}, {"b"}, None),
    ],
)
def test_an_engine_goes_from_the_fullest_node_to_the_emptiest_if_that_evens_them_out(
    engines: dict[str, int], with_room: set[str], move: Move | None
) -> None:
    assert better_place(homes(**engines), with_room) == move


def test_moves_come_to_an_end_wherever_they_begin() -> None:
    engines = homes(a=9, b=2, c=0)
    for _ in range(8):
        move = better_place(engines, {"a", "b", "c", "d"})
        if move is not None:
            engines[move.engines[0]] = move.target
    assert sorted(list(engines.values()).count(node) for node in "abcd") == [2, 3, 3, 3]
    assert better_place(engines, {"a", "b", "c", "d"}) is None


def test_an_engine_is_moved_once_the_place_has_been_free_for_a_while_and_then_the_next_one() -> None:
    rebalancer, now = Rebalancer(), 5_000.0
    assert rebalancer.look(homes(a=4), {"b"}, now) is None
    assert rebalancer.look(homes(a=4), {"b"}, now + AFTER_S - 1) is None
    assert rebalancer.look(homes(a=4), {"b"}, now + AFTER_S)
    assert rebalancer.look(None, {"b"}, now + AFTER_S + 1) is None, "one that moves does not serve"
    assert rebalancer.look(homes(a=3, b=1), {"b"}, now + 100) is None
    assert rebalancer.look(homes(a=3, b=1), {"b"}, now + 100 + AFTER_S)
    assert rebalancer.look(homes(a=2, b=2), {"b"}, now + 200) is None
    assert rebalancer.look(homes(a=2, b=2), {"b"}, now + 1000) is None


@pytest.mark.parametrize(("homes_meanwhile", "room_meanwhile"), [(None, {"b"}), (homes(a=2), set[str]())])
def test_a_place_that_is_free_now_and_then_or_engines_that_come_and_go_move_nobody(
    homes_meanwhile: dict[str, str] | None, room_meanwhile: set[str]
) -> None:
    rebalancer, now = Rebalancer(), 5_000.0
    for _ in range(20):
        assert rebalancer.look(homes(a=2), {"b"}, now) is None
        assert rebalancer.look(homes(a=2), {"b"}, now + AFTER_S - 1) is None
        assert rebalancer.look(homes_meanwhile, room_meanwhile, now + AFTER_S) is None
        now += 2 * AFTER_S


def test_a_node_on_which_the_engine_did_not_come_to_serve_is_not_tried_again_but_another_one_is() -> None:
    rebalancer, now = Rebalancer(), 5_000.0
    rebalancer.look(homes(a=2), {"b"}, now)
    assert rebalancer.look(homes(a=2), {"b"}, now + AFTER_S)
    for later in range(100, 10_000, 10):
        assert rebalancer.look(homes(a=2), {"b"}, now + later) is None
    rebalancer.look(homes(a=2), {"b", "c"}, now + 20_000)
    move = rebalancer.look(homes(a=2), {"b", "c"}, now + 20_000 + AFTER_S)
    assert move is not None
    assert move.target == "c"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, True),
        ({"engine_cpus": 4.0}, False),
        ({"device": "cuda"}, False),
        ({"placement": "pack"}, False),
        ({"placement": "pack", "rebalance": "always"}, False),
        ({"rebalance": "never"}, False),
        ({"device": "cuda", "rebalance": "always"}, True),
        ({"engine_cpus": 4.0, "rebalance": "always"}, True),
    ],
)
def test_engines_are_moved_where_they_slow_each_other_down_or_where_that_is_asked_for(
    options: dict[str, Any], wanted: bool
) -> None:
    assert is_wanted(EngineConfig(**options)) is wanted
