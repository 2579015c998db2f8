"""Blocks of another process' device arena, read as an engine reads another one's (`cuda_ipc`): the section ipc.

The other process is on the same card, so what is timed is this card's way to the host. With several cards the bytes
take NVLink or PCIe before that, which this does not show.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from gpu.bench import Bench
from numpy.typing import NDArray

from headwise.transfer.connectors.base import ExportAddress, PeerLostError, Runs
from headwise.transfer.connectors.cuda_ipc import CudaIpcExport, CudaIpcReader, DeviceSharing

ARENA_BYTES, TINY_ARENA_BYTES = 256 << 20, 1 << 20
BLOCK_KIB = (16, 48, 256)
ROUNDS = 7
PATIENCE_S = 30.0


def ipc(bench: Bench) -> None:
    """Right bytes, how fast they come, and what becomes of them when their owner hangs up, or is killed."""
    size = TINY_ARENA_BYTES if bench.options.emulate else ARENA_BYTES
    content = np.random.default_rng(bench.rig.seed).integers(0, 256, size, dtype=np.uint8)
    host = bench.rig.host_arena(size)
    host.wait_ready()
    reader = CudaIpcReader(device(bench.options.emulate)[1])
    with owner(bench, size) as (process, pipe, address):
        try:
            _check(bench, reader, address, content, host.array)
            _time(bench, reader, address, host.array)
            pipe.send("detach")
            bench.rows.check("unmapped_before_it_is_freed", pipe.recv() == "detached" and _is_lost(reader, address))
            pipe.send("attach")
            address = ExportAddress.decode(pipe.recv())
            reader.read(address, _all(size), host.array, PATIENCE_S)
            bench.rows.check("another_arena_at_the_same_address", bool((host.array == content).all()))
            process.kill()
            process.join()
            bench.rows.check("a_killed_owner_is_lost", _is_lost(reader, address))
        finally:
            reader.close()
            host.close()


def _check(
    bench: Bench, reader: CudaIpcReader, address: ExportAddress, content: NDArray[np.uint8], arena: NDArray[np.uint8]
) -> None:
    arena[:] = 0
    expected, runs = np.zeros_like(arena), _scattered(bench, arena.size, 3 << 10)
    for first, to, count in runs.tolist():
        expected[to : to + count] = content[first : first + count]
    reader.read(address, runs, arena, PATIENCE_S)
    bench.rows.check("right_bytes", bool((arena == expected).all()), f"{len(runs)} blocks of 3 KiB")


def _time(bench: Bench, reader: CudaIpcReader, address: ExportAddress, arena: NDArray[np.uint8]) -> None:
    """Blocks, from anywhere to anywhere, and all as one; they take turns."""
    works = {f"blocks_{kib}KiB": _scattered(bench, arena.size, kib << 10) for kib in BLOCK_KIB}
    works["whole"] = _all(arena.size)
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(ROUNDS + 1):
        for name, runs in works.items():
            begun = time.perf_counter()
            reader.read(address, runs, arena, PATIENCE_S)
            if turn:
                times[name].append((time.perf_counter() - begun) / int(runs[:, 2].sum()))
    for name, of_work in times.items():
        bench.rows.add(name, 1e-9 / statistics.median(of_work), "GB/s", note="to pinned host memory")


def _is_lost(reader: CudaIpcReader, address: ExportAddress) -> bool:
    try:
        reader.read(address, np.array([[0, 0, 16]]), np.zeros(16, np.uint8), PATIENCE_S)
    except PeerLostError:
        return True
    return False


def _all(size: int) -> Runs:
    return np.array([[0, 0, size]], dtype=np.int64)


def _scattered(bench: Bench, size: int, block_bytes: int) -> Runs:
    """Half of all blocks."""
    rng, count = np.random.default_rng((bench.rig.seed, block_bytes)), size // block_bytes
    places = [rng.permutation(count)[: count // 2] * block_bytes for _ in range(2)]
    return np.column_stack([*places, np.full(count // 2, block_bytes)]).astype(np.int64)


# ---- the other process ----


@contextmanager
def owner(bench: Bench, size: int) -> Iterator[tuple[Any, Any, ExportAddress]]:
    """A process whose arena has the bytes of the seed, a pipe to it, and its address."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=own, args=(theirs, size, bench.rig.seed, bench.options.emulate), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, pipe, ExportAddress.decode(pipe.recv())
    finally:
        process.kill()
        process.join()


def own(pipe: Any, size: int, seed: int, emulate: bool) -> None:
    content = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    upload, sharing = device(emulate)
    arena = upload(content)
    export = CudaIpcExport(arena, b"", sharing)
    pipe.send(export.address.encode())
    pipe.recv()
    export.attach(None)
    del arena
    pipe.send("detached")
    pipe.recv()
    export.attach(upload(content))
    pipe.send(export.address.encode())
    pipe.recv()


def device(emulate: bool) -> tuple[Callable[[NDArray[np.uint8]], Any], DeviceSharing]:
    """What makes an array of a process' GPU of bytes, and how others read it."""
    if emulate:
        from gpu.emulated import HostGpu, host_sharing

        gpu = HostGpu()
        return gpu.upload, host_sharing(gpu)
    import cupy

    from headwise.transfer.cuda_sharing import CudaSharing

    return cupy.asarray, CudaSharing(0)
