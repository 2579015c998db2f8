"""The simulated cluster whose engines come and go: every request ends, wherever its engine went."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from routing import hardware
from simulation.caches import Cache, Storage
from simulation.cluster import Engine, serve
from simulation.elastic import ElasticCluster, Served, View
from simulation.machine import BLOCK
from simulation.scale_down import FEW, OURS, UNDISTURBED, Compared, Hits, Kept, compare
from simulation.traced import Request

from headwise.runtime.frontend.routing import Router, RouterOptions
from headwise.runtime.frontend.scaling import ReplicaSet, ScalingPolicy
from headwise.storage.index.prefix_index import PrefixIndex


def requests(count: int, every_s: float, output: int = 400) -> list[Request]:
    """Prompts of eight blocks, of twenty conversations."""
    path = [[(64 * number + depth).to_bytes(16, "big") for depth in range(8)] for number in range(20)]
    return [Request(str(n), n * every_s, path[n % 20], 8 * BLOCK + 1, output) for n in range(count)]


def served(
    sent: list[Request],
    numbers: dict[float, int],
    timeout_s: float = 60.0,
    least: int = 1,
    handover: bool = True,
    given: bool = False,
) -> tuple[ElasticCluster, Served]:
    """As many engines as ``numbers`` say from each time on."""
    machine = replace(hardware(), storage=1000)
    policy = ScalingPolicy(least, 4, target_ttft_s=2.0, drain_timeout_s=timeout_s)
    options = RouterOptions(block_size=BLOCK, blocks_per_token=1 / BLOCK, max_num_seqs=128, step_tokens=2048)
    first = next(iter(numbers.values()))

    def choose(view: View, now: float) -> int:
        return [number for at, number in numbers.items() if at <= max(now, 0.0)][-1]

    cluster = ElasticCluster(
        machine, Router(options, random.Random(0)), ReplicaSet(policy, first), 30.0, choose, handover, given=given
    )
    return cluster, cluster.serve(sent, first)


@pytest.mark.parametrize("timeout_s", [0.5, 60.0])
def test_requests_of_an_engine_that_goes_end_there_or_elsewhere(timeout_s: float) -> None:
    sent = requests(200, 0.2)
    _, found = served(sent, {0.0: 3, 20.0: 1}, timeout_s)
    assert len(found.kept) == 2
    assert all(request.ended >= request.first_token >= request.arrived for request in sent)
    assert (found.moved > 0) == (timeout_s < 1.0)
    assert len({request.engine for request in sent if request.arrived > 25.0}) == 1


def test_blocks_that_are_handed_over_are_found_again() -> None:
    hits = {}
    for handover in (True, False):
        sent = requests(100, 1.0, output=20)
        cluster, found = served(sent, {0.0: 2, 50.0: 1}, handover=handover)
        hits[handover] = sum(each.found for each in sent[60:80])
        assert bool(cluster.storage.blocks) == handover
        assert [written == (every if handover else 0) for written, every in found.kept] == [True]
    assert hits[True] > hits[False]


def test_blocks_that_the_others_pull_are_found_again_without_storage() -> None:
    hits = {}
    for given in (True, False):
        sent = requests(100, 1.0, output=20)
        cluster, _ = served(sent, {0.0: 2, 50.0: 1}, handover=False, given=given)
        hits[given] = sum(each.found for each in sent[60:80])
        assert not cluster.storage.blocks
    assert hits[True] > hits[False]


def test_from_nothing_requests_wait_for_the_first_engine() -> None:
    sent = requests(10, 1.0)
    _, found = served(sent, {0.0: 0, 5.0: 1}, least=0)
    assert all(request.ended > 0 for request in sent)
    assert min(request.first_token for request in sent) > 30.0
    assert found.counts[0] == 0


def test_engines_are_paid_for_from_the_order_to_their_end() -> None:
    _, found = served(requests(100, 1.0, output=2), {0.0: 1, 10.0: 2})
    assert found.engine_s == pytest.approx(100.0 + 90.0, abs=3.0)


# ---- what a smaller cluster still has ----


def kept(after: int, sole: set[int], asked_first: set[int]) -> Kept:
    """40 of 100 tokens found before; ``after`` of 100 after."""
    named = (frozenset((0.5, bytes([each])) for each in blocks) for blocks in (sole, asked_first))
    return Kept(Hits(40, 100), Hits(after, 100), 1, 2, *named)


def test_what_was_kept_is_compared_with_undisturbed_and_small_clusters_at_the_same_times() -> None:
    cases = {OURS: kept(27, {1, 2}, set()), UNDISTURBED: kept(30, set(), {2, 3}), FEW: kept(20, set(), set())}
    compared = Compared(1.0, cases)
    assert compared.of_before() == pytest.approx(27 / 40)
    assert compared.of_undisturbed() == pytest.approx(27 / 30)
    assert compared.of_few() == pytest.approx(27 / 20)
    assert compared.at_stake == pytest.approx(BLOCK / 30)


def test_moments_add_up_by_case_and_size_of_storage() -> None:
    runs = [(OURS, 1.0, 0.3), (OURS, 4.0, 0.3), (OURS, 1.0, 0.6)]
    small, large = compare(runs, [kept(10, {1}, set()), kept(30, {2}, set()), kept(20, {3}, set())])
    assert (small.storage, small.found[OURS].after, len(small.found[OURS].sole)) == (1.0, Hits(30, 200), 2)
    assert (large.storage, large.found[OURS].after) == (4.0, Hits(30, 100))


# ---- engines that fetch from each other ----


def pair(peer_token_s: float = 1e-6) -> tuple[Engine, Engine]:
    machine = replace(hardware(), peer_token_s=peer_token_s)
    index = PrefixIndex()
    storage = Storage(0, index)
    first, second = (Engine(n, machine, Cache(f"engine-{n}", machine, storage, index)) for n in range(2))
    return first, second


class ToSecond:
    """The first request goes to the first engine, all others to the second one, which asks the first."""

    def __init__(self, is_apart: bool = False) -> None:
        self._is_apart = is_apart

    def route(self, request: Request, now: float) -> int:
        if request.name == "0" and not self._is_apart:
            return 0
        request.peer, request.is_apart = 0, self._is_apart
        return 1

    def report(self, engine: Engine, now: float) -> None:
        engine.status()


def test_a_simulated_engine_fetches_what_another_one_has() -> None:
    sent = [*requests(1, 1.0), replace(requests(1, 1.0)[0], name="1", arrived=20.0)]
    serve(sent, pair(), ToSecond())
    assert (sent[1].engine, sent[1].loaded_peer, sent[1].device) == (1, 8 * BLOCK, 0)
    assert sent[1].first_token - sent[1].arrived < 0.3 * (sent[0].first_token - sent[0].arrived)


def test_a_simulated_prompt_is_computed_by_one_engine_and_decoded_by_the_other() -> None:
    sent = requests(3, 0.5)
    engines = pair()
    serve(sent, engines, ToSecond(is_apart=True))
    assert [each.loaded_peer for each in sent] == [8 * BLOCK] * 3
    assert all(each.ended > each.first_token > each.arrived for each in sent)
    assert engines[0].gaps.total() == 0 < engines[1].gaps.total()


def test_a_slow_link_delays_what_is_decoded() -> None:
    def ttft_s(peer_token_s: float) -> float:
        (one,) = requests(1, 1.0)
        serve([one], pair(peer_token_s), ToSecond(is_apart=True))
        return one.first_token - one.arrived

    assert ttft_s(1e-3) > 8 * BLOCK * 1e-3 > ttft_s(1e-6)


def test_a_request_that_has_moved_finds_no_more_than_its_prompt() -> None:
    """What was generated before is part of what it computes, but its path ends with the prompt."""
    first, moved = requests(1, 1.0)[0], replace(requests(1, 1.0)[0], name="1", arrived=20.0)
    moved.num_tokens += 3 * BLOCK
    serve([first, moved], pair(), ToSecond())
    assert moved.loaded_peer == len(moved.path) * BLOCK
