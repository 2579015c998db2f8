"""Which transports a worker has, chosen once at start: what cannot be made here is gone without, and said so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from headwise.errors import first_line
from headwise.kernels.block_copy import RunCopy
from headwise.sockets.curve import ClientKeys, ServerKeys
from headwise.transfer.connectors import names as transports
from headwise.transfer.connectors import shared_memory, tcp
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


def open_exports(
    names: Sequence[str], access: PeerAccess, arena: HostArena, identity: bytes, copy: RunCopy
) -> list[Export]:
    """Those of the transports called ``names`` that can be made here, in that order."""
    ways: dict[str, Callable[[], Export]] = {
        transports.SHARED_MEMORY: lambda: shared_memory.SharedMemoryExport(arena, identity),
        transports.TCP: lambda: tcp.open_export(arena.array, identity, access.host, access.ports, access.accepts, copy),
    }
    return list(_made("export", names, ways).values())


def open_readers(names: Sequence[str], access: PeerAccess, copy: RunCopy) -> dict[str, Reader]:
    """Those of the transports called ``names`` that can be made here, by name."""
    ways: dict[str, Callable[[], Reader]] = {
        transports.SHARED_MEMORY: lambda: shared_memory.SharedMemoryReader(copy),
        transports.TCP: lambda: tcp.TcpReader(copy, access.keys),
    }
    return _made("read", names, ways)


def _made(what: str, names: Sequence[str], ways: dict[str, Callable[[], T]]) -> dict[str, T]:
    made = {}
    for name in names:
        try:
            made[name] = ways[name]()
        except Exception as error:  # a package that is not there, memory that cannot be shared, no free port
            log.warning("goes on without %s to %s host caches: %s", name, what, first_line(error))
    return made
