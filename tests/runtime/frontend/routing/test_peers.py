"""What engines could fetch from each other: who is asked, what it costs, and when nobody is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.routers import BLOCK, SPEEDS, choose, choose_with, report, request, router

from headwise.runtime.frontend.routing import Router
from headwise.runtime.frontend.routing.costs import ASK_S, DUPLICATE_WEIGHT
from headwise.runtime.protocol.request import PeerHint

MEASURED = {"peer_token_s": 1e-4}
HELD = {"a": (16, 16, 16)}


def lending(*names: str, **options: Any) -> Router:
    r = router(peer_loads=True, **options)
    report(r, *names, **MEASURED)
    return r


def test_what_a_busy_engine_has_is_fetched_by_another_one() -> None:
    r = lending("b", "c")
    report(r, "a", epoch=7, queued_tokens=4000, **MEASURED)
    choice = choose_with(r, HELD)
    assert choice.engine in "bc"
    assert (choice.device, choice.host, choice.peer, choice.storage) == (0, 0, 16 * BLOCK, 0)
    assert choice.hint == PeerHint("a", 7, 16 * BLOCK)
    assert choice.reason == "spread"
    assert r.stats()["expected_tokens"]["peer"] == 16 * BLOCK


def test_the_holder_that_is_free_serves_it_itself_and_asks_nobody() -> None:
    r = lending("a", "b")
    choice = choose_with(r, HELD)
    assert (choice.engine, choice.device, choice.peer, choice.hint) == ("a", 16 * BLOCK, 0, None)


def test_fetching_costs_what_was_measured_there_and_counts_no_tokens_to_compute() -> None:
    r = lending("b")
    report(r, "a", queued_tokens=10_000, **MEASURED)
    choice = choose_with(r, HELD, num_tokens=16 * BLOCK + 100)
    fetched = 16 * BLOCK * (MEASURED["peer_token_s"] + SPEEDS["host_token_s"]) + ASK_S
    own = 100 * SPEEDS["prefill_token_s"] + fetched
    answer = SPEEDS["decode_step_s"] * 256 / 64
    others = DUPLICATE_WEIGHT * 16 * BLOCK * SPEEDS["prefill_token_s"]
    assert choice.cost == pytest.approx(2 * own + others + answer)
    assert r.table.backlog(0.0)[r.table.rows["b"]] == pytest.approx(0.1)


def test_a_spread_is_cheaper_where_blocks_can_be_fetched() -> None:
    def engine(queued: int, peer_loads: bool) -> str:
        r = router(peer_loads=peer_loads)
        report(r, "a", queued_tokens=queued, **MEASURED)
        report(r, "b", **MEASURED)
        return choose_with(r, HELD).engine

    assert [engine(1500, peer_loads) for peer_loads in (False, True)] == ["a", "b"]
    assert [engine(500, peer_loads) for peer_loads in (False, True)] == ["a", "a"]


def test_nobody_is_asked_where_computing_is_faster_or_little_is_gained() -> None:
    r = router(peer_loads=True)
    report(r, "a", queued_tokens=50_000, peer_token_s=2e-3)
    report(r, "b", peer_token_s=2e-3)
    assert choose_with(r, HELD).hint is None
    r = router(peer_loads=True)
    report(r, "a", queued_tokens=50_000, prefill_token_s=1e-4, host_token_s=1e-5, peer_token_s=1e-5)
    report(r, "b", prefill_token_s=1e-4, host_token_s=1e-5, peer_token_s=1e-5)
    assert choose_with(r, {"a": (1, 1, 1)}).hint is None


def test_what_nobody_has_measured_is_tried() -> None:
    r = router(peer_loads=True)
    report(r, "b", host_token_s=0.0)
    report(r, "a", queued_tokens=50_000, host_token_s=0.0)
    assert choose_with(r, HELD).hint == PeerHint("a", 1, 16 * BLOCK)


def test_the_deepest_is_asked_and_of_those_the_least_loaded() -> None:
    r = lending("e")
    for name, running in (("a", 30), ("b", 10), ("c", 20), ("d", 1)):
        report(r, name, running=running, queued_tokens=50_000, **MEASURED)
    depths = {"a": (2, 16, 16), "b": (0, 16, 16), "c": (16, 16, 16), "d": (15, 15, 15)}
    choice = choose_with(r, depths)
    assert (choice.engine, choice.hint) == ("e", PeerHint("b", 1, 16 * BLOCK))


def test_an_engine_with_a_part_asks_for_the_rest() -> None:
    r = lending("b")
    report(r, "a", queued_tokens=50_000, **MEASURED)
    choice = choose_with(r, {"a": (16, 16, 16), "b": (2, 5, 5)})
    assert (choice.device, choice.host, choice.peer) == (2 * BLOCK, 3 * BLOCK, 11 * BLOCK)
    assert choice.hint is not None
    assert choice.hint.tokens == 16 * BLOCK


def test_what_only_storage_has_behind_it_comes_from_storage() -> None:
    r = lending("b")
    report(r, "a", queued_tokens=50_000, **MEASURED)
    choice = choose_with(r, {"a": (8, 8, 16), "b": (0, 0, 16)})
    assert (choice.peer, choice.storage) == (8 * BLOCK, 8 * BLOCK)


def test_storage_that_is_faster_than_a_peer_is_preferred() -> None:
    r = router(peer_loads=True)
    report(r, "a", queued_tokens=50_000, storage_token_s=1e-5, peer_token_s=3e-4)
    report(r, "b", storage_token_s=1e-5, peer_token_s=3e-4)
    choice = choose_with(r, {"a": (16, 16, 16), "b": (0, 0, 16)})
    assert (choice.peer, choice.storage, choice.hint) == (0, 16 * BLOCK, None)


def test_the_last_token_is_computed_always() -> None:
    r = lending("b")
    report(r, "a", queued_tokens=50_000, **MEASURED)
    assert choose_with(r, HELD, num_tokens=16 * BLOCK).peer == 15 * BLOCK


def test_nobody_asks_who_is_silent_lost_leaving_asleep_or_suspected() -> None:
    def asked(make_unfit: Any) -> PeerHint | None:
        r = lending("a", "b")
        report(r, "a", "b", now=2.0, **MEASURED)
        make_unfit(r)
        return choose_with(r, HELD, now=2.0).hint

    def silent(r: Router) -> None:
        r.table.heard[r.table.rows["a"]] = -10.0

    assert asked(lambda r: report(r, "a", now=2.0, queued_tokens=50_000, **MEASURED)) is not None
    assert asked(silent) is None
    assert asked(lambda r: r.mark_lost("tcp://a", 2.0)) is None
    assert asked(lambda r: report(r, "a", now=2.0, accepts=False, **MEASURED)) is None

    def suspected(r: Router) -> None:
        report(r, "a", now=2.0, queued_tokens=50_000, **MEASURED)
        r.suspect("tcp://a", 2.0)

    assert asked(suspected) is None


def test_a_reroute_gets_a_hint_but_not_of_the_engine_that_lost_it() -> None:
    r = lending("b", "c")
    report(r, "a", queued_tokens=50_000, **MEASURED)
    r.suspect("tcp://a", 0.0)
    report(r, "b", queued_tokens=50_000, **MEASURED)
    choice = choose_with(r, {"a": (16, 16, 16), "b": (12, 12, 12)}, exclude="tcp://a")
    assert (choice.engine, choice.reason, choice.hint) == ("c", "rerouted", PeerHint("b", 1, 12 * BLOCK))


@pytest.mark.parametrize(("now", "is_asked"), [(0.2, False), (2.0, True)])
def test_what_was_sent_counts_as_had_once_it_must_have_been_computed(now: float, is_asked: bool) -> None:
    r = lending("a", "b")
    first = choose(r, request_id="first")
    report(r, first.engine, now=0.1, queued_tokens=1000, received=("first",), **MEASURED)
    row = r.table.rows[first.engine]
    r.table.room[row] = 0
    choice = choose(r, now=now)
    assert choice.engine != first.engine
    assert choice.hint == (PeerHint(first.engine, 1, 16 * BLOCK) if is_asked else None)


def test_with_peer_loads_off_nobody_is_asked() -> None:
    r = router()
    report(r, "a", queued_tokens=50_000, **MEASURED)
    report(r, "b", **MEASURED)
    assert (choose_with(r, HELD).hint, choose_with(r, HELD, name="x").peer) == (None, 0)


depths = st.tuples(*[st.integers(0, 16)] * 3).map(lambda drawn: tuple(sorted(drawn)))


@settings(max_examples=200)
@given(
    st.lists(depths, min_size=2, max_size=5),
    st.lists(st.sampled_from([0, 3000]), min_size=5, max_size=5),
    st.sampled_from([0.0, 1e-5, 1e-4, 5e-4, 2e-3]),
    st.sampled_from([1e-5, 1e-4, 5e-4, 2e-3]),
)
def test_the_plan_adds_up_and_costs_what_the_estimate_says(
    held: list[tuple[int, int, int]], queued: list[int], peer_token_s: float, storage_token_s: float
) -> None:
    r = router(peer_loads=True)
    names = [f"e{n}" for n in range(len(held))]
    for name, tokens in zip(names, queued, strict=False):
        report(r, name, queued_tokens=tokens, peer_token_s=peer_token_s, storage_token_s=storage_token_s)
    asked = request(16, num_tokens=16 * BLOCK + 9)
    choice = r.select_and_reserve(asked, dict(zip(names, held, strict=True)), 0.0)
    assert choice is not None
    row = r.table.rows[choice.engine]
    device, with_host, with_all = (each * BLOCK for each in held[names.index(choice.engine)])
    others = max(each[1] for name, each in zip(names, held, strict=True) if name != choice.engine) * BLOCK
    assert choice.device == device
    assert choice.host in (0, with_host - device)
    assert choice.peer in (0, others - with_host)
    assert device + choice.host + choice.peer + choice.storage <= max(with_all, others)
    assert (choice.hint is None) == (choice.peer == 0)
    if choice.hint is not None:
        assert choice.hint.engine != choice.engine
        assert choice.hint.tokens == others
    gain = choice.host * r.table.host_gain_s[row] + choice.storage * r.table.storage_gain_s[row]
    gain += choice.peer * r.table.peer_gain_s[row] - ASK_S * bool(choice.peer)
    own = (asked.num_tokens - device) * SPEEDS["prefill_token_s"] - gain
    wait = queued[names.index(choice.engine)] * SPEEDS["prefill_token_s"]
    work = choice.cost - wait - own - SPEEDS["decode_step_s"] * 256 / 64
    most = own + DUPLICATE_WEIGHT * choice.peer * SPEEDS["prefill_token_s"]
    assert own - 1e-9 <= work <= most + 1e-9
