"""Arenas read by NIXL over UCX: RDMA between nodes that have it, other ways of UCX (`UCX_TLS`) elsewhere.

An address holds the metadata of the owner's agent (where it listens, keys to its memory); nothing else is exchanged.
NIXL's package asks for torch, which this use of it does without: `pip install --no-deps nixl-cu12` does.

Memory of a GPU is registered as such: where network cards reach it (GPUDirect RDMA) they read it without its host. What
is read comes to the reader's host.

Nothing is encrypted, and nobody authenticated. Over TCP, UCX imitates RDMA in software, and then an owner's process can
end with a reader that dies in the middle of a read (`Fatal: unexpected error: Endpoint timeout`): that is for tests.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.memories import DEVICE, HOST
from headwise.errors import first_line
from headwise.kernels.block_copy import RunCopy
from headwise.kernels.cuda.launch import address_of
from headwise.transfer.connectors.base import ExportAddress, PeerLostError, Runs, this_node, unpack
from headwise.transfer.connectors.names import NIXL
from headwise.transfer.connectors.staged import StagedReader

log = logging.getLogger(__name__)

PACKAGES = ("nixl_cu12", "nixl_cu13")
"""The same bindings, built for two versions of CUDA: host memory needs neither."""
NO_GPU = -1
"""Stands for the host's memory."""
PROGRESS_US = 1000
"""Longest sleep of an owner's thread, microseconds: without one, it takes a core."""


def load() -> Any:
    """NIXL's bindings. Raises `ImportError` if there are none."""
    for package in PACKAGES:
        try:
            return importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError as error:
            if error.name not in (package, f"{package}._bindings"):
                raise
    raise ImportError(f"none of the packages {', '.join(PACKAGES)} is installed")


class _Agent:
    """One of NIXL's agents. has_thread: that answers readers where UCX imitates RDMA"""

    def __init__(self, ports: Sequence[int], has_thread: bool) -> None:
        self.bindings = load()
        if ports:  # read when an agent is made; of the whole process, whose agents all get these ports
            os.environ["UCX_TCP_PORT_RANGE"] = f"{min(ports)}-{max(ports)}"
        config = self.bindings.nixlAgentConfig()
        config.useProgThread, config.useListenThread, config.pthrDelay = has_thread, False, PROGRESS_US
        self.agent = self.bindings.nixlAgent(f"headwise-{secrets.token_hex(16)}", config)
        self.ucx = self.agent.createBackend("UCX", {})
        self._registered: list[Any] = []

    def register(self, address: int, num_bytes: int, gpu: int = NO_GPU) -> None:
        descriptors = self.bindings.nixlRegDList(self._kind(gpu), [(address, num_bytes, max(gpu, 0), b"")])
        self.agent.registerMem(descriptors, [self.ucx])
        self._registered.append(descriptors)

    def places(self, first: NDArray[np.int64], counts: NDArray[np.int64], base: int, gpu: int = NO_GPU) -> Any:
        rows = np.column_stack([first + base, counts, np.full_like(counts, max(gpu, 0))]).astype(np.uint64)
        return self.bindings.nixlXferDList(self._kind(gpu), rows)

    def _kind(self, gpu: int) -> Any:
        return self.bindings.DRAM_SEG if gpu == NO_GPU else self.bindings.VRAM_SEG

    def forget(self) -> None:
        """Nobody reads what was registered from now on."""
        for descriptors in self._registered:
            try:
                self.agent.deregisterMem(descriptors, [self.ucx])
            except Exception as error:  # of kinds that only the bindings know; the agent's end ends it
                log.warning("NIXL keeps memory registered: %s", first_line(error))
        self._registered = []

    def close(self) -> None:
        self.forget()
        self.agent = None  # which ends it


class NixlExport:
    """`Export` by an agent of its own. ports: where it listens over TCP; empty: anywhere

    Raises `ImportError` without NIXL, and its errors where memory cannot be registered.
    """

    def __init__(self, arena: NDArray[np.uint8], identity: bytes, ports: Sequence[int] = ()) -> None:
        self._agent = _Agent(ports, has_thread=True)
        self._arena = arena
        self.address = _address(self._agent, arena, NO_GPU, identity, HOST)

    def close(self) -> None:
        """See `Export.close`."""
        self._agent.close()


class NixlDeviceExport:
    """`DeviceExport` by an agent of its own. gpu: the arena's, as this process counts them; `NO_GPU`: an emulated one's

    Raises `ImportError` without NIXL, and its errors where a GPU's memory cannot be registered.
    """

    def __init__(self, arena: Any, identity: bytes, gpu: int, ports: Sequence[int] = ()) -> None:
        self._agent = _Agent(ports, has_thread=True)
        self.address = _address(self._agent, arena, gpu, identity, DEVICE)

    def attach(self, arena: Any | None) -> None:
        """See `DeviceExport.attach`. Readers were told the keys of one registration: another arena they read by way of
        the host.
        """
        if arena is None:
            self._agent.forget()

    def close(self) -> None:
        """See `Export.close`."""
        self._agent.close()


def _address(agent: _Agent, arena: Any, gpu: int, identity: bytes, memory: int) -> ExportAddress:
    """Of an arena that is registered now."""
    first, size = address_of(arena), int(arena.size)
    agent.register(first, size, gpu)
    location = msgpack.packb((agent.agent.getLocalMD(), first, gpu))
    return ExportAddress(NIXL, this_node(), location, identity, size, memory)


def open_reader(copy: RunCopy, ports: Sequence[int] = ()) -> StagedReader:
    """A `Reader`. Raises `ImportError` without NIXL."""
    return StagedReader(NIXL, lambda: _NixlLibrary(ports), copy)


class _NixlLibrary:
    """See `Library`."""

    max_runs = 2048
    ends_on_errors = True

    def __init__(self, ports: Sequence[int]) -> None:
        self._agent = _Agent(ports, has_thread=False)
        self._owners: dict[bytes, tuple[str, int, int]] = {}  # by location: its agent's name, its arena's place and GPU

    def register(self, memory: NDArray[np.uint8]) -> None:
        self._agent.register(memory.ctypes.data, memory.size)

    def start(self, address: ExportAddress, runs: Runs, staging: NDArray[np.uint8]) -> _NixlTransfer:
        owner, base, gpu = self._owners.get(address.location) or self._connect(address)
        agent, bindings = self._agent.agent, self._agent.bindings
        try:
            agent.getNotifs({}, [self._agent.ucx])  # there are none, but so the agent hears of owners that have gone
            request = agent.createXferReq(
                bindings.NIXL_READ,
                self._agent.places(runs[:, 1], runs[:, 2], staging.ctypes.data),
                self._agent.places(runs[:, 0], runs[:, 2], base, gpu),
                owner,
                "",
                [self._agent.ucx],
            )
        except Exception as error:  # of kinds that only the bindings know
            raise PeerLostError(f"NIXL cannot read there: {first_line(error)}") from None
        return _NixlTransfer(self._agent, request)

    def _connect(self, address: ExportAddress) -> tuple[str, int, int]:
        values = unpack(address.location, [bytes, int, int])
        if values is None or not 0 <= values[1] < (1 << 63) - address.arena_bytes or not NO_GPU <= values[2] < 1 << 16:
            raise PeerLostError("the address has no agent to connect to")
        try:
            name = self._agent.agent.loadRemoteMD(values[0]).decode()
        except Exception as error:
            raise PeerLostError(f"NIXL reaches no agent there: {first_line(error)}") from None
        self._owners[address.location] = name, values[1], values[2]
        return self._owners[address.location]

    def forget(self, address: ExportAddress) -> None:
        """Connections of transfers that are late go with the agent: to end them sooner can end the owner."""
        self._owners.pop(address.location, None)

    def close(self) -> None:
        self._agent.close()


class _NixlTransfer:
    """See `Transfer`. It is released when it has ended alone: NIXL would say that it is cancelled, and go on."""

    def __init__(self, agent: _Agent, request: int) -> None:
        self._agent, self._request = agent, request
        self._is_done = False
        self._error = ""
        self._look(lambda: agent.agent.postXferReq(request, ""))

    def is_done(self) -> bool:
        if not self._is_done and not self._error:
            self._look(lambda: self._agent.agent.getXferStatus(self._request))
        if self._error:
            raise PeerLostError(f"NIXL: {self._error}")
        return self._is_done

    def _look(self, ask: Any) -> None:
        bindings = self._agent.bindings
        try:
            status = ask()
        except Exception as error:
            self._error = first_line(error)
        else:
            if status == bindings.NIXL_IN_PROG:
                return
            self._is_done = status == bindings.NIXL_SUCCESS
            self._error = "" if self._is_done else str(status)
        try:
            self._agent.agent.releaseXferReq(self._request)
        except Exception as error:
            self._error = self._error or first_line(error)
