"""An engine that ends leaves what only it has to the hosts of those that stay."""

from __future__ import annotations

import pytest
from support.engine.simulated_engine import BLOCK, request
from support.engine.simulated_peers import TICK_S, TIMEOUT_S, Network, WireFaults
from support.engine.simulation import continuation

from headwise.cache_controller.block_hash import extend_hashes, hash_seed
from headwise.cache_controller.policy import FULL, STATE, HeadPolicy
from headwise.errors import InvalidRequestError
from headwise.runtime.engine.peers.base import Takers
from headwise.runtime.protocol.lease_messages import Offer, Taken

PROMPTS = [[10 * n + i % 7 for i in range(29)] for n in range(1, 5)]
BLOCKS = 28 // BLOCK
POLICIES = [(FULL,), (FULL, HeadPolicy(window=5, sink=2)), (FULL, STATE)]


def serve(network: Network, engine: str, name: str, prompt: list[int], count: int = 3) -> int:
    """How many tokens of a prompt were a hit; the answer is the right one."""
    node = network.nodes[engine]
    node.core.add(request(name, prompt, count))
    until(network, lambda: name in node.results and node.results[name].finish_reason)
    assert node.results[name].token_ids == continuation(prompt, count)
    return node.results[name].usage.cached_tokens


def until(network: Network, holds, turns: int = 600) -> None:
    for _ in range(turns):
        if holds():
            return
        network.turn()
    raise AssertionError("it does not come to an end")


def leave(network: Network, engine: str, evict: dict[str, int], hashes: list[bytes] | None = None) -> None:
    node = network.nodes[engine]
    node.core.hand_over(hashes, Takers(engine, node.epoch, evict))


def is_gone(network: Network, engine: str):
    return lambda: not network.nodes[engine].core.is_handing_over


def warm(network: Network, engine: str, prompts=PROMPTS) -> None:
    for number, prompt in enumerate(prompts):
        serve(network, engine, f"warm-{engine}-{number}", prompt)


def stats(network: Network, engine: str) -> dict:
    return network.nodes[engine].core.stats()["peers"]


@pytest.mark.parametrize("policies", POLICIES)
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_only_the_leaving_engine_had_is_a_hit_at_one_that_stays(policies, policy: str) -> None:
    network = Network("abc", policies, checkpoint_tokens=8, write_policy=policy)
    warm(network, "a")
    leave(network, "a", {"b": 0, "c": 0})
    until(network, is_gone(network, "a"))
    given = stats(network, "a")["given_blocks"]
    assert given == stats(network, "b")["taken_blocks"] + stats(network, "c")["taken_blocks"] > 0
    assert stats(network, "b")["taken_blocks"], "each has room"
    assert stats(network, "c")["taken_blocks"]
    network.kill("a")
    for prompt in PROMPTS:
        assert sorted(serve(network, each, f"{each}{prompt[0]}", prompt) for each in "bc") == [0, 28]


@pytest.mark.parametrize("policies", POLICIES)
def test_a_prompt_is_a_hit_though_its_answer_is_cached_behind_it(policies) -> None:
    network = Network("ab", policies, checkpoint_tokens=8)
    serve(network, "a", "first", PROMPTS[0], 15)
    leave(network, "a", {"b": 0})
    until(network, is_gone(network, "a"))
    network.kill("a")
    assert serve(network, "b", "again", PROMPTS[0]) == 28


def hashes_of(network: Network, prompt: list[int]) -> list[bytes]:
    """Of a prompt's blocks, as any engine names them."""
    hashes: list[bytes] = []
    tokens = request("any", prompt[: BLOCKS * BLOCK], 1).prompt_token_ids
    extend_hashes(hashes, hash_seed(network.nodes["a"].core.card.identity), tokens, BLOCK)
    return hashes


def with_storage_alone(policies, prompts=PROMPTS, **options) -> Network:
    """Engines of which a has all prompts in storage of its own, and nothing of them in memory."""
    network = Network("ab", policies, storages={"a": {}}, prefetch="best_effort", checkpoint_tokens=8, **options)
    warm(network, "a", prompts)
    core = network.nodes["a"].core
    until(network, lambda: not core.has_work())
    for tier in ("device", "host"):
        core.operate("reset_cache", tier)
    until(network, lambda: not core.has_work())
    host = core.cache.host.stats()
    assert (core.cache.pool.num_cached, host.cached_blocks) == (0, 0)
    return network


@pytest.mark.parametrize("policies", POLICIES)
def test_what_only_storage_of_its_own_has_goes_by_way_of_its_host(policies) -> None:
    network = with_storage_alone(policies)
    leave(network, "a", {"b": 0})
    until(network, is_gone(network, "a"))
    assert stats(network, "a")["given_blocks"] == stats(network, "b")["taken_blocks"] > 0
    network.kill("a")
    for prompt in PROMPTS:
        assert serve(network, "b", f"b{prompt[0]}", prompt) == 28


def test_more_than_its_host_holds_comes_from_storage_bit_by_bit_and_goes_in_the_order_that_was_named() -> None:
    network = with_storage_alone((FULL,), host_blocks=2 * BLOCKS + 2)
    paths = [hashes_of(network, prompt) for prompt in PROMPTS]
    last, first = paths[-1], paths[0]
    leave(network, "a", {"b": 0}, [*last, *first, *paths[1]])
    until(network, is_gone(network, "a"))
    known = network.nodes["b"].core.cache.tree.nodes
    assert stats(network, "a")["given_blocks"] in range(2 * BLOCKS, 2 * BLOCKS + 3), "as much as b has room for"
    assert all(block in known for block in [*last, *first])
    assert not any(block in known for block in paths[2])


@pytest.mark.parametrize("fault", ["empty", "hangs", "fails"])
def test_storage_of_its_own_that_does_not_give_what_it_had_costs_that_alone(fault: str) -> None:
    network = with_storage_alone((FULL,), storage_timeout_s=1.0)
    node = network.nodes["a"]
    serve(network, "a", "still there", [60] * 29)
    if fault == "empty":
        network.storages["a"].clear()
    elif fault == "hangs":
        node.executor.ranks[0].faults.storage_steps = None
    else:
        node.executor.ranks[0].faults.lose_fetch = lambda: True
    leave(network, "a", {"b": 0})
    until(network, is_gone(network, "a"), turns=int(20 * TIMEOUT_S / TICK_S))
    network.kill("a")
    assert serve(network, "b", "still there", [60] * 29) == 28
    assert serve(network, "b", "lost", PROMPTS[0]) == 0


def test_paths_that_begin_alike_go_to_the_same_engine_and_the_beginning_once() -> None:
    network = Network("abc", (FULL,))
    start = list(range(1, 1 + 4 * BLOCK))
    warm(network, "a", [start + [50 + n] * (3 * BLOCK + 1) for n in range(3)])
    leave(network, "a", {"b": 0, "c": 0})
    until(network, is_gone(network, "a"))
    fetched = sorted(stats(network, each)["fetched_blocks"] for each in "bc")
    assert fetched == [0, 4 + 3 * 3]


def test_what_is_named_goes_in_its_order_as_far_as_there_is_room_and_evicts_what_it_may() -> None:
    network = Network("ab", (FULL,), host_blocks=2 * BLOCKS + 3)
    own = PROMPTS[:2]
    warm(network, "b", own)
    network.nodes["b"].core.operate("reset_cache", "device")
    warm(network, "a", PROMPTS[2:])
    cache = network.nodes["a"].core.cache
    hashes = [block for block in cache.tree.nodes if cache.tree.depths[cache.tree.nodes[block]] < BLOCKS]
    last = hashes[BLOCKS : 2 * BLOCKS]
    host = network.nodes["b"].core.cache.host
    free = host.pool.num_free
    leave(network, "a", {"b": 2}, [*last, *hashes[:BLOCKS]])
    until(network, is_gone(network, "a"))
    assert stats(network, "a")["given_blocks"] == free + 2
    assert host.stats().evicted_blocks == 2
    known = network.nodes["b"].core.cache.tree.nodes
    assert [block in known for block in last] == [True] * (free + 2) + [False] * (BLOCKS - free - 2)


def test_what_is_computed_while_it_leaves_goes_too() -> None:
    network = Network("ab", (FULL,))
    network.nodes["a"].core.add(request("late", PROMPTS[0], 3))
    network.turn()
    leave(network, "a", {"b": 0}, [])
    until(network, is_gone(network, "a"))
    assert serve(network, "b", "again", PROMPTS[0]) == 28


def test_an_engine_that_leaves_or_sleeps_takes_nothing_and_another_one_gets_it() -> None:
    network = Network("abc", (FULL,))
    warm(network, "a")
    network.nodes["b"].core.operate("sleep")
    network.turn()
    leave(network, "a", {"b": 0, "c": 0})
    until(network, is_gone(network, "a"))
    assert stats(network, "b")["taken_blocks"] == 0
    assert stats(network, "c")["taken_blocks"] >= 4 * BLOCKS
    leave(network, "c", {"b": 0, "gone": 0})
    begun = network.clock()
    until(network, is_gone(network, "c"))
    assert network.clock() - begun < TIMEOUT_S


@pytest.mark.parametrize(
    "when", [pytest.param(when, marks=() if when % 4 == 1 else pytest.mark.soak) for when in range(1, 18)]
)
@pytest.mark.parametrize("who", "ab")
def test_either_side_may_die_at_any_moment(who: str, when: int) -> None:
    network = Network("abc", (FULL, HeadPolicy(window=5)), faults=WireFaults(delay_bytes=3))
    warm(network, "a")
    leave(network, "a", {"b": 0, "c": 0})
    for _ in range(when):
        network.turn()
    begun = network.clock()
    network.kill(who)
    until(network, lambda: not any(stats(network, each)["offers"] for each in "bc"))
    if who == "b":
        until(network, is_gone(network, "a"))
        assert stats(network, "c")["taken_blocks"]
    held = lambda: any(node.core.cache.host.pool.num_held for node in network.nodes.values())  # noqa: E731
    until(network, lambda: not held())
    assert network.clock() - begun < 3 * TIMEOUT_S
    for number, prompt in enumerate(PROMPTS):
        serve(network, "c", f"r{number}", prompt)


@pytest.mark.parametrize("policies", POLICIES)
@pytest.mark.parametrize("seed", [*range(2), *[pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 60)]])
def test_a_bad_wire_loses_blocks_at_most(policies, seed: int) -> None:
    faults = WireFaults(lose=0.1, double=0.2, delay=6, delay_bytes=8, lose_bytes=0.05, hang=0.02)
    network = Network("abc", policies, seed=seed, faults=faults, checkpoint_tokens=8, host_blocks=40)
    warm(network, "a")
    warm(network, "b", PROMPTS[:1])
    leave(network, "a", {"b": network.random.randint(0, 9), "c": 0})
    for name in ("b", "c"):
        network.nodes[name].core.add(request("meanwhile", PROMPTS[1], 5))
    until(network, is_gone(network, "a"), turns=int(20 * TIMEOUT_S / TICK_S))
    network.kill("a")
    until(network, lambda: not any(node.core.cache.host.pool.num_held for node in network.nodes.values()))
    for number, prompt in enumerate(PROMPTS):
        for each in "bc":
            serve(network, each, f"r{number}", prompt)


def test_an_offer_that_makes_no_sense_is_refused_and_one_of_a_stranger_is_not_taken() -> None:
    network = Network("ab", (FULL,))
    node = network.nodes["b"]

    def offer(**changed) -> Offer:
        fields = {"offer": b"o" * 16, "epoch": 1, "engine": "a", "engine_epoch": 1, "paths": (b"h" * 16,), **changed}
        return Offer(**fields)

    for changed, why in (
        ({"offer": b"short"}, "16 bytes, got 5"),
        ({"paths": (b"h" * 17,)}, "different hashes of 16 bytes, got 17 bytes"),
        ({"paths": (b"",)}, "from 1 to .* different hashes of 16 bytes, got 0 bytes"),
        ({"paths": (b"h" * 32,)}, "different hashes of 16 bytes, got 32 bytes"),
        ({"paths": (b"h" * 16,) * 65}, "at most 64 paths, got 65"),
    ):
        with pytest.raises(InvalidRequestError, match=why):
            node.core.asked(b"a", offer(**changed))
    node.core.asked(b"a", offer(engine="stranger"))
    assert network.sent[-1] == Taken(b"o" * 16, 1, 0, 0, -1, is_over=True)
