"""Requests that come together and begin alike: one computes what they share, and the others start behind it."""

from __future__ import annotations

from typing import Any

import pytest
from support.engine.simulated_engine import BLOCK, make_engine, request, run
from support.engine.simulation import continuation

from headwise.cache_controller.policy import FULL, STATE, HeadPolicy
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.protocol.request import FinishReason, GenerationResult

DOCUMENT = [1 + index % 7 for index in range(40)]
"""Ten blocks."""
KINDS = {
    "full": (FULL,),
    "a window": (FULL, HeadPolicy(window=9)),
    "a window and a sink": (FULL, HeadPolicy(window=6, sink=2)),
    "states": (FULL, STATE),
    "states and a window": (FULL, STATE, HeadPolicy(window=6)),
}


def question(number: int) -> list[int]:
    """About the document."""
    return [*DOCUMENT, *[10 + number] * 6]


def asked_together(engine: EngineCore, prompts: dict[str, list[int]]) -> dict[str, GenerationResult]:
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, 5))
    results = run(engine)
    for name, prompt in prompts.items():
        assert results[name].token_ids == continuation(prompt, 5)
    return results


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [{}, {"async_scheduling": False}, {"max_batched_tokens": 80}], ids=str)
def test_what_they_share_is_computed_once(kind: str, config: dict[str, Any]) -> None:
    engine, _ = make_engine(KINDS[kind], num_blocks=1024, max_rows=8, **config)

    results = asked_together(engine, {f"{number}": question(number) for number in range(5)})

    cached = [results[f"{number}"].usage.cached_tokens for number in range(5)]
    assert cached == [0, 40, 40, 40, 40]
    cache = engine.cache.stats()
    assert cache.queried_tokens - cache.hit_tokens == 46 + 4 * 6


def test_several_answers_to_one_prompt_compute_it_once() -> None:
    engine, _ = make_engine(num_blocks=256, max_rows=8)

    results = asked_together(engine, dict.fromkeys(("a", "b", "c"), question(1)))

    assert sorted(result.usage.cached_tokens for result in results.values()) == [0, 44, 44]


def test_who_parts_earlier_starts_earlier() -> None:
    """A waits for nobody, B for half of the document, C for B's or A's: whichever it shares most with."""
    engine, _ = make_engine(num_blocks=256, max_rows=8, prompt_order="arrival")
    half = [*DOCUMENT[:20], *[30] * 20]
    prompts = {"a": question(1), "b": half, "c": [*half, 31, 32, 33, 34]}

    results = asked_together(engine, prompts)

    assert [results[name].usage.cached_tokens for name in prompts] == [0, 20, 40]


def test_who_shares_nothing_need_not_wait() -> None:
    engine, _ = make_engine(num_blocks=256, max_rows=8, eager=False)
    for name, prompt in (("a", question(1)), ("b", question(2)), ("other", [50] * 6)):
        engine.add(request(name, prompt, 5))

    engine.step(0)

    assert sorted(sequence.id for sequence in engine.resources.running) == ["a", "other"]
    assert engine.load().waiting == engine.load().held_back == 1
    assert engine.load().queued_tokens == 46 - 16 + 6  # of a what two steps leave, and of b what it does not share


def test_what_waits_goes_on_when_who_computes_is_gone() -> None:
    engine, _ = make_engine(num_blocks=256, max_rows=8)
    for name in ("a", "b", "c"):
        engine.add(request(name, question(ord(name) % 7), 5))
    engine.step(None)
    assert engine.load().held_back == 2
    engine.abort("a")

    results = run(engine)

    assert results["a"].finish_reason is FinishReason.ABORT
    assert results["b"].token_ids == continuation(question(ord("b") % 7), 5)
    assert results["c"].usage.cached_tokens == 40


def test_what_waits_can_be_aborted() -> None:
    engine, _ = make_engine(num_blocks=256, max_rows=8)
    for number in (1, 2):
        engine.add(request(f"{number}", question(number), 5))
    engine.step(None)
    assert engine.load().held_back == 1
    engine.abort("2")

    results = run(engine)

    assert results["2"].finish_reason is FinishReason.ABORT
    assert results["1"].token_ids == continuation(question(1), 5)
    assert engine.load().waiting == 0


def test_who_is_more_urgent_does_not_wait_for_others() -> None:
    engine, _ = make_engine(num_blocks=256, max_rows=8)
    engine.add(request("slow", question(1), 5, priority=1))
    engine.step(None)
    engine.add(request("urgent", question(2), 5))

    engine.step(None)

    assert [sequence.id for sequence in engine.resources.running] == ["urgent", "slow"]


def test_nobody_waits_for_a_prompt_whose_log_probabilities_are_asked_for() -> None:
    """It is computed in smaller chunks."""
    engine, _ = make_engine(num_blocks=256, max_rows=8, eager=False)
    engine.add(request("asked", question(1), 5, prompt_logprobs=1))
    engine.add(request("other", question(2), 5))

    engine.step(0)

    assert engine.load().held_back == 0


def test_nobody_waits_where_prefixes_are_not_cached() -> None:
    engine, _ = make_engine(num_blocks=256, max_rows=8, eager=False, prefix_caching=False)
    for number in (1, 2):
        engine.add(request(f"{number}", question(number), 5))

    engine.step(0)

    assert engine.load().held_back == 0


def test_sleep_leaves_them_waiting_and_they_go_on_afterwards() -> None:
    engine, _ = make_engine(num_blocks=256, max_rows=8, host_blocks=64)
    for number in (1, 2, 3):
        engine.add(request(f"{number}", question(number), 5))
    engine.step(None)
    asleep = engine.operate("sleep")
    while not asleep.is_done:
        engine.step(None)
    assert engine.load().waiting == 3
    engine.operate("wake")

    results = run(engine)

    for number in (1, 2, 3):
        assert results[f"{number}"].token_ids == continuation(question(number), 5)


@pytest.mark.parametrize(("shared", "waits"), [(BLOCK - 1, False), (BLOCK, False), (2 * BLOCK, True)])
def test_who_shares_less_than_a_chunk_starts_at_once(shared: int, waits: bool) -> None:
    """It would be through before it knew of what another one computed."""
    engine, _ = make_engine(num_blocks=256, max_rows=8, eager=False)
    engine.add(request("long", question(1), 5))
    engine.add(request("other", [*DOCUMENT[:shared], 30, 31], 5))

    engine.step(0)

    assert engine.load().held_back == waits
