"""States: one live copy per sequence, and checkpoints where another request may resume."""

from __future__ import annotations

import numpy as np
from support.cached_sequences import BLOCK, commit, extend, grow, hashes_of, manager, nothing, serve

from headwise.cache_controller.cache_manager import CacheManager
from headwise.cache_controller.policy import FULL, STATE

STATES = (FULL, STATE, STATE)


def held_columns(cache: CacheManager, row: int) -> list[int]:
    """Columns in which a row has states: the same for both groups."""
    first, second = (np.flatnonzero(cache.tables[row, group] >= 0).tolist() for group in (1, 2))
    assert first == second
    return first


def served(cache: CacheManager, tokens) -> int:
    return cache.match(hashes_of(tokens), len(tokens) - 1).num_blocks


def test_a_sequence_holds_one_state_of_each_group_however_long_it_is() -> None:
    cache = manager(num_blocks=64, policies=STATES)
    cache.adopt(0, nothing(cache), 48)
    for done in range(1, 49):
        assert extend(cache, 0, done)
        commit(cache, 0, range(done))
        assert held_columns(cache, 0) == [(done - 1) // BLOCK]
    assert cache.pool.num_held == 48 // BLOCK + 2


def test_a_prompt_leaves_a_checkpoint_before_its_last_token_so_that_it_can_come_again() -> None:
    cache = manager(policies=STATES)
    assert serve(cache, 0, range(10)) == 0
    cache.release(0)
    assert served(cache, range(10)) == 2
    assert served(cache, range(9)) == 2
    assert served(cache, range(8)) == 0, "there is no checkpoint behind one block"
    assert serve(cache, 0, [*range(10), *range(50, 55)]) == 8


def test_a_prompt_of_whole_blocks_leaves_one_behind_it_too() -> None:
    cache = manager(policies=STATES)
    cache.adopt(0, nothing(cache), 8)
    grow(cache, 0, range(9), step=8)
    cache.release(0)
    assert [served(cache, range(8)), served(cache, range(9))] == [1, 2]


def test_a_long_prompt_leaves_checkpoints_on_the_way() -> None:
    cache = manager(num_blocks=64, policies=STATES, checkpoint_tokens=2 * BLOCK)
    serve(cache, 0, range(30))
    cache.release(0)
    assert [served(cache, [*range(count), 99]) for count in range(4, 29, 4)] == [0, 2, 2, 4, 4, 6, 7]


def test_where_prompts_part_a_checkpoint_is_missing_once_and_then_kept() -> None:
    cache = manager(num_blocks=64, policies=STATES)
    prefix = list(range(20))

    def ask(question: int) -> int:
        found = serve(cache, 0, prefix + [question] * 9)
        cache.release(0)
        return found

    assert [ask(100), ask(101)] == [0, 0]
    assert cache.stats().lost_checkpoint_tokens == len(prefix)
    assert [ask(102), ask(103)] == [20, 20]
    assert cache.stats().lost_window_tokens == 0


def test_the_end_of_an_answer_can_be_resumed_from() -> None:
    cache = manager(num_blocks=64, policies=STATES)
    cache.adopt(0, nothing(cache), 6)
    grow(cache, 0, range(23), step=6)  # the prompt, and then tokens in steps that end within blocks, and at their ends
    for done in range(24, 31):
        grow(cache, 0, range(done), done - 1)
    cache.release(0)
    assert served(cache, range(40)) == 7


def test_short_of_blocks_the_live_state_takes_the_place_of_its_checkpoint() -> None:
    cache = manager(num_blocks=12, policies=STATES)
    cache.adopt(0, nothing(cache), 8)
    grow(cache, 0, range(8), step=4)
    assert served(cache, range(12)) == 2
    taken = cache.pool.allocate(cache.num_available - 1)
    assert extend(cache, 0, 9)
    assert held_columns(cache, 0) == [2]
    commit(cache, 0, range(9))
    assert served(cache, range(12)) == 0
    cache.pool.release(taken)
    cache.check_integrity()


def test_checkpoints_leave_room_for_what_steps_under_way_may_need() -> None:
    made = []
    for num_blocks in (9, 10):  # 3 of tokens, 2 live states, 2 for the checkpoint, and those of a step: 1 and 2
        cache = manager(num_blocks=num_blocks, policies=STATES)
        serve(cache, 0, range(9))
        made.append(held_columns(cache, 0))
        cache.release(0)
        made.append(served(cache, range(9)))
    assert made == [[2], 0, [2], 2]


def test_a_checkpoint_that_others_hold_is_never_written_to() -> None:
    cache = manager(num_blocks=10, policies=STATES)
    serve(cache, 0, range(9))
    cache.release(0)
    for row in (1, 2):
        cache.adopt(row, cache.match(hashes_of(range(9)), 8), 9)
    checkpoint = cache.tables[1, 1:, 1].copy()
    assert (checkpoint == cache.tables[2, 1:, 1]).all()
    assert (checkpoint >= 0).all()
    assert extend(cache, 1, 9)
    assert not set(cache.tables[1, 1:, 2]) & set(checkpoint)
    taken = cache.pool.allocate(cache.num_available - 2)
    assert cache.blocks_needed(np.array([2], np.int32), np.array([9])).tolist() == [3]
    assert not extend(cache, 2, 9), "there are two blocks left, and the live states need both"
    cache.release(1)
    assert extend(cache, 2, 9)
    cache.release(2)
    cache.pool.release(taken)
    cache.check_integrity()


def test_a_hit_on_states_alone_needs_no_other_block() -> None:
    cache = manager(num_blocks=8, policies=(STATE,))
    serve(cache, 0, range(17))
    assert cache.pool.num_held == 1
    cache.release(0)
    assert served(cache, range(17)) == 4
    assert cache.pool.num_cached == 1


def test_without_prefix_caching_states_leave_nothing_behind() -> None:
    cache = manager(policies=STATES, prefix_caching=False, checkpoint_tokens=BLOCK)
    cache.adopt(0, nothing(cache), 30)
    grow(cache, 0, range(30))
    assert cache.pool.num_held == 8 + 2
    assert cache.pool.num_cached == 0
