"""Arenas read by Mooncake's transfer engine: RDMA where there is a device, TCP elsewhere. Needs no master.

Nothing is encrypted, and nobody authenticated: who reaches an engine's ports may read the arena, and write to it.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from headwise.kernels.block_copy import RunCopy
from headwise.transfer.connectors.base import ExportAddress, PeerLostError, Runs, this_node, unpack
from headwise.transfer.connectors.names import MOONCAKE, has_rdma
from headwise.transfer.connectors.staged import StagedReader

log = logging.getLogger(__name__)

_ENDPOINT = re.compile(r"[A-Za-z0-9_.:\[\]-]{1,260}:[0-9]{1,5}")


def load() -> Any:
    """Mooncake's class of engines. Raises `ImportError` if there is none."""
    from mooncake.engine import TransferEngine

    return TransferEngine


def _make_engine(host: str, ports: Sequence[int]) -> Any:
    """Raises `ImportError` without Mooncake, `OSError` if it cannot start."""
    engine = load()()
    if ports:  # read when an engine is made; of the whole process, whose engines all get these ports
        for name, port in (("MIN", min(ports)), ("MAX", max(ports))):
            os.environ[f"MC_{name}_RPC_PORT"] = os.environ[f"MC_{name}_PRC_PORT"] = str(port)
    code = engine.initialize(host, "P2PHANDSHAKE", "rdma" if has_rdma() else "tcp", "")
    if code:
        raise OSError(f"Mooncake's transfer engine does not start at {host} (code {code})")
    return engine


def _register(engine: Any, memory: NDArray[np.uint8]) -> None:
    code = engine.register_memory(memory.ctypes.data, memory.size)
    if code:
        raise OSError(f"Mooncake cannot register {memory.size} bytes (code {code}); with RDMA raise `ulimit -l`")


class MooncakeExport:
    """`Export` by an engine of its own.

    host:  address of this node that others connect to
    ports: of which its engine takes two; empty: any

    Raises `ImportError` without Mooncake, `OSError` if its engine cannot start, or take the memory.
    """

    def __init__(self, arena: NDArray[np.uint8], identity: bytes, host: str, ports: Sequence[int] = ()) -> None:
        self._engine, self._arena = _make_engine(host, ports), arena
        _register(self._engine, arena)
        location = msgpack.packb((f"{host}:{self._engine.get_rpc_port()}", arena.ctypes.data))
        self.address = ExportAddress(MOONCAKE, this_node(), location, identity, arena.size)

    def close(self) -> None:
        """See `Export.close`."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.unregister_memory(self._arena.ctypes.data)


def open_reader(copy: RunCopy, host: str, ports: Sequence[int] = ()) -> StagedReader:
    """A `Reader`. Raises as `MooncakeExport` does."""
    return StagedReader(MOONCAKE, lambda: _MooncakeLibrary(host, ports), copy)


class _MooncakeLibrary:
    """See `Library`. Mooncake's calls wait a minute for an owner that stands still: each is made on a thread."""

    max_runs = 64  # of two thousand at a time some fail
    ends_on_errors = False

    def __init__(self, host: str, ports: Sequence[int]) -> None:
        self._engine = _make_engine(host, ports)
        self._registered: list[NDArray[np.uint8]] = []
        self._transfers: list[_MooncakeTransfer] = []

    def register(self, memory: NDArray[np.uint8]) -> None:
        _register(self._engine, memory)
        self._registered.append(memory)

    def start(self, address: ExportAddress, runs: Runs, staging: NDArray[np.uint8]) -> _MooncakeTransfer:
        values = unpack(address.location, [str, int])
        if values is None or not _ENDPOINT.fullmatch(values[0]):
            raise PeerLostError("the address has no engine to connect to")
        endpoint, base = values
        if not 0 <= base < (1 << 63) - address.arena_bytes:
            raise PeerLostError("the address has no memory to read")
        self._transfers = [transfer for transfer in self._transfers if transfer.is_alive()]
        self._transfers.append(
            _MooncakeTransfer(
                self._engine,
                endpoint,
                (runs[:, 1] + staging.ctypes.data).tolist(),
                (runs[:, 0] + base).tolist(),
                runs[:, 2].tolist(),
            )
        )
        self._transfers[-1].start()
        return self._transfers[-1]

    def forget(self, address: ExportAddress) -> None:
        """Mooncake keeps a connection until it fails."""

    def close(self) -> None:
        """With calls that still wait for an owner, the engine and its memory are left to them: to end it ends us."""
        alive = [transfer for transfer in self._transfers if transfer.is_alive()]
        if alive:
            _LEFT.append((self._engine, self._registered))
        else:
            for memory in self._registered:
                self._engine.unregister_memory(memory.ctypes.data)
        self._engine, self._registered = None, []


_LEFT: list[Any] = []
"""Engines that were closed with calls under way, and their memory."""


class _MooncakeTransfer(threading.Thread):
    """See `Transfer`. Of a batch Mooncake tells without waiting of its first run alone, so a thread waits for all."""

    def __init__(self, engine: Any, endpoint: str, to: list[int], at: list[int], counts: list[int]) -> None:
        super().__init__(name="headwise-mooncake", daemon=True)
        self._call = engine.batch_transfer_sync_read, (endpoint, to, at, counts)
        self._code: int | None = None

    def run(self) -> None:
        read, arguments = self._call
        try:
            self._code = int(read(*arguments))
        except Exception:
            log.exception("Mooncake's transfer engine failed")
            self._code = -1
        finally:
            del self._call  # the engine ends with its last user

    def is_done(self) -> bool:
        if self._code:
            raise PeerLostError(f"Mooncake reads nothing there (code {self._code})")
        return self._code == 0
