"""Embeddings of what is cached need not come: such a request computes nothing that it would need them for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.engine.shown_items import shown
from support.engine.simulated_engine import make_engine, request, run
from support.engine.simulation import continuation

from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.protocol.request import GenerateRequest, SamplingParams

PROMPT = [1, 3, 3, 5, 8, 13, 21, 1, 4, 9, 16, 25, 3, 3, 7, 2, 6, 11, 12, 14]
ITEMS = ((1, [3, 3]), (4, [8, 13, 21, 1]), (9, [9, 16, 25, 3, 3]), (15, [2, 6]))


def left_out(engine: EngineCore, given: GenerateRequest) -> tuple[GenerateRequest, int]:
    """The request without what the cache makes unnecessary, and up to where it lacks some."""
    cached = engine.cached_tokens(given)
    kept = tuple(each for each in given.embeds if each.end > cached)
    return replace(given, embeds=kept), max((each.end for each in given.embeds if each.end <= cached), default=0)


@pytest.mark.parametrize("policies", [(FULL,), (FULL, HeadPolicy(window=6, sink=2))])
@pytest.mark.parametrize("max_batched_tokens", [3, 64])
def test_what_is_cached_is_served_without_them(policies: tuple[HeadPolicy, ...], max_batched_tokens: int) -> None:
    engine, _ = make_engine(policies, num_blocks=64, max_batched_tokens=max_batched_tokens)
    assert engine.cached_tokens(shown("first", PROMPT, *ITEMS)) == 0
    engine.add(shown("first", PROMPT, *ITEMS))
    assert run(engine)["first"].token_ids == continuation(PROMPT, 9)
    again, lacks = left_out(engine, shown("again", PROMPT, *ITEMS))
    assert 0 < lacks < len(PROMPT)
    assert len(again.embeds) < len(ITEMS)
    engine.add(again, knows_embeds=True, lacks=lacks)
    results = run(engine)
    assert results["again"].token_ids == continuation(PROMPT, 9)
    assert results["again"].usage.cached_tokens >= lacks
    assert not engine.take_lacking()
    engine.cache.check_integrity()


def test_it_goes_on_behind_its_output() -> None:
    engine, _ = make_engine(num_blocks=64, max_batched_tokens=64)
    engine.add(shown("first", PROMPT, *ITEMS))
    said = run(engine)["first"].token_ids
    given = replace(shown("again", PROMPT, *ITEMS), output_token_ids=tuple(said[:4]))
    again, lacks = left_out(engine, given)
    engine.add(again, knows_embeds=True, lacks=lacks)
    assert run(engine)["again"].token_ids == said[4:]


def test_a_request_whose_cache_is_gone_is_named_and_others_go_on_when_it_is() -> None:
    engine, _ = make_engine(num_blocks=64, max_batched_tokens=64)
    engine.add(shown("first", PROMPT, *ITEMS))
    run(engine)
    again, lacks = left_out(engine, shown("again", PROMPT, *ITEMS))
    engine.operate("reset_cache", "all")
    engine.step(None)
    engine.add(again, knows_embeds=True, lacks=lacks)
    engine.add(request("other", PROMPT, 9))
    engine.step(0)
    assert engine.take_lacking() == ["again"]
    assert not engine.take_lacking()
    engine.abort("again")
    assert run(engine)["other"].token_ids == continuation(PROMPT, 9)
    engine.add(shown("whole", PROMPT, *ITEMS))
    assert run(engine)["whole"].token_ids == continuation(PROMPT, 9)
    engine.cache.check_integrity()


def test_so_is_one_that_waited_while_the_engine_slept() -> None:
    engine, _ = make_engine(num_blocks=64, max_batched_tokens=64)
    engine.add(shown("first", PROMPT, *ITEMS))
    run(engine)
    again, lacks = left_out(engine, shown("again", PROMPT, *ITEMS, tokens=40))
    engine.add(again, knows_embeds=True, lacks=lacks)
    said = [token for _ in range(6) for delta in engine.step(None) for token in delta.token_ids]
    assert said == continuation(PROMPT, 40)[: len(said)]
    for action in ("sleep", "wake"):
        operation = engine.operate(action)
        while not operation.is_done:
            engine.step(None)
    engine.step(0)
    assert engine.take_lacking() == ["again"]
    engine.abort("again")
    engine.cache.check_integrity()


def test_nothing_is_cached_for_who_is_to_be_told_of_the_prompt() -> None:
    """Each of its tokens is computed."""
    engine, _ = make_engine(num_blocks=64, max_batched_tokens=64)
    engine.add(shown("first", PROMPT, *ITEMS))
    run(engine)
    given = shown("again", PROMPT, *ITEMS)
    assert engine.cached_tokens(given) > 0
    asked = replace(given, sampling=replace(SamplingParams(max_tokens=9), prompt_logprobs=1))
    assert engine.cached_tokens(asked) == 0
    assert engine.cached_tokens(replace(given, cache_salt="another")) == 0


def test_items_of_other_embeddings_are_not_taken_for_cached() -> None:
    engine, _ = make_engine(num_blocks=64, max_batched_tokens=64)
    engine.add(shown("first", PROMPT, *ITEMS))
    run(engine)
    other = shown("other", PROMPT, (1, [3, 4]), *ITEMS[1:])
    assert engine.cached_tokens(other) == 0
    assert np.all(other.prompt_token_ids == shown("x", PROMPT, *ITEMS).prompt_token_ids)
