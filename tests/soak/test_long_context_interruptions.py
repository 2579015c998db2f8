"""Long requests that push each other out of a small pool, over and over, say what they would say alone."""

from __future__ import annotations

from itertools import product

import pytest
from support.long_prompts import MODEL, long_answers
from support.poisoned import PoisonedModel
from support.reference import assert_same

from headwise.runtime.config.engine_config import EngineConfig

pytestmark = [pytest.mark.soak, pytest.mark.model, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def loaded() -> PoisonedModel:
    return PoisonedModel(EngineConfig(model=MODEL, kv_cache="512MiB", max_batched_tokens=512))


@pytest.mark.parametrize(
    ("recycling", "prefix_caching", "async_scheduling", "block_size"),
    [*product((True, False), (True, False), (False,), (64,)), *product((True, False), (True, False), (True,), (16,))],
)
def test_each_request_is_interrupted_by_a_more_urgent_one(
    loaded: PoisonedModel, recycling: bool, prefix_caching: bool, async_scheduling: bool, block_size: int
) -> None:
    wanted = long_answers(loaded.preprocessor.tokenizer)
    options = {
        "recycling": recycling,
        "prefix_caching": prefix_caching,
        "async_scheduling": async_scheduling,
        "block_size": block_size,
    }
    run = loaded.start(kv_cache=loaded.pool_for(wanted["island_8000"], **options), **options)
    names = {}
    for urgency, answer in enumerate(("island_8000", "harbour_6000", "harbour_4000")):
        names[answer] = run.add(wanted[answer], priority=-urgency)
        run.serve(until=run.spoken(names[answer], tokens=3))
    run.serve()
    run.close()
    assert run.preemptions >= 1
    assert (run.cache["recycled_blocks"] > 0) == recycling
    for answer, name in names.items():
        assert_same(wanted[answer], run.results[name].token_ids)
