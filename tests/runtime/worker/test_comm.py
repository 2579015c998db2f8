from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.skipping_clock import SkippingClock
from support.waiting import PATIENCE_S

from headwise.errors import DeploymentError, EngineDiedError
from headwise.liveness_clock import LivenessClock
from headwise.runtime.ops.comm import SingleRank, host_collectives
from headwise.runtime.ops.select import make_ops
from headwise.runtime.worker.shared_memory_comm import SharedMemoryComm


def in_threads(
    size: int, body: Callable[[SharedMemoryComm], Any], max_bytes: int = 256, timeout_s: float = PATIENCE_S
) -> list[Any]:
    """Run ``body`` on every rank; their results by rank. Raises what a rank raised."""
    name = uuid.uuid4().hex

    def rank_main(rank: int) -> Any:
        comm = SharedMemoryComm(name, rank, size, max_bytes, timeout_s, create=rank == 0)
        try:
            return body(comm)
        finally:
            comm.close()

    with ThreadPoolExecutor(size) as ranks:
        results = list(ranks.map(rank_main, range(size)))
    assert not left_behind(name)
    return results


def left_behind(name: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"*{name}"))


def part(rank: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("size", [2, 3, 4])  # of 4, an order of the sum other than by rank shows
@pytest.mark.parametrize("shape", [(1,), (4, 8), (37, 11)])
def test_all_reduce_gives_every_rank_the_same_bits(size: int, shape: tuple[int, ...]) -> None:
    expected = part(0, *shape)
    for rank in range(1, size):
        expected = expected + part(rank, *shape)
    for result in in_threads(size, lambda comm: comm.all_reduce(part(comm.rank, *shape))):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("widths", [(5, 6, 7), (64, 64, 64), (200, 65, 3), (0, 8, 0), (0, 0, 0)])
def test_gather_joins_uneven_columns_on_rank_0_alone(widths: tuple[int, ...]) -> None:
    # Of 64 columns one row fits in a buffer; of 65, none.
    results = in_threads(3, lambda comm: comm.gather(part(comm.rank, 9, widths[comm.rank])))
    np.testing.assert_array_equal(results[0], np.concatenate([part(r, 9, widths[r]) for r in range(3)], axis=1))
    assert results[1:] == [None, None]


def test_gather_keeps_the_leading_axes() -> None:
    results = in_threads(2, lambda comm: comm.gather(part(comm.rank, 2, 3, 4)))
    np.testing.assert_array_equal(results[0], np.concatenate([part(r, 2, 3, 4) for r in range(2)], axis=-1))


@pytest.mark.parametrize("dtype", ["float32", "uint8", "int64"])
def test_ranks_gather_among_some_of_them(dtype: str) -> None:
    """As large as several buffers."""

    def of(rank: int) -> np.ndarray:
        return (100 * part(rank, 5, 31)).astype(dtype)

    def gather(comm: SharedMemoryComm) -> np.ndarray:
        first = comm.rank // 2 * 2
        return comm.all_gather(of(comm.rank), range(first, first + 2))

    for rank, result in enumerate(in_threads(4, gather)):
        np.testing.assert_array_equal(result, [of(rank // 2 * 2), of(rank // 2 * 2 + 1)])
        result[:] = 0  # the caller's own


@pytest.mark.parametrize("shape", [(1,), (4, 3), (37, 11)])
def test_ranks_exchange_what_they_have_for_each_other(shape: tuple[int, ...]) -> None:
    def of(sender: int, receiver: int) -> np.ndarray:
        return part(10 * sender + receiver, *shape)

    def exchange(comm: SharedMemoryComm) -> tuple[np.ndarray, np.ndarray]:
        own = range(comm.rank // 2 * 2, comm.rank // 2 * 2 + 2)
        return tuple(
            comm.exchange(np.stack([of(comm.rank, to) for to in to_all]), to_all) for to_all in (range(4), own)
        )

    for rank, (every, some) in enumerate(in_threads(4, exchange)):
        np.testing.assert_array_equal(every, [of(sender, rank) for sender in range(4)])
        np.testing.assert_array_equal(some, [of(sender, rank) for sender in (rank // 2 * 2, rank // 2 * 2 + 1)])
        some[:] = 0


def test_broadcast_carries_more_than_the_buffer_holds() -> None:
    tokens = np.arange(1000, dtype=np.int32).reshape(10, 100)
    for result in in_threads(3, lambda comm: comm.broadcast(tokens if comm.rank == 0 else None, (10, 100))):
        np.testing.assert_array_equal(result, tokens)


@pytest.mark.parametrize("framework", ["numpy", "paddle"])
def test_tensors_go_the_way_of_arrays(framework: str) -> None:
    ops = make_ops(framework)

    def body(comm: SharedMemoryComm) -> tuple[np.ndarray, np.ndarray | None]:
        collectives = host_collectives(ops, comm)
        total = collectives.all_reduce(ops.tensor(part(comm.rank, 4, 8)))
        whole = collectives.gather(ops.tensor(part(comm.rank, 4, 2 + comm.rank)))
        return ops.numpy(total), None if whole is None else ops.numpy(whole)

    for rank, (total, whole) in enumerate(in_threads(2, body)):
        np.testing.assert_array_equal(total, part(0, 4, 8) + part(1, 4, 8))
        if rank == 0:
            np.testing.assert_array_equal(whole, np.concatenate([part(0, 4, 2), part(1, 4, 3)], axis=1))
        else:
            assert whole is None


def test_all_ranks_have_the_tokens_that_rank_0_sampled() -> None:
    ops = make_ops("numpy")
    sampled = np.array([7, 0, 9], np.int32), np.array([1.5, np.nan, -2], np.float32)
    for shared in in_threads(3, lambda comm: host_collectives(ops, comm).share(None if comm.rank else sampled, 3)):
        for array, expected in zip(shared, sampled, strict=True):
            assert array.dtype == expected.dtype
            np.testing.assert_array_equal(array, expected)


def test_one_rank_alone_has_all_there_is() -> None:
    ops = make_ops("numpy")
    collectives, x = host_collectives(ops, SingleRank()), part(0, 3, 4)
    assert collectives.all_reduce(x) is x
    assert collectives.gather(x) is x


def test_many_rounds_of_ranks_of_different_speed_stay_in_step() -> None:
    def body(comm: SharedMemoryComm) -> int:
        wrong = 0
        for turn in range(300):
            if turn % (comm.rank + 2) == 0:
                np.linalg.norm(np.ones(2000))
            total = comm.all_reduce(np.full(7, turn * (comm.rank + 1), np.float32))
            wrong += int((total != turn * 6).any())
        return wrong

    assert in_threads(3, body) == [0, 0, 0]


def test_a_rank_that_never_comes_is_named() -> None:
    name = uuid.uuid4().hex
    with pytest.raises(EngineDiedError, match=r"ranks \[1\] did not come to a collective within 0.2 s"):
        SharedMemoryComm(name, 0, 2, 64, timeout_s=0.2, create=True)
    assert not left_behind(name)
    with pytest.raises(EngineDiedError, match="rank 0 did not make"):
        SharedMemoryComm(name, 1, 2, 64, timeout_s=0.2, create=False)


def test_a_rank_that_leaves_between_collectives_is_named_by_all_others() -> None:
    seconds, waiting = itertools.count(1, 10), set()

    def clock() -> int:
        """Stands still until both that are left wait for the third, and then goes ten times as fast as it is read."""
        waiting.add(threading.get_ident())
        return next(seconds) if len(waiting) == 2 else 0

    def body(comm: SharedMemoryComm) -> str:
        comm.all_reduce(part(comm.rank, 4))
        if comm.rank == 1:
            return "left"
        comm._clock = clock
        with pytest.raises(EngineDiedError) as raised:
            comm.all_reduce(part(comm.rank, 4))
        return str(raised.value)

    first, _, last = in_threads(3, body, timeout_s=30.0)
    assert first == last == "tensor-parallel ranks [1] did not come to a collective within 30 s"


def test_ranks_that_were_all_suspended_have_their_time() -> None:
    clock = SkippingClock()

    def body(comm: SharedMemoryComm) -> float:
        comm._clock = LivenessClock(clock)
        if comm.rank == 1:
            clock.skip(3600.0)  # while rank 0 waits
        return float(comm.all_reduce(np.ones(1, np.float32))[0])

    assert in_threads(2, body) == [2.0, 2.0]


@pytest.mark.parametrize("given", [None, np.zeros(1, np.int32), np.zeros((3, 1), np.int32)])
def test_rank_0_cannot_broadcast_something_of_another_shape(given: np.ndarray | None) -> None:
    def body(comm: SharedMemoryComm) -> None:
        if comm.rank == 0:
            with pytest.raises(ValueError, match=r"rank 0 must broadcast an array of shape \(3,\)"):
                comm.broadcast(given, (3,))

    in_threads(2, body)


def test_results_are_the_callers_own() -> None:
    def body(comm: SharedMemoryComm) -> bool:
        x = part(comm.rank, 8)
        total = comm.all_reduce(x)
        tokens = comm.broadcast(np.arange(8, dtype=np.int32), (8,))
        copies = total.copy(), tokens.copy()
        for _ in range(4):  # both sets of buffers are written over
            comm.all_reduce(np.zeros(8, np.float32))
        kept = np.array_equal(total, copies[0]) and np.array_equal(tokens, copies[1])
        return kept and np.array_equal(x, part(comm.rank, 8))

    assert in_threads(3, body) == [True, True, True]


def test_every_rank_is_refused_buffers_that_there_is_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    name = uuid.uuid4().hex
    with ThreadPoolExecutor(2) as ranks:
        made = [ranks.submit(SharedMemoryComm, name, rank, 2, 64, PATIENCE_S, rank == 0) for rank in range(2)]
    for each in made:
        with pytest.raises(DeploymentError, match=r"no room for 384 bytes .*No space left.* lower max_batched_tokens"):
            each.result()
    assert not left_behind(name)


@pytest.mark.parametrize(("rank", "size", "max_bytes"), [(0, 1, 64), (2, 2, 64), (-1, 2, 64), (0, 2, 0)])
def test_ranks_and_buffers_that_make_no_sense_are_refused(rank: int, size: int, max_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of {size} with buffers of {max_bytes} bytes"):
        SharedMemoryComm(uuid.uuid4().hex, rank, size, max_bytes, timeout_s=0.1, create=True)


def process_main(name: str, rank: int, size: int, out: Any) -> None:
    comm = SharedMemoryComm(name, rank, size, 4096, timeout_s=PATIENCE_S, create=rank == 0)
    total = np.zeros(5, np.float32)
    for _ in range(200):
        total = comm.all_reduce((total if rank == 0 else 0) + np.full(5, rank, np.float32))
    out.put((rank, total.tolist()))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_in_processes_of_their_own(size: int) -> None:
    context = multiprocessing.get_context("spawn")
    name, out = uuid.uuid4().hex, context.Queue()
    processes = [context.Process(target=process_main, args=(name, rank, size, out)) for rank in range(size)]
    for process in processes:
        process.start()
    results = dict(out.get(timeout=PATIENCE_S) for _ in processes)
    for process in processes:
        process.join(PATIENCE_S)
    assert results == {rank: [200.0 * sum(range(size))] * 5 for rank in range(size)}
    assert [process.exitcode for process in processes] == [0] * size
    assert not left_behind(name)


def test_nothing_is_left_of_ranks_that_are_killed() -> None:
    context = multiprocessing.get_context("spawn")
    name, out = uuid.uuid4().hex, context.Queue()
    victim = context.Process(target=wait_for_ever, args=(name, out))
    victim.start()
    comm = SharedMemoryComm(name, 1, 2, 64, timeout_s=PATIENCE_S, create=False)
    out.get(timeout=PATIENCE_S)
    victim.kill()
    victim.join(PATIENCE_S)
    comm.close()
    assert not left_behind(name)


def wait_for_ever(name: str, out: Any) -> None:
    comm = SharedMemoryComm(name, 0, 2, 64, timeout_s=PATIENCE_S, create=True)
    out.put("made")
    comm.all_reduce(np.zeros(1, np.float32))
