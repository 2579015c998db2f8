"""An owner of arenas in a process of its own, to be stopped and killed while they are read."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from support.gpu.host_ipc import HostGpu, host_sharing
from support.waiting import eventually

from headwise.cache_controller.memories import DEVICE, HOST
from headwise.kernels.select import make_run_copy
from headwise.sockets.curve import ServerKeys
from headwise.transfer.connectors.base import ExportAddress
from headwise.transfer.connectors.select import Memories, PeerAccess, open_exports
from headwise.transfer.host_memory import HostArena

IDENTITY = b"a model"


def content(num_bytes: int, seed: int) -> np.ndarray:
    """What an owner's arena has; no byte is 0."""
    return np.random.default_rng(seed).integers(1, 256, num_bytes, dtype=np.uint8)


class PeerOwner:
    """A process with arenas of ``num_bytes``, on its host and on a GPU, that it exports.

    addresses: by transport; of what leads to either memory, that of the host
    devices:   the others of those
    content:   of both
    """

    def __init__(
        self, num_bytes: int, transports: Sequence[str], keys: ServerKeys | None = None, seed: int = 0
    ) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.content = content(num_bytes, seed)
        self._process = context.Process(target=_own, args=(theirs, num_bytes, transports, keys, seed), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe: Any = ours
        found = list(map(ExportAddress.decode, ours.recv()))
        self.devices = {address.transport: address for address in found if address.memory == DEVICE}
        self.addresses = self.devices | {address.transport: address for address in found if address.memory == HOST}
        self.pid = int(self._process.pid or 0)

    def close_exports(self) -> None:
        """Have it end its exports, and its arena; the process goes on."""
        self._pipe.send("close")
        self._pipe.recv()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        eventually(lambda: all(") T " in stat.read_text() for stat in Path(f"/proc/{self.pid}/task").glob("*/stat")))

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def claims(self, transport: str, arena_bytes: int) -> ExportAddress:
        """Its address with a size that is not its arena's."""
        return replace(self.addresses[transport], arena_bytes=arena_bytes)


def _own(pipe: Any, num_bytes: int, transports: Sequence[str], keys: ServerKeys | None, seed: int) -> None:
    arena = HostArena(num_bytes, is_shared=True)
    gpu = HostGpu()
    on_device = gpu.empty(num_bytes)
    arena.array[:] = on_device[:] = content(num_bytes, seed)
    memories = Memories(arena, on_device, host_sharing(gpu))
    exports = open_exports(transports, PeerAccess(accepts=keys), memories, IDENTITY, make_run_copy("reference", 1))
    pipe.send([export.address.encode() for export in exports])
    pipe.recv()
    for export in exports:
        export.close()
    arena.close()
    gpu.free(on_device)
    pipe.send("closed")
    pipe.recv()
