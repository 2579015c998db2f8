"""The index equals the truth within two seconds of the end of any fault: simulated, and the same on real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.index.truth import Update, depths, paths, truth
from support.index.world import NODE_TIMEOUT_S, SUSPENDED_S, SimulatedWorld, SocketWorld, World

from headwise.storage.index.messages import TIERS

PATHS = paths(4, 12)
PATH = PATHS[0]


@pytest.fixture(params=["simulated", "sockets"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = SimulatedWorld(1) if request.param == "simulated" else SocketWorld(1)
    for name in "ab":
        world.add(name)
        world.update(name, holds(0, 8))
    assert world.comes_to_truth()
    yield world
    world.close()


def holds(first: int, last: int, tier: str = "device", resident: bool = True, resumable: bytes = b"") -> Update:
    return Update(tier, first, tuple(PATH[first:last]), resident, resumable)


def act(world: World, seconds: float) -> None:
    """Let nodes' caches change at random for a while."""
    draw, end = world.draw, world.clock() + seconds
    while world.clock() < end:
        for name in world.nodes:
            if draw.random() < 0.3:
                path, first = draw.choice(PATHS), draw.randrange(12)
                part = tuple(path[first : first + draw.randint(1, 12)])
                flags = draw.choice([b"", bytes(draw.randint(0, 1) for _ in part)])
                world.update(name, Update(draw.choice(TIERS), first, part, draw.random() < 0.7, flags))
        world.run(0.02)


def test_a_worker_that_restarts_in_place_loses_its_dead_blocks_and_shows_its_new_ones(world: World) -> None:
    for depth in range(8, 12):
        world.update("a", holds(depth, depth + 1))  # the old epoch's numbers are far ahead of the new one's
    world.restart("a")
    world.update("a", holds(0, 3))
    assert world.comes_to_truth()


def test_lost_messages(world: World) -> None:
    world.lossy(lose=0.6)
    act(world, 0.8)
    world.lossy()
    assert world.comes_to_truth()


def test_doubled_and_reordered_messages(world: World) -> None:
    world.lossy(double=0.5, delay=0.2)
    act(world, 0.8)
    world.lossy()
    assert world.comes_to_truth()


def test_a_removed_middle_block_that_is_restored(world: World) -> None:
    world.update("a", holds(3, 4, resident=False))
    assert world.comes_to_truth()
    assert depths(world.kept("ab"), PATH) == {"a": (3, 3, 3), "b": (8, 8, 8)}
    world.update("a", holds(3, 4))
    assert world.comes_to_truth()
    assert depths(world.kept("ab"), PATH) == {"a": (8, 8, 8), "b": (8, 8, 8)}


def test_blocks_whose_parents_are_unknown(world: World) -> None:
    world.restart("a")
    world.update("a", holds(5, 12))
    assert world.comes_to_truth()
    world.update("a", holds(0, 5))
    assert world.comes_to_truth()
    assert depths(world.kept("ab"), PATH)["a"] == (12, 12, 12)


def test_a_publisher_that_is_dead_for_good(world: World) -> None:
    world.kill("a")
    assert world.comes_to_truth(after_s=NODE_TIMEOUT_S)
    world.kill("b")
    world.gone("b")
    assert world.comes_to_truth(after_s=-1.5), "before its silence would tell"


def test_a_node_whose_clock_and_epochs_were_set_back(world: World) -> None:
    world.nodes["a"].restart(world.nodes["a"].ledger.epoch - 1)
    world.update("a", holds(0, 3))
    assert world.comes_to_truth(after_s=NODE_TIMEOUT_S)


def test_a_store_that_was_suspended_drops_nobody() -> None:
    world = SimulatedWorld(1)
    world.add("a")
    world.update("a", holds(0, 8))
    assert world.comes_to_truth()
    world.suspend()
    assert world.is_true()


def test_a_store_that_is_restarted(world: World) -> None:
    world.stop_store()
    act(world, 0.5)
    world.start_store()
    assert world.comes_to_truth()


def test_more_messages_than_a_queue_holds_while_the_store_is_away(world: World) -> None:
    world.stop_store()
    for _ in range(500):
        world.update("a", holds(0, 8, resident=False), holds(0, 4))
    assert world.nodes["a"].dropped > 0
    world.start_store()
    assert world.comes_to_truth()


def strike(world: SimulatedWorld, fault: str) -> None:
    """One fault that begins and ends."""
    name = world.draw.choice(sorted(world.nodes))
    if fault == "restart":
        world.restart(name)
    elif fault == "store":
        world.stop_store()
        act(world, world.draw.uniform(0.0, 2.0))
        world.start_store()
    elif fault == "suspended":
        world.suspend()
    else:
        world.kill(name)
        if fault == "gone":
            world.gone(name)
        else:
            act(world, NODE_TIMEOUT_S)


@pytest.mark.parametrize("minutes", [5, pytest.param(30, marks=pytest.mark.soak)])
def test_minutes_of_random_faults(minutes: int) -> None:
    """Every fault, alone and together, from one seed; simulated."""
    world, judged = SimulatedWorld(20), 0
    draw, suspended_s = world.draw, 0.0
    end = world.clock() + 60.0 * minutes
    while world.clock() - suspended_s < end:
        for name in {*"abcd"} - {*world.nodes}:
            world.add(name)
            world.nodes[name].restart(world.dead.pop(name, 0) + 1)
        if draw.random() < 0.7:
            world.lossy(draw.choice([0.0, 0.1, 0.9]), draw.choice([0.0, 0.3]), draw.choice([0.0, 0.05, 1.0]))
        act(world, draw.uniform(0.2, 3.0))
        for fault in draw.sample(["restart", "store", "gone", "silent death", "suspended"], draw.randint(0, 3)):
            strike(world, fault)
            suspended_s += SUSPENDED_S * (fault == "suspended")
            act(world, draw.uniform(0.0, 1.0))
        still_on_the_way = world.faults.delay
        world.lossy()
        world.run(still_on_the_way)
        assert world.comes_to_truth(), f"after {judged} rounds, at {world.clock():.2f}"
        judged += 1
        held = truth(node.ledger for node in world.nodes.values())
        for path in PATHS:
            assert world.match(path) == depths(held, path)
    assert judged > 5 * minutes
