from __future__ import annotations

import multiprocessing
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwise.errors import EngineDiedError
from headwise.runtime.shared_memory_comm import SharedMemoryComm


def in_threads(size: int, body: Callable[[SharedMemoryComm], Any], max_bytes: int = 256) -> list[Any]:
    """Run ``body`` on every rank; their results by rank."""
    name, results = uuid.uuid4().hex, [None] * size

    def rank_main(rank: int) -> None:
        comm = SharedMemoryComm(name, rank, size, max_bytes, timeout_s=20, create=rank == 0)
        results[rank] = body(comm)
        comm.close()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert not list(Path("/dev/shm").glob(f"*{name}"))
    return results


def part(rank: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shape", [(1,), (4, 8), (37, 11)])
def test_all_reduce_gives_every_rank_the_same_bits(size: int, shape: tuple[int, ...]) -> None:
    expected = part(0, *shape)
    for rank in range(1, size):
        expected = expected + part(rank, *shape)
    for result in in_threads(size, lambda comm: comm.all_reduce(part(comm.rank, *shape))):
        np.testing.assert_array_equal(result, expected)


def test_gather_joins_uneven_columns_on_rank_0_alone() -> None:
    results = in_threads(3, lambda comm: comm.gather(part(comm.rank, 9, 5 + comm.rank)))
    np.testing.assert_array_equal(results[0], np.concatenate([part(r, 9, 5 + r) for r in range(3)], axis=1))
    assert results[1:] == [None, None]


def test_broadcast_carries_more_than_the_buffer_holds() -> None:
    tokens = np.arange(1000, dtype=np.int32).reshape(10, 100)
    for result in in_threads(3, lambda comm: comm.broadcast(tokens if comm.rank == 0 else None, (10, 100))):
        np.testing.assert_array_equal(result, tokens)


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
    assert not list(Path("/dev/shm").glob(f"*{name}"))
    with pytest.raises(EngineDiedError, match="rank 0 did not make"):
        SharedMemoryComm(name, 1, 2, 64, timeout_s=0.2, create=False)


def test_a_row_that_cannot_fit_is_refused() -> None:
    def body(comm: SharedMemoryComm) -> None:
        with pytest.raises(ValueError, match="a row of 65 floats does not fit"):
            comm.gather(part(0, 2, 65))

    in_threads(2, body)


def process_main(name: str, rank: int, out: Any) -> None:
    comm = SharedMemoryComm(name, rank, 2, 4096, timeout_s=60, create=rank == 0)
    total = np.zeros(5, np.float32)
    for _ in range(200):
        total = comm.all_reduce(total / 2 + rank)
    out.put((rank, total.tolist()))


def test_ranks_in_processes_of_their_own() -> None:
    context = multiprocessing.get_context("spawn")
    name, out = uuid.uuid4().hex, context.Queue()
    processes = [context.Process(target=process_main, args=(name, rank, out)) for rank in range(2)]
    for process in processes:
        process.start()
    results = dict(out.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(20)
    assert results[0] == results[1] == [200.0] * 5
