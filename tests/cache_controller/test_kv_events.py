from __future__ import annotations

import numpy as np
import pytest
from support.cached_sequences import BLOCK, WINDOW, evict, grow, hashes_of, manager, nothing, serve
from support.index.model import Heard

from headwise.cache_controller import kv_events as index_statements
from headwise.cache_controller.cache_manager import CacheManager
from headwise.cache_controller.host_tier import HostConfig
from headwise.cache_controller.kv_events import IndexUpdate
from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.cache_controller.resumability import Resumability
from headwise.cache_controller.segments import nodes_below, segments_of

PATH = hashes_of(range(24))


def windowed(**kwargs) -> CacheManager:
    return manager(num_blocks=64, policies=(FULL, WINDOW), **kwargs)


def served(**kwargs) -> CacheManager:
    """A cache that has served a request of 6 blocks, and lost none of its windows."""
    cache = windowed(**kwargs)
    serve(cache, 0, range(24))
    cache.release(0)
    return cache


def block_of(cache: CacheManager, depth: int, group: int) -> int:
    return int(cache.tree.device.blocks[cache.tree.nodes[PATH[depth]], group])


def flags(update: IndexUpdate) -> tuple[str, int, int, bool, list[int]]:
    return update.tier, update.start_block, len(update.block_hashes), update.resident, list(update.resumable)


def test_a_finished_request_is_one_statement_with_the_depths_that_can_be_resumed() -> None:
    cache = served()
    assert [flags(update) for update in cache.drain_index_updates()] == [("device", 0, 6, True, [])]
    cache = windowed(resume_slack=0)
    cache.adopt(0, nothing(cache), 24)
    grow(cache, 0, range(24))
    cache.pool.evict_all()  # what was recycled
    cache.release(0)
    assert [flags(update) for update in cache.drain_index_updates()] == [("device", 0, 6, True, [1, 0, 0, 0, 0, 1])]


def test_without_window_groups_nothing_is_ever_said_of_resuming() -> None:
    cache = manager(num_blocks=6)
    for first in (0, 100, 200):
        serve(cache, 0, range(first, first + 16))
        cache.release(0)
    updates = cache.drain_index_updates() + cache.resident_paths()
    assert {update.resumable for update in updates} == {b""}
    assert len(cache.events._moved) == 0


def test_nothing_is_said_while_a_row_is_open() -> None:
    cache = windowed()
    serve(cache, 0, range(24))
    assert cache.drain_index_updates() == []
    cache.release(0)
    assert len(cache.drain_index_updates()) == 1
    assert cache.drain_index_updates() == []


def test_a_window_block_that_goes_takes_back_the_depths_that_need_it_and_they_stay_resident() -> None:
    cache = served()
    cache.drain_index_updates()
    evict(cache, block_of(cache, 3, 1))
    assert [flags(update) for update in cache.drain_index_updates()] == [("device", 3, 2, True, [0, 0])]


def test_a_window_block_that_nothing_said_depends_on_goes_unnoticed(monkeypatch) -> None:
    cache = served()
    for depth in (1, 3):  # now only the last depth is resumable, and needs none of what is left before its window
        evict(cache, block_of(cache, depth, 1))
    cache.drain_index_updates()
    monkeypatch.setattr(Resumability, "judge", lambda *_: pytest.fail("it was judged"))
    evict(cache, block_of(cache, 2, 1))
    assert cache.drain_index_updates() == []


def test_what_running_rows_leave_behind_is_not_judged(monkeypatch) -> None:
    cache = manager(num_blocks=26, policies=(FULL, WINDOW))
    serve(cache, 0, range(16))
    cache.release(0)
    cache.drain_index_updates()
    cache.adopt(1, nothing(cache), 40)
    monkeypatch.setattr(Resumability, "judge", lambda *_: pytest.fail("it was judged"))
    for length in range(500, 532, BLOCK):
        grow(cache, 1, range(500, length + BLOCK), length - 500)
        assert cache.drain_index_updates() == []
    assert cache.stats().recycled_blocks > 0


def test_a_sink_that_goes_takes_back_all_that_is_below_it_and_restores_it_when_it_is_computed_again() -> None:
    cache = served()
    serve(cache, 0, [*range(12), *range(50, 62)])
    cache.release(0)
    heard = Heard(cache)
    heard.hear(cache.drain_index_updates())
    evict(cache, block_of(cache, 0, 1))
    heard.hear(cache.drain_index_updates())
    assert not any(heard.said.values())
    assert len(heard.said) == 9
    serve(cache, 0, range(4))
    cache.release(0)
    heard.hear(cache.drain_index_updates())
    assert all(heard.said.values())


def test_a_sink_is_missed_also_where_no_depth_beside_it_could_be_resumed() -> None:
    cache = manager(num_blocks=64, policies=(FULL, HeadPolicy(window=6, sink=7), HeadPolicy(window=6)))
    serve(cache, 0, range(24))
    cache.release(0)
    heard = Heard(cache)
    for depth in (0, 1):
        evict(cache, block_of(cache, depth, 2))
    heard.hear(cache.drain_index_updates())
    assert [heard.said["device", block_hash] for block_hash in PATH] == [0, 0, 0, 1, 1, 1]
    evict(cache, block_of(cache, 1, 1))
    heard.hear(cache.drain_index_updates())
    assert not any(heard.said.values())


def test_others_statements_are_corrected_while_a_row_is_open() -> None:
    cache = served()
    heard = Heard(cache)
    heard.hear(cache.drain_index_updates())
    serve(cache, 0, [*range(24), *range(70, 78)])
    evict(cache, block_of(cache, 3, 1))
    heard.hear(cache.drain_index_updates())
    assert (heard.depths(PATH[:5]), heard.depths(PATH)) == ([3], [6])
    cache.release(0)
    heard.hear(cache.drain_index_updates())
    assert heard.depths(hashes_of([*range(24), *range(70, 78)])) == [8]


def hosted(**options) -> CacheManager:
    """A served cache, all of which is on the host too."""
    cache = served(host=HostConfig(64, "write_through"), **options)
    while len(stores := cache.host.take_stores()):
        cache.host.stored(stores[:, 1].tolist())
    return cache


def test_what_reaches_the_host_after_its_row_has_closed_is_told() -> None:
    cache = served(host=HostConfig(64, "write_through"))
    heard = Heard(cache)
    heard.hear(cache.drain_index_updates())
    assert not any(tier == "host" for tier, _ in heard.said)
    while len(stores := cache.host.take_stores()):
        for host_block in stores[:, 1].tolist():
            cache.host.stored([host_block])
            heard.hear(cache.drain_index_updates())
    assert {block_hash for tier, block_hash in heard.said if tier == "host"} == set(PATH)


def test_a_depth_may_be_resumed_with_the_host_alone() -> None:
    cache = hosted()
    heard = Heard(cache)
    heard.hear(cache.drain_index_updates())
    assert heard.depths(PATH) == [6, 6]
    evict(cache, block_of(cache, 5, 1))
    assert [flags(update) for update in cache.drain_index_updates()] == [("device", 5, 1, True, [0])]
    assert cache.match(PATH, 24).num_blocks == 6
    cache.host.pool.evict_all()
    assert [flags(update) for update in cache.drain_index_updates()] == [("host", 0, 6, False, [])]


def test_a_window_that_comes_back_to_the_device_is_told() -> None:
    cache = hosted()
    evict(cache, block_of(cache, 5, 1))
    cache.drain_index_updates()
    cache.adopt(0, cache.match(PATH, 24), 24)
    assert [flags(update) for update in cache.drain_index_updates()] == [("device", 5, 1, True, [])]


def test_a_node_that_two_tiers_hold_together_is_served_by_the_slower_one() -> None:
    cache = hosted()
    node = cache.tree.nodes[PATH[5]]
    evict(cache, block_of(cache, 5, 0))
    cache.host.pool.evict(cache.tree.host.blocks[[node], 1])
    heard = Heard(cache)
    heard.hear(cache.drain_index_updates())
    assert heard.depths(PATH) == [5, 6]
    assert heard.said["host", PATH[5]] == 1


def test_a_slower_tier_that_lacks_a_full_group_is_resident_only_where_it_lets_a_request_go_on() -> None:
    cache = hosted()
    cache.host.pool.evict(cache.tree.host.blocks[[cache.tree.nodes[PATH[5]]], 0])
    heard = Heard(cache)
    heard.hear(cache.drain_index_updates())
    assert ("host", PATH[5]) not in heard.said
    evict(cache, block_of(cache, 5, 1))
    heard.hear(cache.drain_index_updates())
    assert heard.said["host", PATH[5]] == 1
    assert heard.depths(PATH) == [5, 6]


def test_a_failed_load_is_taken_back() -> None:
    cache = hosted()
    cache.reset(("device",))
    heard = Heard(cache)
    heard.hear(cache.drain_index_updates())
    match = cache.match(PATH, 24)
    cache.adopt(0, match, 24)
    loads = cache.host.take_loads(1)
    heard.hear(cache.drain_index_updates())
    assert heard.depths(PATH)[0] == 6, "others may use it at once"
    cache.loads_done(1, loads[:1, 2])
    cache.release(0)
    heard.hear(cache.drain_index_updates())
    assert heard.depths(PATH)[0] == match.num_blocks - match.gained < 6


def test_memory_stays_bounded_if_nobody_listens(monkeypatch) -> None:
    monkeypatch.setattr(index_statements, "_MIN_NOTED", 100)
    cache = manager(num_blocks=16, policies=(FULL, WINDOW))
    most = 0
    for first in range(0, 4000, 10):
        serve(cache, 0, range(first, first + 24))
        cache.release(0)
        most = max(most, len(cache.events._closed))
    assert 50 < most <= 100
    assert cache.events._gone == []


# ---- segments ----


def forest() -> CacheManager:
    """Three requests that share 3 blocks, two of them 4."""
    cache = manager(num_blocks=64)
    for tail in ([], [100, 101, 102, 103, 7, 7, 7, 7], [100, 101, 102, 103, 8, 8, 8, 8]):
        serve(cache, 0, [*range(12), *tail])
        cache.release(0)
    return cache


def test_segments_have_each_node_due_once_behind_its_ancestors() -> None:
    tree = forest().tree
    due = [node for node in tree.nodes.values() if tree.depths[node] >= 3]
    segments = segments_of(tree, due, context=2)
    assert sorted(segments.nodes[segments.is_due].tolist()) == sorted(due)
    for index in np.flatnonzero(segments.is_due).tolist():
        node, above = int(segments.nodes[index]), index
        assert segments.depths[index] == tree.depths[node]
        for _ in range(2):
            above -= 1
            node = tree.parents[node]
            assert segments.nodes[above] == node
            assert segments.first[index] <= above


def test_what_is_below_goes_so_many_levels_and_from_the_top_to_the_end() -> None:
    tree = forest().tree
    third = tree.nodes[hashes_of(range(12))[2]]
    depths = sorted(tree.depths[node] for node in nodes_below(tree, [third], 1))
    assert depths == [2, 3]
    assert sorted(tree.depths[node] for node in nodes_below(tree, [third], 2)) == [2, 3, 4, 4]
    top = tree.nodes[hashes_of(range(12))[0]]
    assert set(nodes_below(tree, [top, third], 1)) == set(tree.nodes.values())


def test_groups_of_other_windows_are_judged_each_by_its_own() -> None:
    cache = manager(num_blocks=64, policies=(FULL, WINDOW, HeadPolicy(window=13)))
    serve(cache, 0, range(24))
    cache.release(0)
    cache.drain_index_updates()
    evict(cache, block_of(cache, 2, 2))  # the window of 13 reaches three blocks back, that of 6 two
    assert [flags(update) for update in cache.drain_index_updates()] == [("device", 2, 3, True, [0, 0, 0])]
