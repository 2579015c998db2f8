from __future__ import annotations

import numpy as np
import pytest
from support.cached_sequences import BLOCK, hashes_of, manager, serve

from headwise.cache_controller.cache_manager import CacheManager
from headwise.cache_controller.host_tier import HostConfig
from headwise.cache_controller.leases import MAX_LEASES, Lease, Leases
from headwise.cache_controller.memories import DEVICE, HOST

PATH = hashes_of(range(4 * BLOCK))
ALL = np.ones((4, 1), dtype=np.bool_)


@pytest.fixture
def cache() -> CacheManager:
    """With four blocks on the device, two of which are on the host."""
    cache = manager(num_blocks=16, host=HostConfig(32, "write_back"))
    serve(cache, 0, range(4 * BLOCK))
    cache.release(0)
    copy(cache, cache.tree.device.blocks[cache.tree.find(PATH)][:2, 0])
    return cache


def copy(cache: CacheManager, device_blocks: np.ndarray) -> None:
    cache.host.store(device_blocks)
    cache.host.stored(cache.host.take_stores()[:, 1].tolist())


def ask(leases: Leases, name: bytes = b"a", until: float = 5.0, **options) -> Lease:
    lease = leases.ask(name, PATH, ALL, until, **options)
    assert lease is not None
    return lease


def columns(lease: Lease) -> list[int]:
    return lease.blocks[:, 0].tolist()


def test_what_is_on_the_host_is_leased_at_once_and_the_rest_when_it_has_been_stored(cache) -> None:
    leases = cache.host.leases
    lease = ask(leases)
    assert (columns(lease), lease.is_all) == ([0, 1], False)
    assert leases.advance(1.0) == []
    while len(stores := cache.host.take_stores()):
        cache.host.stored(stores[:, 1].tolist())
    assert leases.advance(2.0) == [(lease, 2)]
    assert (columns(lease), lease.is_all) == ([0, 1, 2, 3], True)
    assert leases.advance(3.0) == []
    cache.check_integrity()


def test_what_is_evicted_from_the_device_before_it_is_stored_is_not_leased(cache) -> None:
    lease = ask(cache.host.leases)
    cache.host.stored([], failed=cache.host.take_stores()[:, 1].tolist())
    cache.reset(("device",))
    cache.host.leases.advance(1.0)
    assert (columns(lease), lease.is_all) == ([0, 1], True)


def test_a_leased_block_is_neither_evicted_nor_reset_until_the_lease_ends(cache) -> None:
    lease = ask(cache.host.leases)
    cache.reset()
    cache.host.pool.allocate(cache.host.pool.num_available)
    assert cache.host.pool.is_held(int(lease.blocks[0, 2]))

    assert cache.host.leases.end(b"a", lease.grant)
    assert cache.host.pool.num_cached == 2


def test_a_lease_ends_once_and_says_the_same_to_who_asks_again(cache) -> None:
    leases, lease = cache.host.leases, ask(cache.host.leases)
    assert [leases.end(b"a", lease.grant) for _ in range(3)] == [True] * 3
    again = ask(leases)
    assert again.grant != lease.grant
    assert not leases.end(b"a", lease.grant + 7), "another grant of the same name"
    assert not leases.end(b"b", again.grant), "another name"


def test_silence_ends_a_lease_and_signs_of_life_keep_it(cache) -> None:
    leases, lease = cache.host.leases, ask(cache.host.leases)
    leases.advance(4.0)
    leases.find(b"a", 9.0)
    leases.advance(8.0)
    assert b"a" in leases
    leases.advance(9.0)
    assert not leases.end(b"a", lease.grant)
    assert (leases.stats().expired, leases.held_host_blocks()) == (1, set())


def test_a_lease_of_what_was_found_broken_has_not_held(cache) -> None:
    lease = ask(cache.host.leases)
    cache.forget(PATH[3:])
    assert not cache.host.leases.end(b"a", lease.grant)
    cache.check_integrity()


def test_leases_hold_a_quarter_of_the_host_at_most(cache) -> None:
    cache = manager(num_blocks=16, host=HostConfig(12, "write_back"))
    serve(cache, 0, range(4 * BLOCK))
    blocks = cache.tables[0, 0, :4].copy()
    cache.release(0)
    copy(cache, blocks[:2])
    copy(cache, blocks[2:])
    lease, same = ask(cache.host.leases), ask(cache.host.leases, b"b")
    assert columns(lease) == columns(same) == [0, 1, 2]
    assert lease.is_all
    cache.check_integrity()


def test_there_is_a_most_of_leases(cache) -> None:
    leases = cache.host.leases
    for index in range(MAX_LEASES):
        ask(leases, b"%d" % index)
    assert leases.ask(b"one more", PATH, ALL, 5.0) is None
    assert leases.stats().refused == 1


def test_a_lease_that_grows_waits_for_what_is_not_known_yet(cache) -> None:
    leases = cache.host.leases
    longer = hashes_of(range(6 * BLOCK))
    lease = leases.ask(b"a", longer, np.ones((6, 1), dtype=np.bool_), 5.0, is_growing=True)
    while len(stores := cache.host.take_stores()):
        cache.host.stored(stores[:, 1].tolist())
    leases.advance(1.0)
    assert (columns(lease), lease.is_all) == ([0, 1, 2, 3], False)
    leases.grown(b"a")
    assert leases.advance(2.0) == [(lease, 4)]
    assert lease.is_all


def test_what_is_behind_the_first_unknown_block_of_a_lease_that_grows_is_not_looked_at(cache) -> None:
    """It is looked at on every turn of an engine, of prompts of any length."""
    looked_at = []

    class Path(tuple):
        def __getitem__(self, column: int) -> bytes:
            looked_at.append(column)
            return super().__getitem__(column)

    longer = hashes_of(range(90 * BLOCK))
    leases = cache.host.leases
    lease = leases.ask(b"a", longer, np.ones((90, 1), dtype=np.bool_), 5.0, is_growing=True)
    assert columns(lease) == [0, 1]
    lease.hashes = Path(longer)
    leases.advance(1.0)
    assert max(looked_at) == 4


def test_a_reader_of_the_device_gets_what_is_settled_there_and_holds_none_of_it(cache) -> None:
    leases, settling = cache.host.leases, cache.host.settling
    lease = ask(leases, reads_device=True)
    assert columns(lease) == [0, 1], "the host's; whether kernels still write the others nobody knows"
    assert settling.has_work
    assert cache.host.take_mark(7)
    assert not cache.host.take_mark(8)
    cache.host.settled(6)
    assert leases.advance(1.0) == []
    cache.host.settled(7)
    assert leases.advance(2.0) == [(lease, 2)]
    assert lease.blocks[:, [0, 3]].tolist() == [[0, HOST], [1, HOST], [2, DEVICE], [3, DEVICE]]
    assert lease.is_all
    assert (cache.pool.num_held, len(cache.host.take_stores()), settling.has_work) == (0, 0, False)
    again = ask(leases, b"b", reads_device=True)
    assert len(again.blocks) == 4, "it is known to be settled"

    cache.pool.allocate(cache.pool.num_available)
    assert not leases.end(b"a", lease.grant), "who needs a block takes it"
    assert not leases.end(b"b", again.grant)
    cache.host.check_integrity()


def test_a_lease_of_device_blocks_that_nobody_took_has_held(cache) -> None:
    leases = cache.host.leases
    lease = ask(leases, reads_device=True)
    cache.host.take_mark(1)
    cache.host.settled(1)
    leases.advance(1.0)
    cache.pool.allocate(cache.pool.num_available - 4)
    assert leases.end(b"a", lease.grant), "of what is cached the least recent go first"
