from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from support.cached_sequences import BLOCK, WINDOW, commit, evict, extend, grow, hashes_of, manager, nothing, serve
from support.index.model import Heard, assert_match_serves, servable_depths, stated

from headwise.cache_controller.cache_manager import CacheManager
from headwise.cache_controller.host_tier import HostConfig
from headwise.cache_controller.policy import FULL, STATE, HeadPolicy
from headwise.cache_controller.radix_tree import ROOT
from headwise.cache_controller.windows import GroupWindows


def test_a_second_request_finds_the_prefix_of_the_first() -> None:
    cache = manager()
    assert serve(cache, 0, range(10)) == 0
    assert serve(cache, 1, [*range(8), 99, 98]) == 8
    assert (cache.tables[0, 0, :2] == cache.tables[1, 0, :2]).all()
    assert cache.tables[0, 0, 2] != cache.tables[1, 0, 2]


def test_a_whole_prompt_is_never_served_so_that_its_last_token_gives_logits() -> None:
    cache = manager()
    serve(cache, 0, range(8))
    assert serve(cache, 1, range(8)) == 4


def test_without_prefix_caching_nothing_is_kept() -> None:
    cache = manager(prefix_caching=False)
    serve(cache, 0, range(10))
    cache.release(0)
    assert serve(cache, 0, range(10)) == 0
    assert cache.pool.num_cached == 0


def test_the_deepest_blocks_of_the_least_recent_request_go_first() -> None:
    cache = manager(num_blocks=4)
    serve(cache, 0, range(12))
    cache.release(0)
    serve(cache, 1, range(100, 108))  # takes the free block, and one of the first request's
    cache.release(1)
    assert cache.match(hashes_of(range(12)), 12).num_blocks == 2


def test_extend_takes_nothing_when_the_pool_has_not_enough() -> None:
    cache = manager(num_blocks=3)
    serve(cache, 0, range(8))
    cache.adopt(1, nothing(cache), 12)
    assert not extend(cache, 1, 8)
    assert cache.pool.num_available == 1
    assert extend(cache, 1, 4)


def test_a_window_group_that_lost_its_last_blocks_serves_only_the_depth_before() -> None:
    cache = manager(num_blocks=32, policies=(FULL, WINDOW))
    serve(cache, 0, range(24))
    last = int(cache.tables[0, 1, 5])
    cache.release(0)
    evict(cache, last)
    assert cache.match(hashes_of(range(24)), 24).num_blocks == 5


def test_a_window_group_needs_its_sink_and_not_its_middle() -> None:
    for evicted, servable in ((0, 0), (1, 6), (2, 6)):
        cache = manager(num_blocks=32, policies=(FULL, WINDOW))
        serve(cache, 0, range(24))
        block = int(cache.tree.device.blocks[cache.tree.nodes[hashes_of(range(24))[evicted]], 1])
        cache.release(0)
        evict(cache, block)
        assert cache.match(hashes_of(range(24)), 24).num_blocks == servable


def test_a_window_group_gives_back_what_no_query_sees_any_more() -> None:
    cache = manager(num_blocks=64, policies=(FULL, WINDOW))
    cache.adopt(0, nothing(cache), 48)
    for done in range(BLOCK, 49, BLOCK):
        assert extend(cache, 0, done)
        commit(cache, 0, range(done))
        held = (cache.tables[0] >= 0).sum(axis=1)
        assert held[0] == done // BLOCK
        assert held[1] <= 1 + 3  # the sink's block, and those that a window of 6 and a step of 4 reach into
    assert cache.tables[0, 1].tolist()[:12] == [cache.tables[0, 1, 0], *[-1] * 9, *cache.tables[0, 1, 10:12]]
    assert cache.stats().recycled_blocks == 9


def test_recycled_blocks_are_the_first_to_be_evicted_but_serve_until_then() -> None:
    cache = manager(num_blocks=14, policies=(FULL, WINDOW))
    serve(cache, 0, range(24))
    assert cache.match(hashes_of(range(12)), 12).num_blocks == 3
    assert cache.pool.num_cached == 3
    cache.adopt(1, nothing(cache), 4)
    assert extend(cache, 1, 8)  # takes the two free blocks and two recycled ones
    assert cache.match(hashes_of(range(12)), 12).num_blocks < 3
    assert cache.match(hashes_of(range(24)), 24).num_blocks == 6


def test_a_window_where_two_requests_part_is_lost_once_and_then_kept() -> None:
    cache = manager(num_blocks=24, policies=(FULL, WINDOW))
    prefix = list(range(24))

    def ask(question: int) -> int:
        """Serve prefix and question, then let others evict all that is evicted first; the prefix tokens served."""
        tokens = prefix + [question] * 16
        match = cache.match(hashes_of(tokens), len(tokens) - 1)
        cache.adopt(0, match, len(tokens))
        grow(cache, 0, tokens, match.num_blocks * BLOCK)
        cache.release(0)
        other = [1000 + question] * 24
        cache.adopt(1, nothing(cache), len(other))
        grow(cache, 1, other)
        cache.release(1)
        return match.num_blocks * BLOCK

    assert [ask(1), ask(2)] == [0, 4]  # where they part was not known while the first one's window was there
    assert cache.stats().lost_window_tokens == len(prefix) - 4
    assert [ask(3), ask(4)] == [24, 24]


def test_the_window_at_the_end_of_a_prompt_outlives_those_in_its_middle() -> None:
    cache = manager(num_blocks=64, policies=(FULL, WINDOW))
    prompt = list(range(24))
    cache.adopt(0, nothing(cache), len(prompt))
    grow(cache, 0, prompt + [7] * 16)
    recycled = cache.pool.cached_blocks.tolist()
    path = cache.tree.find(hashes_of(prompt))
    windows = cache.tree.device.blocks[path, 1].tolist()
    assert recycled[-2:] == windows[4:6], "the two blocks that a window of 6 after the prompt reaches into"
    assert set(windows[1:4]) < set(recycled[:-2])


def test_a_prompt_may_part_some_tokens_before_the_end_of_the_last_one_and_still_resume() -> None:
    served = []
    for slack in (0, 8):
        cache = manager(num_blocks=28, policies=(FULL, WINDOW), resume_slack=slack)
        first = [*range(24), *[7] * 16]
        cache.adopt(0, nothing(cache), 24)  # 24 tokens are the prompt's
        grow(cache, 0, first)
        cache.release(0)
        cache.adopt(1, nothing(cache), 24)
        grow(cache, 1, [8] * 24)
        cache.release(1)
        served.append(cache.match(hashes_of([*range(20), *[9] * 20]), 40).num_blocks)
    assert served == [1, 5]


requests = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(0, 24), st.booleans()), min_size=1, max_size=12
)


@settings(max_examples=60)
@given(requests)
def test_while_memory_suffices_windows_lose_no_hit_that_a_full_cache_has(requests) -> None:
    full = manager(num_blocks=600, policies=(FULL, FULL, FULL))
    windowed = manager(num_blocks=600, policies=(FULL, WINDOW, HeadPolicy(window=9)))
    free_rows = list(range(8))
    for family, length, twist, stays in requests:
        tokens = [family * 100 + i + (1000 if i >= twist else 0) for i in range(length)]
        row = free_rows[0]
        served = []
        for cache in (full, windowed):
            match = cache.match(hashes_of(tokens), length - 1)
            served.append(match.num_blocks)
            cache.adopt(row, match, length)
            grow(cache, row, tokens, match.num_blocks * BLOCK)
            if not stays:
                cache.release(row)
        assert served[0] == served[1]
        if stays and len(free_rows) > 1:
            free_rows.pop(0)
        elif stays:
            full.release(row)
            windowed.release(row)
    assert full.stats().evicted_blocks == 0


def test_what_a_match_has_on_the_host_is_not_evicted_by_storing_what_it_has_on_the_device() -> None:
    cache = manager(host=HostConfig(num_blocks=2, policy="write_through_selective", threshold=2))
    tokens = list(range(4 * BLOCK + 1))
    serve(cache, 0, tokens)
    cache.release(0)
    device = cache.match(hashes_of(tokens), len(tokens) - 1).blocks[0]
    cache.host.store(device[2:])
    cache.host.stored(cache.host.take_stores()[:, 1].tolist())
    for block in device[:1:-1]:
        evict(cache, block)
    match = cache.match(hashes_of(tokens), len(tokens) - 1)
    cache.adopt(0, match, len(tokens))  # its second use: what only the device has is to go to the host, which is full
    assert sorted(cache.host.take_loads(1)[:, 1].tolist()) == sorted(match.host[0, 2:].tolist())
    assert not len(cache.host.take_stores())
    cache.check_integrity()


def test_blocks_wait_for_the_host_in_order_and_each_is_copied_once() -> None:
    cache = manager(num_blocks=16, host=HostConfig(num_blocks=16, policy="write_back"))  # two copies at once
    tokens = list(range(5 * BLOCK))
    serve(cache, 0, tokens)
    cache.release(0)
    blocks = cache.tree.device.blocks[cache.tree.find(hashes_of(tokens))][:, 0]
    cache.host.store(blocks)
    cache.host.store(blocks)
    evict(cache, blocks[4])
    copied = []
    while len(stores := cache.host.take_stores()):
        copied += stores[:, 0].tolist()
        cache.check_integrity()
        cache.host.stored(stores[:, 1].tolist())
    assert copied == blocks[:4].tolist()
    cache.check_integrity()


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective"])
def test_a_full_host_forgets_the_tails_of_paths_before_their_heads(policy: str) -> None:
    cache = manager(num_blocks=64, host=HostConfig(num_blocks=10, policy=policy))
    prompts = [list(range(first, first + 6 * BLOCK + 1)) for first in (0, 100)]
    for prompt in prompts:
        for row in range(2):
            serve(cache, row, prompt)
            while len(stores := cache.host.take_stores()):
                cache.host.stored(stores[:, 1].tolist())
            cache.release(row)
    cache.reset(("device",))
    served = [cache.match(hashes_of(prompt), len(prompt) - 1).num_blocks for prompt in prompts]
    assert served == [4, 6]


def test_a_block_that_came_back_to_its_row_for_other_tokens_is_not_taken_for_what_it_was() -> None:
    cache = manager(num_blocks=4, policies=(HeadPolicy(window=BLOCK),))
    tokens, other = list(range(3 * BLOCK)), list(range(100, 100 + 2 * BLOCK))
    cache.adopt(0, nothing(cache), BLOCK)
    grow(cache, 0, tokens[: 2 * BLOCK - 1])  # leaves its first block as cache
    serve(cache, 1, other)
    cache.release(1)
    first_node = cache.tree.nodes[hashes_of(tokens)[0]]
    first_block = cache.tree.device.blocks[first_node, 0]
    for block_hash in [*hashes_of(tokens)[:1], *reversed(hashes_of(other))]:
        evict(cache, cache.tree.device.blocks[cache.tree.nodes[block_hash], 0])
    cache.adopt(1, nothing(cache), 2 * BLOCK)
    assert extend(cache, 1, 2 * BLOCK)
    assert extend(cache, 0, 3 * BLOCK)
    commit(cache, 0, tokens)
    last = cache.tree.nodes[hashes_of(tokens)[2]]
    assert (last, cache.tables[0, 0, 2]) == (first_node, first_block), "the third block has the number of the first"
    cache.release(0)
    cache.release(1)
    assert cache.pool.num_held == 0
    cache.check_integrity()


def test_what_a_row_has_lost_does_not_come_back_as_nodes_that_hold_nothing() -> None:
    cache = manager(policies=(HeadPolicy(window=1),))
    cache.adopt(0, nothing(cache), 6)
    grow(cache, 0, range(5))  # no query sees the first block any more
    cache.reset()
    grow(cache, 0, range(6), done=5, step=1)
    assert not cache.tree.nodes
    cache.check_integrity()


def test_what_took_an_evicted_blocks_place_is_not_copied_in_its_stead() -> None:
    cache = manager(num_blocks=16, host=HostConfig(num_blocks=16, policy="write_back"))  # two copies at once
    serve(cache, 0, range(3 * BLOCK))
    blocks = cache.tables[0, 0, :3].copy()
    node = cache.tree.nodes[hashes_of(range(3 * BLOCK))[2]]
    cache.release(0)
    cache.host.store(blocks)
    evict(cache, blocks[2])
    serve(cache, 0, range(100, 100 + BLOCK))
    assert (cache.tree.nodes[hashes_of(range(100, 104))[0]], cache.tables[0, 0, 0]) == (node, blocks[2])
    cache.host.stored(cache.host.take_stores()[:, 1].tolist())
    assert not len(cache.host.take_stores())
    cache.check_integrity()


def with_storage(host_blocks: int) -> CacheManager:
    host = HostConfig(host_blocks, "write_through", storage_timeout_s=10.0)
    return manager(num_blocks=200, max_blocks=200, host=host)


def test_blocks_from_storage_find_their_place_without_a_walk_from_the_root_each() -> None:
    cache, path = with_storage(1_000), hashes_of(range(200 * BLOCK))
    cache.fetch(path, np.ones((200, 1), dtype=np.bool_))
    blocks = cache.host.storage.take_fetches().blocks[:, 1].tolist()
    inserted, insert = [], cache.tree.insert
    cache.tree.insert = lambda path, *where: inserted.extend(path) or insert(path, *where)
    for block in blocks:
        cache.host.arrived([block], [])
    assert inserted == path
    assert cache.match(path, 200 * BLOCK).num_blocks == 200
    cache.check_integrity()


def test_what_is_forgotten_while_copies_of_it_are_under_way_is_known_nowhere() -> None:
    cache, path = with_storage(16), hashes_of(range(3 * BLOCK))
    serve(cache, 0, range(3 * BLOCK))
    stores = cache.host.take_stores()[:, 1].tolist()
    cache.host.stored(stores[:2])
    puts = cache.host.storage.take_puts().blocks[:, 1].tolist()
    cache.forget(path)  # a block is on its way to the host, and two to storage
    cache.check_integrity()
    cache.host.stored(stores[2:])
    cache.host.storage.put_done(puts, [])
    assert cache.match(path, 3 * BLOCK).num_blocks == 0
    cache.release(0)
    assert not cache.tree.nodes
    assert (cache.pool.num_cached, cache.host.stats().cached_blocks, len(cache.host.storage.stored)) == (0, 0, 0)
    cache.check_integrity()


def test_who_holds_what_is_forgotten_keeps_it() -> None:
    cache, path = manager(), hashes_of(range(3 * BLOCK))
    for row in (0, 1):
        serve(cache, row, range(3 * BLOCK))
    shared = cache.tables[1, 0, :2].copy()
    cache.forget(path[1:])
    cache.release(0)
    assert cache.tables[1, 0, :2].tolist() == shared.tolist()
    assert cache.match(path, 3 * BLOCK).num_blocks == 1
    cache.release(1)
    cache.check_integrity()
    assert cache.pool.num_cached == 1


def test_how_much_of_a_lost_head_fits_on_the_host_is_found_in_a_few_looks() -> None:
    cache, tokens = with_storage(160), list(range(200 * BLOCK))
    path = hashes_of(tokens)
    serve(cache, 0, tokens)
    cache.release(0)
    for block in cache.tree.device.blocks[cache.tree.find(path)][:41, 0]:
        evict(cache, block)  # one more than may be fetched at once
    looks, servable = [], cache._finder._servable
    cache._finder._servable = lambda there: looks.append(len(there)) or servable(there)
    fetch = cache.fetch(path, np.ones((200, 1), dtype=np.bool_))
    assert fetch is not None
    assert fetch.left == 40
    assert len(looks) <= 4


def test_index_updates_state_what_a_finished_request_left_and_what_eviction_took() -> None:
    cache = manager(num_blocks=3)
    serve(cache, 0, range(9))
    assert cache.drain_index_updates() == []
    cache.release(0)
    (kept,) = cache.drain_index_updates()
    assert (kept.start_block, kept.block_hashes, kept.resident) == (0, tuple(hashes_of(range(9))), True)
    serve(cache, 1, range(50, 58))
    (gone,) = cache.drain_index_updates()
    assert (gone.start_block, gone.block_hashes, gone.resident) == (1, (hashes_of(range(9))[1],), False)


class CacheMachine(RuleBasedStateMachine):
    """Random requests over few prefixes in a small pool. Blocks remember what was written to them."""

    rows = Bundle("rows")
    policies: ClassVar = (FULL, WINDOW, FULL)
    num_blocks: ClassVar = 26
    max_rows: ClassVar = 8
    longest_prompt: ClassVar = 24

    def __init__(self) -> None:
        super().__init__()
        self.cache = manager(num_blocks=self.num_blocks, policies=self.policies, checkpoint_tokens=8)
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.content: dict[int, tuple[int, ...]] = {}
        self.heard = Heard(self.cache)
        self.paths: list[list[bytes]] = []

    @rule(target=rows, family=st.integers(0, 2), length=st.integers(1, 24), twist=st.integers(0, 24))
    def start(self, family: int, length: int, twist: int) -> int:
        row = next((r for r in range(self.max_rows) if r not in self.tokens), None)
        if row is None:
            return multiple()
        length = (length - 1) % self.longest_prompt + 1
        tokens = [family * 100 + i + (1000 if i >= twist else 0) for i in range(length)]
        match = self.cache.match(hashes_of(tokens), length - 1)
        before = self.cache.num_available
        reclaimed = self.cache.num_reclaimed(match)
        self.cache.adopt(row, match, length)
        assert before - self.cache.num_available <= reclaimed
        self.tokens[row], self.computed[row] = tokens, match.num_blocks * BLOCK
        self._assert_row_reads_right(row)
        return row

    @rule(row=rows, count=st.integers(1, 9))
    def compute(self, row: int, count: int) -> None:
        self._compute(row, count)

    def _compute(self, row: int, count: int) -> None:
        tokens = self.tokens[row]
        done = self.computed[row] + count
        if done > 60 or not extend(self.cache, row, done):
            return
        self._assert_states_go_on(row, done)
        tokens.extend(self.tokens[row][-1] + 1 + i for i in range(done - len(tokens)))
        for depth in range(self.computed[row] // BLOCK, -(-done // BLOCK)):
            for block in self.cache.tables[row, :, depth].tolist():
                self.content[block] = tuple(tokens[: min(done, (depth + 1) * BLOCK)])
        self.computed[row] = done
        self._commit(row, tokens[:done])
        self._assert_row_reads_right(row)

    @rule(row=consumes(rows), counts=st.lists(st.integers(1, 9), max_size=3))
    def finish(self, row: int, counts: Sequence[int] = ()) -> None:
        for count in counts:
            self._compute(row, count)
        self.paths = [*self.paths[-5:], hashes_of(self.tokens.pop(row))]
        del self.computed[row]
        self.cache.release(row)

    @rule()
    def forget_cached(self) -> None:
        self.cache.reset()

    @rule(random=st.randoms(use_true_random=False))
    def give_numbers_anew_in_another_order(self, random: Random) -> None:
        """Nothing may depend on which node's or block's number comes back for what."""
        random.shuffle(self.cache.tree._unused)
        free = self.cache.pool.free_blocks.tolist()
        random.shuffle(free)
        self.cache.pool._stack[: len(free)] = free

    def _assert_states_go_on(self, row: int, done: int) -> None:
        """A step to ``done`` tokens finds states right behind those before: where they are left, or moved along."""
        before = self.computed[row]
        for group in np.flatnonzero([policy.is_state for policy in self.cache.policies]) if before else ():
            left, live = (self.cache.tables[row, group, (tokens - 1) // BLOCK] for tokens in (before, done))
            assert self.content[int(live if left < 0 else left)] == tuple(self.tokens[row][:before])

    def _commit(self, row: int, tokens: list[int]) -> None:
        commit(self.cache, row, tokens)

    def _assert_row_reads_right(self, row: int) -> None:
        done = self.computed[row]
        windows = GroupWindows(self.cache.policies, BLOCK)
        live = windows.first_live(done)
        for group in range(len(self.cache.policies)):
            for depth in range(-(-done // BLOCK)):
                if depth >= live[group] or depth < windows.sink_blocks[group]:
                    block = int(self.cache.tables[row, group, depth])
                    expected = tuple(self.tokens[row][: min(done, (depth + 1) * BLOCK)])
                    assert self.content[block][: len(expected)] == expected
                    assert not self.cache.policies[group].is_state or self.content[block] == expected

    @invariant()
    def the_books_balance(self) -> None:
        self.cache.check_integrity()
        stats = self.cache.stats()
        assert stats.free_blocks + stats.cached_blocks + stats.held_blocks == stats.total_blocks

    @invariant()
    def the_index_is_told_the_truth(self) -> None:
        self.heard.hear(self.cache.drain_index_updates())
        truth = stated(self.cache.resident_paths())
        paths = [*self.paths, *map(hashes_of, self.tokens.values())]
        for path in paths:
            served = servable_depths(self.cache, path)
            assert_match_serves(self.cache, path, served)
            assert all(said <= depth for said, depth in zip(self.heard.depths(path), served, strict=True))
            assert self.tokens or self.heard.depths(path) == served
        if not self.tokens:
            assert self.heard.said == truth

    def teardown(self) -> None:
        for row in list(self.tokens):
            self.finish(row)
        assert self.cache.pool.num_held == 0
        self.the_books_balance()
        self.the_index_is_told_the_truth()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=30, stateful_step_count=40)


class WindowsMachine(CacheMachine):
    """No group sees everything, and one has no sink."""

    policies = (WINDOW, HeadPolicy(window=9))


class StatesMachine(CacheMachine):
    """Two groups of states beside attention."""

    policies = (FULL, STATE, STATE)


class StatesAndWindowsMachine(CacheMachine):
    policies = (FULL, WINDOW, STATE)


class FullMachine(CacheMachine):
    policies = (FULL,)


class SinksMachine(CacheMachine):
    """One group's sinks reach further than the other's window."""

    policies = (FULL, HeadPolicy(window=5, sink=10), HeadPolicy(window=6))


class ShortWindowsMachine(CacheMachine):
    """No group sees everything, and no window reaches further than a block: a row holds a block or two at once.

    The worst of all orders in which numbers are given anew: a block holds the same node's number again as before,
    wherever that is free. So nobody may know by a node's number whether a block has held the same all the while.
    """

    policies = (HeadPolicy(window=2), HeadPolicy(window=BLOCK))
    num_blocks = 6
    max_rows = 2
    longest_prompt = 8
    give_numbers_anew_in_another_order = None

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}  # by block: the node that it held last
        tree = self.cache.tree
        tree.prune(np.array(tree.insert(hashes_of(range(1000, 1000 + 128 * BLOCK)), ROOT, 0)))  # numbers to give away

    def _commit(self, row: int, tokens: list[int]) -> None:
        tree, path = self.cache.tree, hashes_of(tokens)
        spare = [node for node in tree._unused if node not in self.held.values()]
        unused, given = set(tree._unused) - set(spare), []
        for column in (column for column, block_hash in enumerate(path) if block_hash not in tree.nodes):
            before = {self.held.get(block) for block in self.cache.tables[row, :, column].tolist()} & unused
            given.append(min(before) if before else spare.pop())
            unused -= before
        tree._unused[:] = [node for node in tree._unused if node not in given] + given[::-1]
        super()._commit(row, tokens)
        for node in tree.nodes.values():
            self.held |= dict.fromkeys(tree.device.blocks[node].tolist(), node)


def _run(machine: type[CacheMachine], examples: int) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=40))


@pytest.mark.parametrize("examples", [12, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "machine", [WindowsMachine, StatesMachine, StatesAndWindowsMachine, FullMachine, SinksMachine, ShortWindowsMachine]
)
def test_caches_of_other_groups_keep_their_promises(machine, examples: int) -> None:
    _run(machine, examples)


@pytest.mark.soak
def test_short_windows_keep_their_promises_when_numbers_come_back_in_the_worst_order() -> None:
    _run(ShortWindowsMachine, 1000)
