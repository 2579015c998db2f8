"""Blocks read from another process' host arena, by each transport, over plain memcpy and over a plain socket.

    python benchmarks/transports.py [--quick]

Prints a table, then one line of JSON. Candidates take turns; a ratio is the median, over the rounds, of the plain
copy's seconds over the transport's. Each side has one thread that copies: beside a model, which wants the cores, there
is no more. The plain socket's process sends from memory, and its peer receives into its arena, without any protocol.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.select import make_run_copy
from headwise.transfer.connectors.base import ExportAddress, Reader, Runs
from headwise.transfer.connectors.names import SHARED_MEMORY, TCP, TRANSPORTS
from headwise.transfer.connectors.select import PeerAccess, open_exports, open_readers
from headwise.transfer.host_memory import HostArena

MIB = 1 << 20
ARENA_BYTES = 256 * MIB
READ_BYTES = {SHARED_MEMORY: 64 * MIB, TCP: 32 * MIB}
BLOCK_KIB = (48, 256, 1024)
TIMEOUT_S = 120.0


def own(pipe: Any, arena_bytes: int) -> None:
    """The other process: an arena, its exports, and a plain socket that sends as many bytes as it is asked for."""
    arena = HostArena(arena_bytes, is_shared=True)
    arena.array[:] = 1
    exports = open_exports(TRANSPORTS, PeerAccess(), arena, b"", make_run_copy("numba", 1))
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(([export.address.encode() for export in exports], server.getsockname()[1]))
        connection, _ = server.accept()
    with connection:
        while question := connection.recv(8):
            connection.sendall(arena.array[: int.from_bytes(question, "little")].data)
    for export in exports:
        export.close()
    arena.close()


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
    for _ in range(rounds + 1):
        runs = scattered(rng, arena.size, num_bytes, block_bytes)
        read = seconds(partial(reader.read, address, runs, arena, TIMEOUT_S))
        copied = int(runs[:, 2].sum())
        times.append((read, seconds(partial(plain, arena, copied))))
    del times[0]  # pages are mapped, connections made
    rates = [copied / statistics.median(column) for column in zip(*times, strict=True)]
    return rates[0], rates[1], statistics.median(plainly / read for read, plainly in times)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 rounds of an eighth of the bytes: seconds")
    args = parser.parse_args(arguments)
    rounds, share = (3, 8) if args.quick else (21, 1)
    arena_bytes = ARENA_BYTES // share
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs, arena_bytes), daemon=True)
    owner.start()
    encoded, port = pipe.recv()
    addresses = {address.transport: address for address in map(ExportAddress.decode, encoded)}
    readers = open_readers(TRANSPORTS, PeerAccess(), make_run_copy("numba", 1))
    arena, own_source = HostArena(arena_bytes).array, np.ones(arena_bytes, np.uint8)
    arena[:] = 2
    with socket.create_connection(("127.0.0.1", port)) as connection:
        plain = {SHARED_MEMORY: partial(plain_memcpy, own_source), TCP: partial(plain_socket, connection)}
        result: dict[str, Any] = {"benchmark": "transports", "bytes_per_s": {}}
        print(f"{rounds} rounds\n\n{'transport':16}{'block KiB':>10}{'GB/s':>8}{'plain GB/s':>12}{'ratio':>7}")
        ratios: dict[str, list[float]] = {}
        for name in [name for name in TRANSPORTS if name in readers and name in addresses]:
            for kib in BLOCK_KIB:
                rate, of_plain, ratio = measure(
                    readers[name], addresses[name], plain[name], arena, READ_BYTES[name] // share, kib << 10, rounds
                )
                print(f"{name:16}{kib:10}{rate / 1e9:8.2f}{of_plain / 1e9:12.2f}{ratio:7.2f}")
                result["bytes_per_s"][f"{name}_{kib}KiB"] = round(rate)
                ratios.setdefault(name, []).append(ratio)
    for reader in readers.values():
        reader.close()
    owner.join()
    result["shm_over_memcpy"] = round(min(ratios[SHARED_MEMORY]), 3)
    result["tcp_over_socket"] = round(min(ratios[TCP]), 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
