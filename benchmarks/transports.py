"""Blocks read from another process' arena, by each transport, over plain memcpy and over a plain socket.

    python benchmarks/transports.py [--quick]

Prints a table, then one line of JSON. Candidates take turns; a ratio is the median, over the rounds, of the plain
copy's seconds over the transport's. Each side has one thread that copies: beside a model, which wants the cores, there
is no more. The plain socket's process sends from memory, and its peer receives into its arena, without any protocol.

NIXL and Mooncake are measured where they are installed (`make rdma`), and compared with the socket, too. Of two
processes on one node NIXL reads the other one's memory by a system call, unless UCX_TLS=tcp says otherwise. Where there
is a GPU, both processes use the first one, and what is on it is read by CUDA IPC.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.cuda.cards import count_cards
from headwise.kernels.select import make_run_copy
from headwise.transfer.connectors.base import ExportAddress, Reader, Runs
from headwise.transfer.connectors.cuda_ipc import DeviceSharing
from headwise.transfer.connectors.names import (
    CUDA_IPC,
    MOONCAKE,
    NIXL,
    OF_DEVICES,
    SHARED_MEMORY,
    TCP,
    TRANSPORTS,
)
from headwise.transfer.connectors.select import Memories, PeerAccess, open_exports, open_readers
from headwise.transfer.host_memory import HostArena

MIB = 1 << 20
ARENA_BYTES = 256 * MIB
READ_BYTES = {CUDA_IPC: 64 * MIB, SHARED_MEMORY: 64 * MIB, TCP: 32 * MIB}
BLOCK_KIB = (48, 256, 1024)
TIMEOUT_S = 120.0
WARM = 2
"""Rounds that are not counted: pages are mapped, connections made."""


def own(pipe: Any, arena_bytes: int, names: Sequence[str]) -> None:
    """The other process: an arena, its exports, and a plain socket that sends as many bytes as it is asked for."""
    arena = HostArena(arena_bytes, is_shared=True)
    arena.array[:] = 1
    memories = Memories(arena, *on_device(arena_bytes)) if CUDA_IPC in names else Memories(arena)
    exports = open_exports(names, PeerAccess(), memories, b"", make_run_copy("numba", 1))
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(([export.address.encode() for export in exports], server.getsockname()[1]))
        connection, _ = server.accept()
    with connection:
        while question := connection.recv(8):
            connection.sendall(arena.array[: int.from_bytes(question, "little")].data)
    for export in exports:
        export.close()
    arena.close()


def on_device(num_bytes: int) -> tuple[Any, DeviceSharing]:
    """An array of the first GPU, and how another process reads it."""
    import cupy

    from headwise.transfer.cuda_sharing import CudaSharing

    return cupy.ones(num_bytes, dtype=np.uint8), CudaSharing(0)


def plain_memcpy(source: NDArray[np.uint8], arena: NDArray[np.uint8], num_bytes: int) -> None:
    np.copyto(arena[:num_bytes], source[:num_bytes])


def plain_socket(connection: socket.socket, arena: NDArray[np.uint8], num_bytes: int) -> None:
    connection.sendall(num_bytes.to_bytes(8, "little"))
    view, at = memoryview(arena.data), 0
    while at < num_bytes:
        at += connection.recv_into(view[at:num_bytes])


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def scattered(rng: np.random.Generator, arena_bytes: int, num_bytes: int, block_bytes: int) -> Runs:
    blocks, count = arena_bytes // block_bytes, num_bytes // block_bytes
    places = [rng.permutation(blocks)[:count] * block_bytes for _ in range(2)]
    return np.column_stack([*places, np.full(count, block_bytes)]).astype(np.int64)


def measure(
    reader: Reader,
    address: ExportAddress,
    plain: Callable[[NDArray[np.uint8], int], None],
    arena: NDArray[np.uint8],
    num_bytes: int,
    block_bytes: int,
    rounds: int,
) -> tuple[float, float, float]:
    """Bytes a second of the transport and of the plain copy, and the ratio of both."""
    rng, times = np.random.default_rng(0), []
    for _ in range(rounds + WARM):
        runs = scattered(rng, arena.size, num_bytes, block_bytes)
        read = seconds(partial(reader.read, address, runs, arena, TIMEOUT_S))
        copied = int(runs[:, 2].sum())
        times.append((read, seconds(partial(plain, arena, copied))))
    del times[:WARM]
    rates = [copied / statistics.median(column) for column in zip(*times, strict=True)]
    return rates[0], rates[1], statistics.median(plainly / read for read, plainly in times)


@dataclass(frozen=True)
class Rate:
    """Bytes a second of a transport and of the plain copy, and the median of their ratio, at a size of blocks."""

    transport: str
    block_kib: int
    bytes_per_s: float
    plain_bytes_per_s: float
    over_plain: float


def measured(names: Sequence[str], rounds: int, share: int = 1) -> list[Rate]:
    """Of those of the transports ``names`` that can be had here, each with all sizes of blocks.

    share: of the bytes, one part in so many
    """
    arena_bytes = ARENA_BYTES // share
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs, arena_bytes, names), daemon=True)
    owner.start()
    encoded, port = pipe.recv()
    addresses = {address.transport: address for address in map(ExportAddress.decode, encoded)}
    sharing = on_device(1)[1] if CUDA_IPC in names else None
    readers = open_readers(names, PeerAccess(), make_run_copy("numba", 1), sharing)
    host_arena = HostArena(arena_bytes, pin=sharing is not None)
    host_arena.wait_ready()
    arena, own_source = host_arena.array, np.ones(arena_bytes, np.uint8)
    arena[:] = 2
    rates = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        over_socket = partial(plain_socket, connection)
        for name in [name for name in names if name in readers and name in addresses]:
            plain = partial(plain_memcpy, own_source) if name in (CUDA_IPC, SHARED_MEMORY) else over_socket
            for kib in BLOCK_KIB:
                num_bytes = READ_BYTES.get(name, READ_BYTES[TCP]) // share
                each = measure(readers[name], addresses[name], plain, arena, num_bytes, kib << 10, rounds)
                rates.append(Rate(name, kib, *each))
    for reader in readers.values():
        reader.close()
    owner.join()
    return rates


def over_plain(rates: Sequence[Rate], transport: str) -> float | None:
    """The least ratio of a transport; None where it was not measured."""
    ratios = [rate.over_plain for rate in rates if rate.transport == transport]
    return round(min(ratios), 3) if ratios else None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 rounds of an eighth of the bytes: seconds")
    args = parser.parse_args(arguments)
    rounds, share = (3, 8) if args.quick else (21, 1)
    names = [name for name in TRANSPORTS if name not in OF_DEVICES or count_cards()]
    rates = measured(names, rounds, share)
    print(f"{rounds} rounds\n\n{'transport':16}{'block KiB':>10}{'GB/s':>8}{'plain GB/s':>12}{'ratio':>7}")
    for rate in rates:
        print(
            f"{rate.transport:16}{rate.block_kib:10}{rate.bytes_per_s / 1e9:8.2f}{rate.plain_bytes_per_s / 1e9:12.2f}"
            f"{rate.over_plain:7.2f}"
        )
    if CUDA_IPC not in names:
        print(f"{CUDA_IPC:16}  skipped: no GPU here, or no CuPy")
    result: dict[str, Any] = {
        "benchmark": "transports",
        "bytes_per_s": {f"{rate.transport}_{rate.block_kib}KiB": round(rate.bytes_per_s) for rate in rates},
        "cuda_ipc_over_memcpy": over_plain(rates, CUDA_IPC),
        "shm_over_memcpy": over_plain(rates, SHARED_MEMORY),
        "tcp_over_socket": over_plain(rates, TCP),
        "nixl_over_socket": over_plain(rates, NIXL),
        "mooncake_over_socket": over_plain(rates, MOONCAKE),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
