"""Embeddings that come with a request are computed with wherever its tokens are, and stay its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.engine.shown_items import shown
from support.engine.simulated_engine import make_engine, request, run
from support.engine.simulation import continuation

from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.errors import InvalidRequestError, OverloadedError
from headwise.runtime.protocol.prompt_items import PromptItem, placed
from headwise.runtime.protocol.request import GenerateRequest

PROMPT = [1, 3, 3, 5, 8, 13, 21, 1, 4, 9, 16, 25, 3, 3, 7]
ITEMS = ((1, [3, 3]), (4, [8, 13, 21, 1]), (14, [7]))


@pytest.mark.parametrize("policies", [(FULL,), (FULL, HeadPolicy(window=6, sink=2))])
@pytest.mark.parametrize("max_batched_tokens", [1, 3, 64])
def test_chunks_and_batches_are_as_of_the_tokens_that_are_shown(policies, max_batched_tokens: int) -> None:
    engine, _ = make_engine(policies, num_blocks=64, max_batched_tokens=max_batched_tokens)
    engine.add(request("ids", PROMPT, 9))
    engine.add(shown("items", PROMPT, *ITEMS))
    engine.add(shown("other", PROMPT[::-1], (3, [25, 16]), (5, [9])))
    results = run(engine)
    assert results["ids"].token_ids == results["items"].token_ids == continuation(PROMPT, 9)
    assert results["other"].token_ids == continuation(PROMPT[::-1], 9)
    assert results["items"].usage.cached_tokens == 0


def test_embeddings_may_come_in_any_order() -> None:
    engine, _ = make_engine(num_blocks=64, max_batched_tokens=3)
    given = shown("r", PROMPT, *ITEMS)
    engine.add(replace(given, embeds=given.embeds[::-1]))
    assert run(engine)["r"].token_ids == continuation(PROMPT, 9)


def test_a_preempted_request_is_computed_again_with_its_embeddings() -> None:
    engine, _ = make_engine(num_blocks=9, prefix_caching=False)
    prompts = {f"r{i}": [i + 1, i + 3, i + 1, i + 5, i + 1, i + 2] for i in range(4)}
    for name, prompt in prompts.items():
        engine.add(shown(name, prompt, (1, prompt[1:2]), (3, prompt[3:6]), tokens=20))
    results = run(engine)
    assert engine.stats()["requests"]["preemptions"] > 0
    for name, prompt in prompts.items():
        assert results[name].token_ids == continuation(prompt, 20)


def test_the_cache_serves_equal_items_and_what_is_before_others() -> None:
    engine, _ = make_engine(num_blocks=64)
    other = [*ITEMS[:1], (4, [8, 13, 21, 2]), ITEMS[2]]
    cached, prompt = [], [*PROMPT[:7], 2, *PROMPT[8:]]
    for name, tokens, items in (("a", PROMPT, ITEMS), ("b", PROMPT, ITEMS), ("c", prompt, other), ("d", prompt, other)):
        engine.add(shown(name, tokens, *items))
        result = run(engine)[name]
        assert result.token_ids == continuation(tokens, 9)
        cached.append(result.usage.cached_tokens)
    assert cached == [0, 12, 4, 12]


def test_it_goes_on_behind_what_a_lost_engine_has_said() -> None:
    engine, _ = make_engine(num_blocks=64)
    whole, said = shown("r", PROMPT, *ITEMS), continuation(PROMPT, 4)
    engine.add(replace(whole, output_token_ids=tuple(said)))
    assert run(engine)["r"].token_ids == continuation(PROMPT, 9)[4:]


def test_what_cannot_be_computed_with_is_refused_and_the_engine_goes_on() -> None:
    engine, _ = make_engine()
    wide = placed([PromptItem(0, 1, embeds=np.zeros((1, 7)))], 3)
    plain = request("r", [1, 2, 3], 3)
    with pytest.raises(InvalidRequestError, match="have 7 numbers a token, the model 1"):
        engine.add(GenerateRequest("r", plain.prompt_token_ids, plain.sampling, embeds=wide.embeds))
    engine.add(plain)
    assert run(engine)["r"].token_ids == continuation([1, 2, 3], 3)


def test_images_that_need_what_is_not_served_are_refused_and_text_is_served() -> None:
    engine, _ = make_engine(num_blocks=64)
    engine.card = replace(engine.card, config=replace(engine.card.config, missing_for_images="three positions"))
    with pytest.raises(InvalidRequestError, match="this model's images need three positions, which is not served"):
        engine.add(shown("image", PROMPT, *ITEMS))
    engine.add(request("text", PROMPT, 9))
    assert run(engine)["text"].token_ids == continuation(PROMPT, 9)


def test_items_on_a_grid_are_refused_where_tokens_have_one_position() -> None:
    engine, _ = make_engine(num_blocks=64)
    plain = request("r", PROMPT, 3)
    items = placed([PromptItem(2, 6, "cat", columns=3)], len(PROMPT)).extra_keys
    with pytest.raises(InvalidRequestError, match="gives a token one position: leave the items' columns out"):
        engine.add(replace(plain, extra_keys=items))
    engine.add(plain)
    assert run(engine)["r"].token_ids == continuation(PROMPT, 3)


def test_embeddings_are_let_go_of_with_their_request_and_too_many_are_refused() -> None:
    engine, _ = make_engine(num_blocks=64, embed_memory="31B")
    with pytest.raises(InvalidRequestError, match=r"have 32 bytes; the engine keeps 31 of all requests \(embed_memory"):
        engine.add(shown("larger", PROMPT, (0, list(range(8)))))
    engine.add(shown("first", PROMPT, *ITEMS))
    with pytest.raises(OverloadedError, match="embeddings of 28 bytes are served or wait already, of at most 31"):
        engine.add(shown("second", PROMPT, (0, [5])))
    engine.abort("first")
    run(engine)
    engine.add(shown("second", PROMPT, *ITEMS))
    assert run(engine)["second"].token_ids == continuation(PROMPT, 9)
