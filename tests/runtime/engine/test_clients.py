"""Whose requests are whose, behind an engine's socket."""

from __future__ import annotations

from headwise.runtime.engine.clients import Clients

ALICE, BOB = b"alice", b"bob"


def both() -> Clients:
    clients = Clients()
    clients.heard(ALICE, 1.0)
    clients.heard(BOB, 2.0)
    for request_id, identity in (("a", ALICE), ("b", BOB), ("c", ALICE)):
        clients.begin(request_id, identity)
    return clients


def test_a_request_is_its_clients_until_it_ends() -> None:
    clients = both()
    assert (clients.owner_of("a"), clients.owner_of("b"), clients.owner_of("z")) == (ALICE, BOB, None)
    assert clients.end("a") == ALICE
    assert clients.owner_of("a") is None
    assert clients.request_ids == ["b", "c"]
    assert clients.end("a") is None


def test_who_is_dropped_leaves_requests_that_are_still_to_be_ended() -> None:
    clients = both()
    assert sorted(clients.drop(ALICE)) == ["a", "c"]
    assert (len(clients), clients.num_requests) == (1, 3)
    assert [clients.end(request_id) for request_id in ("a", "c")] == [ALICE, ALICE]
    assert clients.request_ids == ["b"]
    assert clients.drop(ALICE) == []


def test_requests_are_counted_by_tenant_or_by_connection() -> None:
    clients = both()
    for request_id, identity in (("d", ALICE), ("e", BOB), ("f", BOB)):
        clients.begin(request_id, identity, "team")
    assert [clients.num_of(*each) for each in ((ALICE, ""), (BOB, ""), (ALICE, "team"), (BOB, "team"))] == [2, 1, 3, 3]
    for request_id in ("a", "c", "e", "e"):
        clients.end(request_id)
    assert [clients.num_of(*each) for each in ((ALICE, ""), (BOB, ""), (ALICE, "team"))] == [0, 1, 2]


def test_silence_is_counted_from_the_last_word() -> None:
    clients = both()
    clients.heard(ALICE, 5.0)
    assert clients.silent_since(2.0) == []
    assert clients.silent_since(3.0) == [BOB]
    assert set(clients.silent_since(6.0)) == {ALICE, BOB}


def test_who_was_heard_again_keeps_its_requests() -> None:
    clients = both()
    clients.heard(ALICE, 9.0)
    assert sorted(clients.drop(ALICE)) == ["a", "c"]
