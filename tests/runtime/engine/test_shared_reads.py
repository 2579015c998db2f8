"""Steps say which decodes have their first blocks in common; the simulated kernels check that they do."""

from __future__ import annotations

import pytest
from support.engine.simulated_engine import BLOCK, make_engine, request, run
from support.engine.simulation import continuation

from headwise.cache_controller.policy import FULL, STATE, HeadPolicy
from headwise.runtime.protocol.batch import BatchRequest
from headwise.runtime.protocol.request import GenerationResult

DOCUMENT = [1 + index % 7 for index in range(80)]
OTHER = [2 + index % 5 for index in range(100)]


def steps_of(prompts: dict[str, list[int]], policies: tuple[HeadPolicy, ...], **config) -> list[BatchRequest]:
    """All steps of requests that come together, each of which gets the tokens that it would get alone."""
    engine, executor = make_engine(
        policies, num_blocks=1024, max_rows=8, eager=False, **{"max_batched_tokens": 64, **config}
    )
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, 24))
    results, steps = dict[str, GenerationResult](), list[BatchRequest]()
    while engine.has_work():
        for delta in engine.step(0):
            results.setdefault(delta.request_id, GenerationResult(delta.request_id)).add(delta)
        steps += executor.queue
        executor.finish_one()
    for name, prompt in prompts.items():
        assert results[name].token_ids == continuation(prompt, 24)
    return steps


@pytest.mark.parametrize("policies", [(FULL,), (FULL, HeadPolicy(window=9)), (FULL, STATE)], ids=str)
@pytest.mark.parametrize("config", [{}, {"async_scheduling": False}, {"speculation": 2}], ids=str)
def test_decodes_of_one_document_are_neighbours_and_say_how_much_of_it_they_share(policies, config) -> None:
    prompts = {f"{number}": [*(DOCUMENT, OTHER)[number % 2], 10 + number] for number in range(5)}
    steps = steps_of(prompts, policies, **config)
    found = {tuple(sorted(step.shared.tolist())) for step in steps}
    both = {(*shared[:2], *shared[-2:]) for shared in found if len(shared) == 5 and 80 in shared[:4]}
    assert both in ({(0, 0, 80, 100)}, {(0, 0, 80, 80)}), "how much of the other one, goes by when its second began"
    for step in steps:
        if len(step.shared):
            assert len(step.shared) == len(step.rows)


def test_what_is_read_for_several_at_once_is_counted() -> None:
    engine, _ = make_engine(num_blocks=256)
    for name in ("a", "b", "c"):
        engine.add(request(name, [*DOCUMENT, 1 + ord(name) % 7], 5))
    run(engine)
    told = engine.stats()["decode_reads"]
    steps = told["spared"] / len(DOCUMENT)
    assert 3 <= steps <= 2 * 5, "two of them share it with the one before, in five steps at most"
    assert 3 * 81 <= told["tokens"] <= 3 * 5 * 86
    engine.add(request("alone", DOCUMENT, 5))
    run(engine)
    assert engine.stats()["decode_reads"]["spared"] == told["spared"]
    assert engine.stats()["decode_reads"]["tokens"] > told["tokens"] + 4 * 80


def test_decodes_that_share_nothing_say_nothing() -> None:
    prompts = {f"{number}": [10 + number, *DOCUMENT] for number in range(4)}
    assert not any(len(step.shared) for step in steps_of(prompts, (FULL,)))


def test_a_prompt_beside_them_is_in_no_group() -> None:
    prompts = {"a": [*DOCUMENT, 1], "b": [*DOCUMENT, 2], "long": [9, *DOCUMENT * 3]}
    mixed = [step for step in steps_of(prompts, (FULL,)) if len(step.shared) and step.query_lens.max() > 1]
    assert mixed
    for step in mixed:
        assert not step.shared[step.query_lens > 1].any()
        assert 80 in step.shared


def test_what_is_shared_ends_with_a_whole_block() -> None:
    prompts = {"a": [*DOCUMENT, 1, 2, 3], "b": [*DOCUMENT, 1, 2, 5]}
    shared = {count for step in steps_of(prompts, (FULL,)) for count in step.shared.tolist()}
    assert shared == {0, 80}
    assert 80 % BLOCK == 0
