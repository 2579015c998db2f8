"""Blocks that are on an owner's device alone, and are read there: lent as they lie, and never held for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.engine.simulated_engine import request
from support.engine.simulated_peers import TIMEOUT_S, Network, WireFaults
from support.engine.simulation import continuation

from headwise.cache_controller.policy import FULL, STATE, HeadPolicy
from headwise.runtime.engine.peers import devices
from headwise.runtime.protocol.lease_messages import Leased
from headwise.runtime.protocol.request import GenerateRequest, PeerHint

PROMPT = list(range(1, 30))
LONG = [1 + i % 50 for i in range(58)]
POLICIES = [(FULL,), (FULL, HeadPolicy(window=5, sink=2)), (FULL, STATE)]
TOGETHER = {"a": "node", "b": "node"}


def network_of(policies, ranks=(1, 1), **options) -> Network:
    """Engines a and b, whose blocks do not come to the host by themselves."""
    heads = [policy for policy in policies for _ in range(max(ranks))]
    options = {"write_policy": "write_through_selective", "write_through_threshold": 9, "nodes": TOGETHER} | options
    return Network("ab", heads, ranks=ranks, checkpoint_tokens=8, **options)


def hinted(network: Network, name: str, prompt: list[int], count: int, prefills: bool = False) -> GenerateRequest:
    hint = PeerHint("a", network.nodes["a"].epoch, len(prompt) // 4 * 4, prefills)
    return replace(request(name, prompt, count), peer=hint)


def serve(network: Network, engine: str, asked: GenerateRequest) -> list[int]:
    network.nodes[engine].core.add(asked)
    return finish(network, engine, asked.request_id)


def finish(network: Network, engine: str, name: str) -> list[int]:
    results = network.nodes[engine].results
    for _ in range(400):
        network.turn()
        if name in results and results[name].finish_reason:
            return results[name].token_ids
    raise AssertionError(f"{name} does not end")


def settle(network: Network) -> None:
    for _ in range(400):
        network.turn()
        if not any(node.core.has_work() or node.core.cache.host.pool.num_held for node in network.nodes.values()):
            return
    raise AssertionError("something is held or under way still")


def cached(network: Network, name: str) -> int:
    return network.nodes["b"].results[name].usage.cached_tokens


def lent(network: Network) -> int:
    return network.nodes["a"].core.stats()["peers"]["lent"]["device_blocks"]


def stored(network: Network) -> int:
    return network.nodes["a"].core.stats()["host"]["stored_blocks"]


@pytest.mark.parametrize("policies", POLICIES)
@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1)])
def test_what_is_on_a_device_alone_is_read_there_and_its_owner_stores_nothing(policies, ranks) -> None:
    network = network_of(policies, ranks)
    serve(network, "a", request("first", PROMPT, 3))
    settle(network)
    assert serve(network, "b", hinted(network, "second", PROMPT, 5)) == continuation(PROMPT, 5)
    assert cached(network, "second") == 28
    settle(network)
    assert lent(network) >= 7
    assert stored(network) == 0
    assert network.nodes["a"].core.cache.pool.num_held == 0


@pytest.mark.parametrize("policies", POLICIES)
def test_a_prompt_that_another_engine_computes_is_read_on_its_device_meanwhile(policies) -> None:
    network = network_of(policies, faults=WireFaults(delay_bytes=3))
    assert serve(network, "b", hinted(network, "r", LONG, 5, prefills=True)) == continuation(LONG, 5)
    assert cached(network, "r") == 56
    settle(network)
    assert lent(network) >= 14
    assert stored(network) == 0
    assert len([message for message in network.sent if isinstance(message, Leased) and len(message.blocks)]) > 2


@pytest.mark.parametrize("nodes", [{"a": "one", "b": "another"}, {"a": "one"}, {"b": "one"}])
def test_who_cannot_read_an_owners_device_gets_its_blocks_by_the_host(nodes) -> None:
    network = network_of((FULL,), nodes=nodes)
    serve(network, "a", request("first", PROMPT, 3))
    assert serve(network, "b", hinted(network, "second", PROMPT, 5)) == continuation(PROMPT, 5)
    assert (cached(network, "second"), lent(network), stored(network)) == (28, 0, 7)


def test_where_a_device_cannot_be_read_after_all_blocks_come_by_the_host_for_a_while(caplog, monkeypatch) -> None:
    monkeypatch.setattr(devices, "UNREAD_S", 5.0)
    network = network_of((FULL,), faults=WireFaults(lose_devices=True))
    serve(network, "a", request("first", PROMPT, 3))
    assert serve(network, "b", hinted(network, "second", PROMPT, 5)) == continuation(PROMPT, 5)
    assert cached(network, "second") == 0, "what was lost is computed"
    network.faults.lose_devices = False
    for tokens, by_host in ((LONG, True), (LONG[3:], False)):
        name, before = f"of {len(tokens)}", stored(network)
        serve(network, "a", request(name, tokens, 3))
        assert serve(network, "b", hinted(network, name, tokens, 5)) == continuation(tokens, 5)
        assert cached(network, name) == len(tokens) // 4 * 4
        assert (stored(network) > before) is by_host
        for _ in range(120):
            network.turn()
    assert caplog.text.count("blocks on the device of a could not be read: for a while they come by its host") == 1


def test_nothing_is_lent_before_the_device_is_through_with_what_writes_it() -> None:
    network = network_of((FULL,))
    network.nodes["a"].executor.ranks[0].faults.store_steps = 30  # marks are on the stream of stores
    serve(network, "a", request("first", PROMPT, 3))
    network.nodes["b"].core.add(hinted(network, "second", PROMPT, 5))
    for _ in range(20):
        network.turn()
        assert lent(network) == 0
    assert finish(network, "b", "second") == continuation(PROMPT, 5)
    assert (cached(network, "second"), lent(network)) == (28, 7)


@pytest.mark.parametrize("what", ["requests", "reset_cache", "sleep"])
def test_an_owner_that_needs_what_it_has_lent_takes_it_and_the_lease_has_not_held(what: str) -> None:
    network = network_of((FULL,), num_blocks=20, faults=WireFaults(delay_bytes=40))
    serve(network, "a", request("first", PROMPT, 3))
    settle(network)
    network.nodes["b"].core.add(hinted(network, "second", PROMPT, 5))
    while not lent(network):
        network.turn()
    assert network.nodes["a"].core.cache.pool.num_held == 0, "it is in nobody's way"
    begun = network.clock()
    if what == "requests":
        others = [[60 + 10 * index + i % 7 for i in range(30)] for index in range(3)]
        for index, other in enumerate(others):
            assert serve(network, "a", request(f"other {index}", other, 3)) == continuation(other, 3)
        assert network.clock() - begun < TIMEOUT_S, "no request waits for the lease's end"
    else:
        network.nodes["a"].core.operate(what)
    assert finish(network, "b", "second") == continuation(PROMPT, 5)
    assert cached(network, "second") == 0
    assert network.nodes["b"].core.stats()["peers"]["fetched_blocks"] == 0
    network.nodes["a"].core.operate("wake")
    settle(network)


def test_after_a_sleep_what_is_on_the_device_then_is_lent() -> None:
    network = network_of((FULL,))
    serve(network, "a", request("first", LONG[3:], 3))
    for action in ("sleep", "wake"):
        network.nodes["a"].core.operate(action)
        settle(network)
    serve(network, "a", request("again", PROMPT, 3))
    assert serve(network, "b", hinted(network, "second", PROMPT, 5)) == continuation(PROMPT, 5)
    assert (cached(network, "second"), lent(network)) == (28, 7)


def test_after_a_sleep_far_readers_whose_keys_are_of_the_memory_before_it_get_blocks_by_the_host() -> None:
    network = network_of((FULL,), nodes={"a": "one", "b": "another"}, transport="nixl")
    serve(network, "a", request("first", LONG[3:], 3))
    assert serve(network, "b", hinted(network, "before", LONG[3:], 5)) == continuation(LONG[3:], 5)
    before = lent(network)
    assert before > 0
    for action in ("sleep", "wake"):
        network.nodes["a"].core.operate(action)
        settle(network)
    serve(network, "a", request("again", PROMPT, 3))
    assert serve(network, "b", hinted(network, "second", PROMPT, 5)) == continuation(PROMPT, 5)
    assert (cached(network, "second"), lent(network)) == (28, before)
