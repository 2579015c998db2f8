"""Which transports a worker has, chosen once at start: what cannot be made here is gone without, and said so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headwise.errors import ConfigError, first_line
from headwise.kernels.block_copy import RunCopy
from headwise.sockets.curve import ClientKeys, ServerKeys
from headwise.transfer.connectors import cuda_ipc, mooncake, nixl, shared_memory, tcp
from headwise.transfer.connectors import names as transports
from headwise.transfer.connectors.base import Export, Reader
from headwise.transfer.host_memory import HostArena

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class PeerAccess:
    """How a worker is reached by those of other engines, and reaches them.

    host:    address of this node that others connect to
    ports:   of which it takes a free one; empty: any
    accepts: who may connect to it; None: whoever knows the address, and in the clear
    keys:    with which it connects to others; likewise
    """

    host: str = "127.0.0.1"
    ports: Sequence[int] = ()
    accepts: ServerKeys | None = field(default=None, repr=False)
    keys: ClientKeys | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Memories:
    """A worker's arenas. sharing: how other processes read the device's; None: they cannot, and it is of no matter"""

    host: HostArena
    device: Any = None
    sharing: cuda_ipc.DeviceSharing | None = None


_NIXL_OF_DEVICE = f"{transports.NIXL} of a device"

_LOAD: dict[str, Callable[[], object]] = {transports.NIXL: nixl.load, transports.MOONCAKE: mooncake.load}
_REMEDY = {
    transports.NIXL: "pip install --no-deps nixl-cu12",
    transports.MOONCAKE: "pip install 'headwise[mooncake]' and, on Debian, apt-get install libibverbs1",
}


def choose_transports(
    text: str, must_encrypt: bool, has_rdma: Callable[[], bool] = transports.has_rdma, *, shares_device: bool = False
) -> list[str]:
    """The transports that ``peer_transports`` means on this machine, the best first; says in one log line why.

    must_encrypt:  auto leaves out those that do not
    shares_device: whether the worker's device has memory that other processes can read

    Raises `ConfigError` if one that is named is not installed, or not for this device.
    """
    chosen, why = [], []
    for name in transports.parse_transports(text):
        reason = ""
        if name in _LOAD:
            reason = _reason_against(name, text == "auto", must_encrypt, has_rdma)
        elif name in transports.OF_DEVICES and not shares_device:
            reason = "no GPU"
            if text != "auto":
                raise ConfigError(f"peer_transports {name}: for device cuda, and this worker's is not; leave it out")
        if reason:
            why.append(f"{name}: {reason}")
        else:
            chosen.append(name)
    if chosen:
        log.info(
            "peers are read by %s (peer_transports %s%s)", ",".join(chosen), text, "".join(f"; no {w}" for w in why)
        )
    return chosen


def _reason_against(name: str, is_auto: bool, must_encrypt: bool, has_rdma: Callable[[], bool]) -> str:
    if is_auto and must_encrypt:
        return "not encrypted"
    if is_auto and not has_rdma():
        return "no RDMA device"
    try:
        _LOAD[name]()
    except ImportError as error:
        if is_auto:
            return f"not installed ({first_line(error)})"
        raise ConfigError(f"peer_transports {name}: {first_line(error)}; run `{_REMEDY[name]}`") from None
    if not has_rdma():
        log.warning(
            "%s has no RDMA device here and goes over what else it has, TCP mostly: tcp is better at that", name
        )
    return ""


def open_exports(
    names: Sequence[str], access: PeerAccess, memories: Memories, identity: bytes, copy: RunCopy
) -> list[Export]:
    """Those of the transports called ``names`` that can be made here, in that order."""
    arena = memories.host
    ways: dict[str, Callable[[], Export]] = {
        transports.CUDA_IPC: lambda: cuda_ipc.CudaIpcExport(memories.device, identity, _sharing(memories.sharing)),
        _NIXL_OF_DEVICE: lambda: nixl.NixlDeviceExport(
            memories.device, identity, _sharing(memories.sharing).gpu, access.ports
        ),
        transports.SHARED_MEMORY: lambda: shared_memory.SharedMemoryExport(arena, identity),
        transports.NIXL: lambda: nixl.NixlExport(arena.array, identity, access.ports),
        transports.MOONCAKE: lambda: mooncake.MooncakeExport(arena.array, identity, access.host, access.ports),
        transports.TCP: lambda: tcp.open_export(arena.array, identity, access.host, access.ports, access.accepts, copy),
    }
    wanted = list(names)
    if transports.NIXL in names and memories.sharing is not None:
        wanted.insert(wanted.index(transports.NIXL), _NIXL_OF_DEVICE)
    return list(_made("export", wanted, ways).values())


def open_readers(
    names: Sequence[str], access: PeerAccess, copy: RunCopy, sharing: cuda_ipc.DeviceSharing | None = None
) -> dict[str, Reader]:
    """Those of the transports called ``names`` that can be made here, by name."""
    ways: dict[str, Callable[[], Reader]] = {
        transports.CUDA_IPC: lambda: cuda_ipc.CudaIpcReader(_sharing(sharing)),
        transports.SHARED_MEMORY: lambda: shared_memory.SharedMemoryReader(copy),
        transports.NIXL: lambda: nixl.open_reader(copy, access.ports),
        transports.MOONCAKE: lambda: mooncake.open_reader(copy, access.host, access.ports),
        transports.TCP: lambda: tcp.TcpReader(copy, access.keys),
    }
    return _made("read", names, ways)


def _made(what: str, names: Sequence[str], ways: dict[str, Callable[[], T]]) -> dict[str, T]:
    made = {}
    for name in names:
        try:
            made[name] = ways[name]()
        except Exception as error:  # a package that is not there, memory that cannot be shared, no free port
            of_device = name in (*transports.OF_DEVICES, _NIXL_OF_DEVICE)
            memory = "device" if of_device else "host"
            log.warning("goes on without %s to %s %s caches: %s", name.split()[0], what, memory, first_line(error))
    return made


def _sharing(sharing: cuda_ipc.DeviceSharing | None) -> cuda_ipc.DeviceSharing:
    if sharing is None:
        raise ValueError("this worker has no GPU")
    return sharing
