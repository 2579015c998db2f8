"""Prompts that are to be kept outlive what nobody has asked to keep, for as long as was asked, on whatever tier."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.engine.simulated_engine import BLOCK, make_engine, request, run

from headwise.cache_controller.policy import FULL, STATE, HeadPolicy
from headwise.errors import InvalidRequestError
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.protocol.request import FinishReason, GenerateRequest, Retention, as_retention

DOCUMENT = [1 + i % 7 for i in range(6 * BLOCK)]
SHORT = Retention(600.0)
GROUPS = {
    "full": (FULL,),
    "windows": (FULL, HeadPolicy(window=9, sink=2)),
    "states": (FULL, STATE),
    "windows alone": (HeadPolicy(window=9),),
}


def document(name: str, retention: Retention | None, tail: int = 3, max_tokens: int = 2) -> GenerateRequest:
    """A question behind the document, of so many tokens."""
    prompt = [*DOCUMENT, *(20 + i for i in range(tail))]
    return replace(request(name, prompt, max_tokens), retention=retention)


def flood(engine: EngineCore, count: int = 12) -> None:
    """Others come, each with a prompt of its own that takes a good part of the cache."""
    for number in range(count):
        engine.add(request(f"flood {engine._clock()}", [30 + number, *range(1, 30)], 1))
        run(engine)


def cached(engine: EngineCore, retention: Retention | None, **others: Any) -> int:
    """How many of the document's tokens are still there once others have come."""
    engine.add(document("first", retention, **others))
    run(engine)
    flood(engine)
    return engine.cached_tokens(document("again", None))


@pytest.mark.parametrize("groups", GROUPS)
def test_a_prompt_that_is_to_be_kept_outlives_others(groups: str) -> None:
    engine, _ = make_engine(GROUPS[groups], num_blocks=40)
    assert cached(engine, None) == 0
    assert cached(engine, SHORT) == len(DOCUMENT)
    assert 0 < engine.stats()["cache"]["retained_blocks"] <= 20


@pytest.mark.parametrize("groups", GROUPS)
def test_it_goes_as_others_once_its_time_is_over(groups: str) -> None:
    engine, _ = make_engine(GROUPS[groups], num_blocks=40)
    assert cached(engine, SHORT) == len(DOCUMENT)
    engine._clock.skip(600.0)
    flood(engine)
    assert engine.cached_tokens(document("again", None)) == 0
    assert engine.stats()["cache"]["retained_blocks"] == 0


def test_its_time_begins_anew_with_each_request_that_asks_for_it() -> None:
    engine, _ = make_engine(num_blocks=40)
    for _ in range(3):
        assert cached(engine, SHORT) == len(DOCUMENT)
        engine._clock.skip(400.0)
    flood(engine)
    assert engine.cached_tokens(document("again", None)) == len(DOCUMENT)


@pytest.mark.parametrize("groups", GROUPS)
def test_of_a_prompt_its_first_tokens_can_be_kept_alone(groups: str) -> None:
    engine, _ = make_engine(GROUPS[groups], num_blocks=60)
    kept = Retention(600.0, len(DOCUMENT))
    assert cached(engine, kept, tail=5 * BLOCK) == len(DOCUMENT)
    protected = engine.stats()["cache"]["retained_blocks"]
    assert cached(engine, SHORT, tail=5 * BLOCK) == len(DOCUMENT)
    assert engine.stats()["cache"]["retained_blocks"] > protected


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("groups", GROUPS)
def test_what_the_host_keeps_the_device_need_not(groups: str, write_policy: str) -> None:
    engine, _ = make_engine(GROUPS[groups], num_blocks=40, host_blocks=40, write_policy=write_policy)
    assert cached(engine, SHORT) == len(DOCUMENT)
    flood(engine)
    stats = engine.stats()
    assert stats["cache"]["retained_blocks"] == 0 < stats["host"]["retained_blocks"] <= 20
    assert engine.cached_tokens(document("again", None)) == len(DOCUMENT)
    engine._clock.skip(600.0)
    flood(engine)
    flood(engine)
    others_come_there = write_policy != "write_through_selective"  # which copies what is of use a second time
    assert engine.cached_tokens(document("again", None)) == (0 if others_come_there else len(DOCUMENT))


def test_a_copy_that_fails_leaves_the_device_to_keep_it() -> None:
    engine, executor = make_engine(num_blocks=40, host_blocks=40)
    executor.faults.lose_store = lambda: True
    assert cached(engine, SHORT) == len(DOCUMENT)
    assert engine.stats()["cache"]["retained_blocks"] > 0 == engine.stats()["host"]["retained_blocks"]


def test_it_keeps_nobody_from_being_served() -> None:
    engine, _ = make_engine(num_blocks=12, retained_share=1.0)
    for number in range(4):
        engine.add(replace(request(f"{number}", [number + 1, *DOCUMENT], 2), retention=Retention(3600.0)))
        run(engine)
    engine.add(request("whole", list(range(1, 40)), 5))
    assert run(engine)["whole"].finish_reason is FinishReason.LENGTH


def test_no_more_is_kept_than_the_share_that_may_be() -> None:
    engine, _ = make_engine(num_blocks=40, retained_share=0.1)
    assert cached(engine, SHORT) < len(DOCUMENT)
    engine, _ = make_engine(num_blocks=40, retained_share=0.0)
    assert cached(engine, SHORT) == 0
    assert engine.stats()["cache"]["retained_blocks"] == 0


def test_a_prompt_that_was_not_computed_is_not_kept() -> None:
    engine, _ = make_engine(num_blocks=40)
    engine.add(document("given up", SHORT))
    engine.step(0)
    engine.abort("given up")
    run(engine)
    assert engine.stats()["cache"]["retained_blocks"] == 0


def test_it_is_kept_while_its_request_is_preempted_and_after() -> None:
    engine, _ = make_engine(num_blocks=18)
    for number in range(2):
        engine.add(request(f"{number}", [number + 40, *range(1, 9)], 20))
    engine.add(document("kept", SHORT, max_tokens=20))
    run(engine)
    assert engine.stats()["requests"]["preemptions"] > 0
    flood(engine, 4)
    assert engine.cached_tokens(document("again", None)) == len(DOCUMENT)


def test_without_prefix_caching_nothing_is_kept() -> None:
    engine, _ = make_engine(num_blocks=40, prefix_caching=False)
    assert cached(engine, SHORT) == 0


def test_forgetting_the_cache_forgets_what_was_to_be_kept() -> None:
    engine, _ = make_engine(num_blocks=40, host_blocks=40)
    assert cached(engine, SHORT) == len(DOCUMENT)
    engine.operate("reset_cache", "all")
    run(engine)
    stats = engine.stats()
    assert (stats["cache"]["retained_blocks"], stats["host"]["retained_blocks"]) == (0, 0)


@pytest.mark.parametrize(
    ("seconds", "tokens", "named"),
    [
        (-1, 0, "retain_s"),
        (float("nan"), 0, "retain_s"),
        (1e9, 0, "retain_s"),
        ("60", 0, "retain_s"),
        (True, 0, "retain_s"),
        (60, -1, "retain_tokens"),
        (60, 1.5, "retain_tokens"),
        (60, 2**31, "retain_tokens"),
        (0, 5, "say for how long"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(seconds: Any, tokens: Any, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        as_retention(seconds, tokens)
    with pytest.raises(InvalidRequestError):
        Retention(seconds, tokens)


def test_nothing_is_asked_for_by_no_seconds() -> None:
    assert as_retention(0) is None
    assert as_retention(1) == Retention(1.0)
