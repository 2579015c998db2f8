"""Items whose tokens see one another are computed whole, whatever else goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from support.engine.item_machines import ITEM_MACHINES, CrowdedItemsMachine, WholeItemsMachine
from support.engine.simulated_engine import make_engine, request, run
from support.engine.simulation import continuation

from headwise.errors import InvalidRequestError
from headwise.runtime.protocol.prompt_items import PromptItem, placed
from headwise.runtime.protocol.request import GenerateRequest


def with_item(name: str, prompt: list[int], offset: int, length: int, tokens: int = 5) -> GenerateRequest:
    """A request with an item that says nothing but its hash."""
    plain = request(name, prompt, tokens)
    return replace(plain, extra_keys=placed([PromptItem(offset, length, hash="a")], len(prompt)).extra_keys)


@pytest.mark.parametrize("examples", [6, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(machine, marks=() if machine in (WholeItemsMachine, CrowdedItemsMachine) else pytest.mark.soak)
        for machine in ITEM_MACHINES
    ],
)
def test_no_step_ends_inside_an_item_and_tokens_are_told_to_see_all_of_theirs(machine, examples: int) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=50))


def test_an_item_longer_than_a_chunk_is_refused_with_both_numbers_and_the_remedy() -> None:
    engine, _ = make_engine(num_blocks=64, both_ways=True, max_batched_tokens=16)
    prompt = [1, *[2] * 9, 3, 4]
    with pytest.raises(
        InvalidRequestError, match=r"has 9 tokens .* takes 8 with max_batched_tokens 16; start with 17 or more"
    ):
        engine.add(with_item("r", prompt, 1, 9))
    fitting, _ = make_engine(num_blocks=64, both_ways=True, max_batched_tokens=17)
    fitting.add(with_item("r", prompt, 1, 9))
    assert run(fitting)["r"].token_ids == continuation(prompt, 5)
    engine.add(with_item("s", prompt, 1, 8))
    assert run(engine)["s"].token_ids == continuation(prompt, 5)


def test_an_item_of_different_tokens_is_refused_for_a_block_does_not_tell_those_of_the_next() -> None:
    engine, _ = make_engine(num_blocks=64, both_ways=True)
    with pytest.raises(InvalidRequestError, match=r"item at \[1, 4\) has several different tokens"):
        engine.add(with_item("r", [1, 2, 2, 3, 4], 1, 3))


def test_an_item_that_has_no_room_beside_what_decodes_goes_before_it() -> None:
    engine, executor = make_engine(
        num_blocks=64, max_rows=4, both_ways=True, async_scheduling=False, max_batched_tokens=4, eager=False
    )
    for name in range(3):
        engine.add(request(f"decodes {name}", [name + 1], 40))
    for _ in range(6):
        engine.step(0)
        executor.finish_one()
    engine.add(with_item("item", [1, 2, 2, 2, 2, 3], 1, 4, tokens=3))
    steps: list[dict[str, int]] = []
    for _ in range(8):
        engine.step(0)
        steps += [dict(zip(batch.rows.tolist(), batch.query_lens.tolist(), strict=True)) for batch in executor.queue]
        executor.finish_one()
    assert {3: 4} in steps  # for one step nothing else
    assert [len(step) for step in steps].count(1) == 1
    executor.eager = True
    run(engine)


def test_a_chunk_may_begin_inside_an_item_behind_what_is_cached() -> None:
    engine, executor = make_engine(num_blocks=64, both_ways=True, eager=False)
    prompt = [1, 2, 2, 2, 2, 2, 2, 3]  # the first block ends inside
    for name in ("first", "again"):
        engine.add(with_item(name, prompt, 1, 6))
        seen: list[tuple[list[int], list[int]]] = []
        while engine.has_work():
            engine.step(0)
            seen += [(batch.starts.tolist(), batch.sees.tolist()) for batch in executor.queue]
            executor.finish_one()
        chunks = [sees for _, sees in seen if sees]
        assert chunks == ([[1, *[7] * 6, 8]] if name == "first" else [[7, 7, 7, 8]])


def test_no_more_is_said_of_steps_where_no_token_sees_behind_itself() -> None:
    engine, executor = make_engine(num_blocks=64, eager=False, both_ways=True)
    engine.add(with_item("one", [1, 2, 3], 1, 1))
    steps = 0
    while engine.has_work():
        engine.step(0)
        steps += len(executor.queue)
        assert not any(len(batch.sees) for batch in executor.queue)
        executor.finish_one()
    assert steps
