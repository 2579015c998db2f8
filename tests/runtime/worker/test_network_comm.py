"""Collectives of ranks that share no memory, over real sockets."""

from __future__ import annotations

import multiprocessing
import re
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from support.waiting import PATIENCE_S

from headwise.errors import EngineDiedError
from headwise.runtime.ops.comm import host_collectives
from headwise.runtime.ops.select import make_ops
from headwise.runtime.worker.network_comm import NetworkComm
from headwise.sockets import context
from headwise.sockets.curve import ClientKeys, ServerKeys, client_key, new_secret, public_key

SECRET = new_secret()
SERVER = ServerKeys(SECRET, frozenset((client_key("ours"),)))
CLIENT = ClientKeys(public_key(SECRET), "ours")


def in_threads(size: int, body: Callable[[NetworkComm], Any], *, is_encrypted: bool = False) -> list[Any]:
    """Run ``body`` on every rank; their results by rank. Raises what a rank raised."""
    opened, ended = context.num_open(), threading.Barrier(size)
    hub = NetworkComm.listen("127.0.0.1", size, PATIENCE_S, SERVER if is_encrypted else None)

    def rank_main(rank: int) -> Any:
        keys = CLIENT if is_encrypted else None
        comm = NetworkComm.connect(hub.endpoint, rank, size, PATIENCE_S, keys) if rank else hub
        try:
            result = body(comm)
            with suppress(threading.BrokenBarrierError):
                ended.wait(PATIENCE_S)  # what rank 0 has answered last would be gone with its socket
            return result
        except BaseException:
            ended.abort()
            raise
        finally:
            comm.close()

    with ThreadPoolExecutor(size) as ranks:
        results = list(ranks.map(rank_main, range(size)))
    assert context.num_open() == opened
    return results


def part(rank: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_all_reduce_gives_every_rank_the_same_bits(is_encrypted: bool) -> None:
    expected = part(0, 37, 11) + part(1, 37, 11) + part(2, 37, 11) + part(3, 37, 11)
    for result in in_threads(4, lambda comm: comm.all_reduce(part(comm.rank, 37, 11)), is_encrypted=is_encrypted):
        np.testing.assert_array_equal(result, expected)
        result[:] = 0  # the caller's own


@pytest.mark.parametrize("widths", [(5, 6, 7), (200, 65, 3), (0, 8, 0), (0, 0, 0)])
def test_gather_joins_uneven_columns_on_rank_0_alone(widths: tuple[int, ...]) -> None:
    results = in_threads(3, lambda comm: comm.gather(part(comm.rank, 3, 3, widths[comm.rank])))
    np.testing.assert_array_equal(results[0], np.concatenate([part(r, 3, 3, widths[r]) for r in range(3)], axis=-1))
    assert results[1:] == [None, None]


@pytest.mark.parametrize("dtype", ["float32", "uint8", "int64"])
def test_ranks_gather_among_some_of_them(dtype: str) -> None:
    """As large as several buffers."""

    def of(rank: int) -> np.ndarray:
        return (100 * part(rank, 5, 31)).astype(dtype)

    def gather(comm: NetworkComm) -> np.ndarray:
        first = comm.rank // 2 * 2
        return comm.all_gather(of(comm.rank), range(first, first + 2))

    for rank, result in enumerate(in_threads(4, gather)):
        np.testing.assert_array_equal(result, [of(rank // 2 * 2), of(rank // 2 * 2 + 1)])
        result[:] = 0  # the caller's own


@pytest.mark.parametrize("shape", [(1,), (4, 3), (37, 11)])
def test_ranks_exchange_what_they_have_for_each_other(shape: tuple[int, ...]) -> None:
    def of(sender: int, receiver: int) -> np.ndarray:
        return part(10 * sender + receiver, *shape)

    def exchange(comm: NetworkComm) -> tuple[np.ndarray, np.ndarray]:
        own = range(comm.rank // 2 * 2, comm.rank // 2 * 2 + 2)
        return tuple(
            comm.exchange(np.stack([of(comm.rank, to) for to in to_all]), to_all) for to_all in (range(4), own)
        )

    for rank, (every, some) in enumerate(in_threads(4, exchange)):
        np.testing.assert_array_equal(every, [of(sender, rank) for sender in range(4)])
        np.testing.assert_array_equal(some, [of(sender, rank) for sender in (rank // 2 * 2, rank // 2 * 2 + 1)])
        some[:] = 0


def test_broadcast_gives_every_rank_what_rank_0_has() -> None:
    tokens = np.arange(1000, dtype=np.int32).reshape(10, 100)
    for result in in_threads(3, lambda comm: comm.broadcast(None if comm.rank else tokens, (10, 100))):
        np.testing.assert_array_equal(result, tokens)
        result[:] = 0
    assert tokens.any()


@pytest.mark.parametrize("given", [None, np.zeros(1, np.int32)])
def test_rank_0_cannot_broadcast_something_of_another_shape(given: np.ndarray | None) -> None:
    hub = NetworkComm.listen("127.0.0.1", 2, PATIENCE_S, None)
    with pytest.raises(ValueError, match=r"rank 0 must broadcast an array of shape \(3,\)"):
        hub.broadcast(given, (3,))
    hub.close()
    hub.close()


def test_many_rounds_of_all_kinds_stay_in_step() -> None:
    ops = make_ops("numpy")
    sampled = np.array([7, 0, 9], np.int32), np.array([1.5, np.nan, -2], np.float32)

    def body(comm: NetworkComm) -> int:
        collectives, right = host_collectives(ops, comm), 0
        for turn in range(50):
            total = collectives.all_reduce(np.full(7, turn * (comm.rank + 1), np.float32))
            whole = collectives.gather(np.full((1, 2), turn, np.float32))
            shared = collectives.share(None if comm.rank else sampled, 3)
            right += bool((total == turn * 6).all() and (comm.rank or (whole == turn).all()))
            right += np.array_equal(shared[0], sampled[0])
        return right

    assert in_threads(3, body) == [100, 100, 100]


def test_a_rank_that_never_comes_is_named_by_all_others() -> None:
    def body(comm: NetworkComm) -> str:
        if comm.rank == 1:
            return "away"
        comm._timeout_s = 0.1
        with pytest.raises(EngineDiedError) as raised:
            comm.all_reduce(part(comm.rank, 4))
        return str(raised.value)

    first, _, last = in_threads(3, body)
    assert first.startswith("tensor-parallel ranks [1")
    assert last.startswith("tensor-parallel ranks [0]")


def test_what_one_rank_sends_gives_the_others_no_more_time() -> None:
    given_up = threading.Event()

    def body(comm: NetworkComm) -> str:
        if comm.rank == 0:
            comm._timeout_s = 0.4
            with pytest.raises(EngineDiedError) as raised:
                comm.all_reduce(part(0, 4))
            given_up.set()
            return str(raised.value)
        for _ in range(100):
            if comm.rank == 1:
                comm._socket.send_multipart((struct.pack("<q", 1), part(1, 4).tobytes()))
            if given_up.wait(0.1):
                return "in time"
        return "too late"

    first, *others = in_threads(3, body)
    assert re.match(r"tensor-parallel ranks \[(1, )?2\] did not come", first)
    assert others == ["in time"] * 2


def test_a_rank_that_has_fallen_behind_is_told_from_one_that_is_in_step() -> None:
    def body(comm: NetworkComm) -> None:
        comm.broadcast(None if comm.rank else np.zeros(1, np.int32), (1,))
        comm._round += comm.rank
        if comm.rank == 0:
            with pytest.raises(EngineDiedError, match="rank 1 is not in round 2"):
                comm.all_reduce(part(0, 1))
        else:
            comm._socket.send_multipart((b"", b""))

    in_threads(2, body)


def test_who_has_no_key_takes_no_part() -> None:
    hub = NetworkComm.listen("127.0.0.1", 2, PATIENCE_S, SERVER)
    stranger = NetworkComm.connect(hub.endpoint, 1, 2, PATIENCE_S, ClientKeys(public_key(SECRET), "others"))
    plain = NetworkComm.connect(hub.endpoint, 1, 2, PATIENCE_S, None)
    for comm in (stranger, plain):
        comm._timeout_s = 0.2
        with pytest.raises(EngineDiedError, match=r"ranks \[0\] did not come"):
            comm.all_reduce(np.full(2, 9, np.float32))

    def ours() -> np.ndarray:
        comm = NetworkComm.connect(hub.endpoint, 1, 2, PATIENCE_S, CLIENT)
        total = comm.all_reduce(np.ones(2, np.float32))
        comm.close()
        return total

    with ThreadPoolExecutor(1) as rank:
        other = rank.submit(ours)
        assert hub.all_reduce(np.ones(2, np.float32)).tolist() == other.result().tolist() == [2.0, 2.0]
    for comm in (hub, stranger, plain):
        comm.close()


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (2, 2), (-1, 2)])
def test_ranks_that_make_no_sense_are_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of {size}"):
        NetworkComm("", rank, size, 1.0)


def process_main(endpoint: str, rank: int, keys: ClientKeys, out: Any) -> None:
    comm = NetworkComm.connect(endpoint, rank, 3, PATIENCE_S, keys)
    total = np.zeros(5, np.float32)
    for _ in range(50):
        total = comm.all_reduce(np.full(5, rank, np.float32))
    out.put((rank, total.tolist()))
    comm.close()


def test_ranks_in_processes_of_their_own() -> None:
    spawn = multiprocessing.get_context("spawn")
    out = spawn.Queue()
    hub = NetworkComm.listen("127.0.0.1", 3, PATIENCE_S, SERVER)
    processes = [spawn.Process(target=process_main, args=(hub.endpoint, rank, CLIENT, out)) for rank in (1, 2)]
    for process in processes:
        process.start()
    totals = [hub.all_reduce(np.zeros(5, np.float32)).tolist() for _ in range(50)]
    assert dict(out.get(timeout=PATIENCE_S) for _ in processes) == {1: [3.0] * 5, 2: [3.0] * 5}
    assert totals == [[3.0] * 5] * 50
    for process in processes:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in processes] == [0, 0]
    hub.close()
