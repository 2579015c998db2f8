"""Who would go before most of what waits at an engine has a place there, although it is full: as that engine says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.engine.simulated_engine import make_engine, request

from headwise.runtime.engine.core import EngineCore
from headwise.runtime.frontend.routing import RoutedRequest, Router, RouterOptions
from headwise.runtime.protocol.messages import EngineStatus

QUEUE = 8
LONG, SHORT = 40, 5


def busy(prompt_order: str = "fair", others: str = "many") -> EngineCore:
    """It has `QUEUE` long prompts waiting, all of one tenant."""
    engine, _ = make_engine(num_blocks=512, max_rows=1, async_scheduling=False, prompt_order=prompt_order)
    for number in range(QUEUE + 1):
        asked = request(f"{number}", [1 + number] * LONG, 2)
        engine.add(replace(asked, tenant=others))
    engine.step(None)
    assert engine.load().waiting == QUEUE
    return engine


def router_of(engine: EngineCore, fair: bool = True, **said: bool) -> Router:
    router = Router(RouterOptions(engine_queue=QUEUE, fair_prompts=fair))
    router.update(EngineStatus("", "a", "tcp://a", 0, {}, 1, replace(engine.load(), **said)), 0.0)
    return router


def routed(tokens: int, owner: str = "", priority: int = 0, name: str = "r") -> RoutedRequest:
    return RoutedRequest(name, (), tokens, priority=priority, owner=owner, lacking=tokens)


@pytest.mark.parametrize(
    ("asked", "has_place"),
    [
        (routed(SHORT), True),
        (routed(10 * LONG), False),
        (routed(LONG, "one"), True),
        (routed(LONG, "many"), False),
        (routed(SHORT, "many"), True),
        (routed(10 * LONG, priority=-1), True),
        (routed(SHORT, priority=1), False),
    ],
)
def test_who_would_go_before_most_has_one(asked: RoutedRequest, has_place: bool) -> None:
    router = router_of(busy())
    assert router.room(0.0) == 0
    assert bool(router.places(asked, 0.0)) == has_place
    assert (router.select_and_reserve(asked, None, 0.0) is not None) == has_place


@pytest.mark.parametrize(("asked", "has_place"), [(routed(SHORT), False), (routed(LONG, priority=-1), True)])
def test_in_the_order_of_arrival_only_who_is_more_urgent_would(asked: RoutedRequest, has_place: bool) -> None:
    assert bool(router_of(busy("arrival"), fair=False).places(asked, 0.0)) == has_place


def test_there_are_few_of_these_places() -> None:
    router = router_of(busy())
    taken = [router.select_and_reserve(routed(SHORT, name=f"r{n}"), None, 0.0) is not None for n in range(QUEUE)]
    assert taken == [True] * (QUEUE // 4) + [False] * (QUEUE - QUEUE // 4)


def test_what_is_on_its_way_counts_among_its_tenant_s() -> None:
    router = router_of(busy(others=""))
    assert router.select_and_reserve(routed(LONG - 2, "one", name="first"), None, 0.0) is not None
    assert not router.places(routed(LONG - 2, "one"), 0.0)
    assert router.places(routed(LONG - 2, "another"), 0.0)


def test_nobody_is_told_whose_prompts_wait() -> None:
    """Names may be salts, by which nobody else is to find what is cached."""
    engine = busy(others="a salt that nobody guesses")
    assert engine.load().prompts is not None
    assert "salt" not in str(engine.load())
    assert "prompts" not in router_of(engine).table.stats(0.0)["a"]["work"]


def test_an_engine_that_takes_nothing_has_none() -> None:
    assert not router_of(busy(), accepts=False).places(routed(SHORT), 0.0)
    router = router_of(busy())
    router.mark_lost("tcp://a", 0.0)
    assert not router.places(routed(SHORT), 0.0)


def test_what_waits_for_others_to_compute_has_its_turn_all_the_same() -> None:
    """Questions about a document that is being computed are not in the queue, but all that waits."""
    engine, _ = make_engine(num_blocks=512, max_rows=4, async_scheduling=False)
    document = [1 + at % 7 for at in range(200)]
    for number in range(3):
        engine.add(request(f"{number}", [*document, 9 + number], 2))
    engine.step(None)
    load = engine.load()
    assert (load.waiting, load.held_back) == (2, 2)
    assert load.prompts is not None
    assert load.prompts.turn > 100
    assert make_engine()[0].load().prompts is None
