"""Prefill and decode apart: which pair serves a request, and when one engine does it all."""

from __future__ import annotations

from typing import Any

import pytest
from support.routers import BLOCK, SPEEDS, choose, choose_with, report, request, router

from headwise.runtime.frontend.routing import Router
from headwise.runtime.protocol.request import PeerHint

MEASURED = {"peer_token_s": 1e-4}
ROLES = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode"}
LONG = 16 * BLOCK + 1


def apart(*names: str, **roles: Any) -> Router:
    r = router(peer_loads=True, local_tokens=100)
    r.table.set_roles({name: ROLES[name] for name in names} | roles)
    report(r, *names, *roles, **MEASURED)
    return r


def test_a_long_prompt_is_computed_by_one_engine_for_another() -> None:
    r = apart("p", "d")
    choice = choose(r)
    assert (choice.engine, choice.endpoint, choice.reason) == ("d", "tcp://d", "apart")
    assert choice.hint == PeerHint("p", 1, 16 * BLOCK, prefills=True)
    assert (choice.peer, choice.prefilled) == (16 * BLOCK, 16 * BLOCK)
    assert r.stats()["expected_tokens"] == {
        "device": 0,
        "host": 0,
        "peer": 0,
        "storage": 0,
        "prefilled": 16 * BLOCK,
        "all": LONG,
    }


def test_both_engines_are_reserved_until_they_name_the_request() -> None:
    r = apart("p", "d")
    choose(r, request_id="one")
    rows, table = r.table.rows, r.table
    assert table.arrivals.requests == 1
    assert [table.reserved[rows[name]] for name in "pd"] == [1, 1]
    assert table.backlog(0.0)[rows["p"]] == pytest.approx(LONG * SPEEDS["prefill_token_s"])
    assert table.backlog(0.0)[rows["d"]] == pytest.approx(SPEEDS["prefill_token_s"])
    report(r, "p", received=("one",), **MEASURED)
    assert [table.reserved[rows[name]] for name in "pd"] == [0, 1]
    r.release("one")
    assert table.num_reserved == 0
    choose(r, request_id="two", name="two")
    r.release("two")
    assert [float(table.reserved[rows[name]]) for name in "pd"] == [0, 0]


def test_the_prompt_goes_where_a_whole_request_would_cost_least_and_decoding_where_there_is_room() -> None:
    r = apart("p", "q", "d", "e")
    report(r, "p", queued_tokens=5000, **MEASURED)
    report(r, "d", running=40, total_blocks=1000, used_blocks=990, **MEASURED)
    choice = choose(r)
    assert (choice.engine, choice.hint and choice.hint.engine) == ("e", "q")
    choice = choose_with(r, {"p": (16, 16, 16)}, name="x", num_tokens=200 * BLOCK)
    assert choice.hint is not None
    assert choice.hint.engine == "q"


def test_a_prefix_that_an_engine_for_prompts_has_draws_the_prompt_there() -> None:
    r = apart("p", "q", "d")
    report(r, "p", queued_tokens=300, **MEASURED)
    choice = choose_with(r, {"p": (12, 12, 12)})
    assert choice.hint is not None
    assert choice.hint.engine == "p"
    assert (choice.peer, choice.prefilled) == (16 * BLOCK, 4 * BLOCK + 1)


def test_equal_engines_that_decode_take_turns_and_one_that_has_the_prefix_is_preferred() -> None:
    r = apart("p", "d", "e")
    assert {choose(r, name=str(n)).engine for n in range(4)} == {"d", "e"}
    r = apart("p", "d", "e")
    report(r, "p", "d", "e", prefill_token_s=1e-3, peer_token_s=9e-4, host_token_s=5e-5)
    choice = choose_with(r, {"e": (8, 8, 8)})
    assert (choice.engine, choice.device, choice.peer) == ("e", 8 * BLOCK, 8 * BLOCK)


def test_short_prompts_and_those_that_are_mostly_cached_stay_where_they_are_decoded() -> None:
    r = apart("p", "d")
    short = choose(r, blocks=1)
    assert (short.engine, short.reason, short.hint) == ("d", "no_hit", None)
    cached = choose_with(r, {"d": (15, 15, 15)}, name="x")
    assert (cached.engine, cached.reason, cached.hint) == ("d", "hit", None)


def test_what_an_engine_for_prompts_has_computed_already_is_only_fetched() -> None:
    r = apart("p", "d")
    choice = choose_with(r, {"p": (16, 16, 16)})
    assert (choice.engine, choice.hint) == ("d", PeerHint("p", 1, 16 * BLOCK))
    assert choice.prefilled == 0


@pytest.mark.parametrize("how", ["silent", "lost", "leaving", "full", "gone"])
def test_without_an_engine_for_prompts_those_that_decode_compute(how: str) -> None:
    r = apart("d") if how == "gone" else apart("p", "d")
    if how == "silent":
        report(r, "d", now=10.0, **MEASURED)
    elif how == "lost":
        r.mark_lost("tcp://p", 0.0)
    elif how == "leaving":
        report(r, "p", accepts=False, **MEASURED)
    elif how == "full":
        report(r, "p", waiting=64, **MEASURED)
    choice = choose(r, now=10.0 if how == "silent" else 0.0)
    assert (choice.engine, choice.reason, choice.hint) == ("d", "no_hit", None)


def test_without_an_engine_that_decodes_those_for_prompts_serve_whole_requests() -> None:
    r = apart("p", "q")
    choice = choose(r)
    assert choice.engine in "pq"
    assert choice.hint is None


def test_mixed_engines_serve_whole_requests_where_that_costs_less() -> None:
    r = apart("p", "d", m="mixed")
    report(r, "m", queued_tokens=3000, **MEASURED)
    assert choose(r).reason == "apart"
    report(r, "m", **MEASURED)
    report(r, "p", queued_tokens=3000, **MEASURED)
    choice = choose(r, name="x")
    assert (choice.engine, choice.hint) == ("m", None)


def test_nothing_is_computed_apart_where_fetching_is_slower_than_computing() -> None:
    r = apart("p", "d")
    report(r, "p", "d", peer_token_s=2e-3)
    assert (choose(r).engine, choose(r, name="x").hint) == ("d", None)


def test_a_reroute_gets_a_pair_without_the_engine_that_lost_it() -> None:
    r = apart("p", "d", "e")
    choice = r.select_and_reserve(request(exclude="tcp://d"), None, 0.0)
    assert choice is not None
    assert (choice.engine, choice.reason) == ("e", "apart")


def test_a_session_stays_with_the_engine_that_decodes_it() -> None:
    r = apart("p", "d", "e")
    first = choose(r, session="s").engine
    assert {choose(r, name=str(n), session="s").engine for n in range(5)} == {first}


def test_roles_change_while_requests_are_served_and_no_engine_is_forgotten() -> None:
    r = apart("p", "d")
    assert choose(r).reason == "apart"
    r.table.set_roles({"p": "decode", "d": "prefill"})
    choice = choose(r, name="x")
    assert (choice.engine, choice.hint and choice.hint.engine) == ("p", "d")
    r.table.set_roles({})
    assert choose(r, name="y").reason == "no_hit"
    assert {name: each["role"] for name, each in r.table.stats(0.0).items()} == {"p": "mixed", "d": "mixed"}


def test_an_engine_for_prompts_is_not_taken_for_one_that_asks_others() -> None:
    r = apart("p", "d")
    choice = choose_with(r, {"d": (8, 8, 8)})
    assert (choice.device, choice.peer, choice.prefilled) == (8 * BLOCK, 8 * BLOCK, 8 * BLOCK)
    assert r.table.backlog(0.0)[r.table.rows["p"]] == pytest.approx(LONG * SPEEDS["prefill_token_s"])
