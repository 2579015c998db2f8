"""An engine that ends puts what only it has cached into storage: the most valuable first, whatever storage does."""

from __future__ import annotations

import pytest
from support.engine.simulated_copies import Storage
from support.engine.simulated_engine import BLOCK, make_engine, request, run

from headwise.cache_controller.block_hash import extend_hashes, hash_seed
from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.runtime.engine.core import EngineCore

PROMPTS = [[10 * n + i % 7 for i in range(4 * BLOCK)] for n in range(1, 4)]


def hashes_of(engine: EngineCore, prompt: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, hash_seed(engine.card.identity), request("any", prompt, 1).prompt_token_ids, BLOCK)
    return hashes


def computed(storage: Storage, **options: object) -> EngineCore:
    """An engine that has computed all prompts; none of it is in storage."""
    engine, executor = make_engine(
        num_blocks=64, host_blocks=32, storage=storage, write_policy="write_back", prefetch="best_effort", **options
    )
    engine.executor = executor
    for number, prompt in enumerate(PROMPTS):
        engine.add(request(f"r{number}", prompt, 2))
    run(engine)
    assert not storage
    return engine


def stored(storage: Storage) -> list[bytes]:
    """Token blocks in the order in which they came there."""
    return list(dict.fromkeys(block_hash for block_hash, _ in storage))


def hand_over(engine: EngineCore, hashes: list[bytes] | None) -> None:
    engine.hand_over(hashes)
    for _ in range(10_000):
        if not engine.is_handing_over:
            engine.cache.check_integrity()
            return
        engine.step(None)
    raise AssertionError("it does not come to an end")


def test_the_blocks_that_are_named_reach_storage_in_their_order_and_no_others() -> None:
    storage: Storage = {}
    engine = computed(storage)
    second, third = hashes_of(engine, PROMPTS[1]), hashes_of(engine, PROMPTS[2])
    hand_over(engine, [*third, *second, b"unknown to it..."])
    assert stored(storage) == [*third, *second]


def test_of_those_that_are_named_storage_gets_as_many_as_it_is_told_to_and_what_is_computed_meanwhile_besides() -> None:
    storage: Storage = {}
    engine = computed(storage)
    second, third = hashes_of(engine, PROMPTS[1]), hashes_of(engine, PROMPTS[2])
    late = [90 + i % 7 for i in range(4 * BLOCK)]
    engine.add(request("late", late, 4))
    engine.step(None)
    engine.hand_over([*third, *second], storable=len(third) + 1)
    run(engine)
    assert stored(storage) == [*third, second[0], *hashes_of(engine, late)]


def test_every_group_s_blocks_of_a_window_model_reach_storage() -> None:
    storage: Storage = {}
    engine = computed(storage, policies=(FULL, HeadPolicy(window=5)))
    hand_over(engine, None)
    assert {group for _, group in storage} == {0, 1}


def test_where_the_index_says_nothing_all_that_is_cached_goes_there() -> None:
    storage: Storage = {}
    engine = computed(storage)
    hand_over(engine, None)
    assert set(stored(storage)) == {block for prompt in PROMPTS for block in hashes_of(engine, prompt)}


def test_what_is_computed_meanwhile_goes_there_once_it_has_ended() -> None:
    storage: Storage = {}
    engine = computed(storage)
    late = [90 + i % 7 for i in range(4 * BLOCK)]
    engine.add(request("late", late, 4))
    engine.step(None)
    hand_over(engine, [])
    assert stored(storage) == hashes_of(engine, late)


def test_a_request_runs_on_beside_it_and_gets_its_tokens() -> None:
    alone = computed({})
    alone.add(request("r", PROMPTS[0], 6))
    expected = run(alone)["r"].token_ids
    engine = computed({})
    engine.add(request("r", PROMPTS[0], 6))
    engine.hand_over(None)
    assert run(engine)["r"].token_ids == expected
    assert not engine.is_handing_over


def test_storage_that_refuses_all_is_asked_once_for_each_block() -> None:
    storage: Storage = {}
    engine = computed(storage)
    engine.executor.faults.lose_put = lambda: True
    hand_over(engine, None)
    assert not storage
    assert engine.stats()["storage"]["failed_puts"] == sum(len(hashes_of(engine, prompt)) for prompt in PROMPTS)


def test_storage_that_hangs_ends_it_after_its_timeout() -> None:
    storage: Storage = {}
    engine = computed(storage, storage_timeout_s=5.0)
    engine.executor.faults.storage_steps = None
    hand_over(engine, None)
    assert engine.stats()["storage"]["is_stalled"]


@pytest.mark.parametrize("options", [{}, {"host_blocks": 8}])
def test_without_storage_there_is_nothing_to_hand_over(options: dict[str, int]) -> None:
    engine, _ = make_engine(**options)
    engine.hand_over(None)
    assert not engine.is_handing_over
    assert not engine.has_work()


def test_only_what_has_not_begun_is_sent_away_unless_the_engine_sleeps() -> None:
    engine, _ = make_engine(max_rows=1)
    engine.add(request("begun", PROMPTS[0], 2))
    engine.step(0)
    engine.add(request("waits", PROMPTS[1], 2))
    assert engine.not_begun() == ["waits"]
    engine.operate("sleep")
    engine.step(0)
    assert engine.not_begun() == ["begun", "waits"]
