"""Host memory for cached blocks: what this process may have, and an arena that is ready without holding up the start.

Sources: cgroups v1 and v2, proc(5), madvise(2), mbind(2), memfd_create(2) of the Linux man pages.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

USABLE = 0.95
"""Share of the memory available that may be asked for: with all of it, the next allocation ends the process."""

POPULATE_BYTES = 64 << 20
"""Bytes made resident by one system call: short enough for `HostArena.close` not to wait long."""

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE, _MPOL_PREFERRED = 14, 23, 1
_PORTABLE, _MAPPED = 1, 2
"""``cudaHostRegisterPortable`` and ``cudaHostRegisterMapped``: for all GPUs of the process, and for their kernels."""
_MBIND = {"x86_64": 237, "aarch64": 235}
log = logging.getLogger(__name__)


# ---- how much there is ----


@dataclass(frozen=True)
class MemoryLimit:
    """``bytes`` are to be had, says ``source``."""

    bytes: int
    source: str


def check_host_memory(num_bytes: int, root: Path = Path("/"), what: str = "host cache") -> None:
    """Refuse to ask for more host memory than this process may have.

    root: where ``proc`` and ``sys`` are found
    what: the memory is for

    Raises:
        ValueError: ``num_bytes`` is more than the machine, or a cgroup this process is in, has left.
    """
    limit = min(memory_limits(root), key=lambda limit: limit.bytes, default=None)
    if limit is None:
        return
    usable = int(limit.bytes * USABLE)
    if num_bytes > usable:
        raise ValueError(
            f"a {what} of {num_bytes} bytes does not fit: {limit.source} leaves {limit.bytes} bytes, of which "
            f"{usable} may be used; choose a smaller {what}, or raise that limit"
        )


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """What the machine and each cgroup of this process still have to give; empty where nobody tells."""
    limits = []
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            limits.append(MemoryLimit(int(value.split()[0]) * 1024, "the machine (MemAvailable)"))
    for directory, limit_file, usage_file in _cgroups(root):
        limit, usage = _number(directory / limit_file), _number(directory / usage_file)
        if limit is not None and usage is not None:
            left = max(0, limit - usage + _reclaimable(directory))
            limits.append(MemoryLimit(left, f"the cgroup limit {directory / limit_file}"))
    return limits


def _cgroups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """The memory cgroups of this process, each with its ancestors, whose limits hold, too."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, files = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount, files = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        for part in (own, *own.parents):
            yield mount / part, *files


def _reclaimable(directory: Path) -> int:
    """Bytes of file pages that the cgroup is charged for and that make room when asked to."""
    for line in _lines(directory / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None  # no limit reads "max"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


# ---- the arena ----


@dataclass(frozen=True)
class SharedArena:
    """How processes of the same user, on the same machine, find an arena: ``/proc/PID/fd/FD``.

    name: of the memory; random, so that an arena is never taken for another one that got its numbers later
    """

    pid: int
    fd: int
    name: str


class HostArena:
    """``num_bytes`` of host memory, usable at once, that a thread makes resident (and pins) in the background.

    array:     ``uint8 [num_bytes]``; zeros until written
    numa_node: take the pages from this node while it has any; then None if they come from anywhere
    pin:       register the memory with CUDA
    is_pinned: whether a GPU may read and write it directly; not before `wait_ready` says so
    is_shared: let other processes map it, where the system can: then ``shared`` tells how. It takes no room in
               ``/dev/shm``, counts towards the same cgroup, and cannot shrink while it is mapped. Huge pages are for
               the system to give: ``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` must not be ``never``

    The thread never writes to the memory, so blocks may be written while it is at work.
    """

    def __init__(
        self, num_bytes: int, *, numa_node: int | None = None, pin: bool = False, is_shared: bool = False
    ) -> None:
        size = max(num_bytes, 1)
        self.shared = create_shared(size) if is_shared else None
        if self.shared is None:
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._memory = mmap.mmap(self.shared.fd, size, flags=mmap.MAP_SHARED)
        self.array: NDArray[np.uint8] = np.frombuffer(self._memory, dtype=np.uint8)[:num_bytes]
        self._address = int(self.array.ctypes.data)
        self._bytes = len(self._memory)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.is_pinned = False
        self.numa_node = numa_node if numa_node is not None and self._bind(numa_node) else None
        self._advise(0, self._bytes, _MADV_HUGEPAGE)  # scattered blocks miss the TLB less; fine without
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._make_ready, args=(pin,), name="host-arena", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until the thread has done what it could; False if that took longer than ``timeout_s``."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop the thread, unpin, and let no process map it any more.

        The memory itself goes when nobody refers to `array`, and no process maps it.
        """
        self._stop.set()
        self._thread.join()
        if self.shared is not None:
            os.close(self.shared.fd)
            self.shared = None
        if self.is_pinned:
            _cuda_runtime().hostUnregister(self._address)
            self.is_pinned = False

    def _make_ready(self, pin: bool) -> None:
        started = time.monotonic()
        resident = self._populate()
        if pin and not self._stop.is_set():
            self._pin()
        log.info(
            "host arena: %d bytes, %d resident after %.1f s, pinned: %s, NUMA node: %s",
            self._bytes, resident, time.monotonic() - started, self.is_pinned, self.numa_node,
        )  # fmt: skip

    def _populate(self) -> int:
        """Bytes made resident. Kernels before Linux 5.14 cannot: there, pages come when they are first written."""
        at = 0
        while at < self._bytes and not self._stop.is_set():
            size = min(POPULATE_BYTES, self._bytes - at)
            if not self._advise(at, size, _MADV_POPULATE_WRITE):
                break
            at += size
        return at

    def _advise(self, at: int, size: int, advice: int) -> bool:
        # Not `mmap.madvise`, which holds the GIL: making 64 MiB resident takes tens of milliseconds.
        return bool(self._libc.madvise(ctypes.c_void_p(self._address + at), ctypes.c_size_t(size), advice) == 0)

    def _bind(self, node: int) -> bool:
        """Prefer a node's memory. Not MPOL_BIND, by which a full node ends the process while another has room."""
        number = _MBIND.get(platform.machine())
        # For a node that is not there the call succeeds, and does nothing.
        if number is None or not Path(f"/sys/devices/system/node/node{node}").exists():
            return False
        mask = (ctypes.c_uint64 * (node // 64 + 1))()
        mask[node // 64] = 1 << node % 64
        result = self._libc.syscall(
            ctypes.c_long(number), ctypes.c_void_p(self._address), ctypes.c_size_t(self._bytes),
            ctypes.c_int(_MPOL_PREFERRED), mask, ctypes.c_ulong(64 * len(mask) + 1), ctypes.c_uint(0),
        )  # fmt: skip
        return bool(result == 0)

    def _pin(self) -> None:
        try:
            _cuda_runtime().hostRegister(self._address, self._bytes, _PORTABLE | _MAPPED)
            self.is_pinned = True
        except Exception as error:  # CuPy's own kind, or no CuPy: copies are slower, and right
            log.warning("the host arena of %d bytes is not pinned: %s", self._bytes, error)


def create_shared(size: int) -> SharedArena | None:
    """Memory with a descriptor. Sealed: a process that maps it would die of a file that shrinks. None: not here."""
    name = f"headwise-{secrets.token_hex(16)}"
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:  # no Linux, or a sandbox
        log.warning("other processes cannot map the host arena: %s", error)
        return None
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return SharedArena(os.getpid(), fd, name)


@dataclass(frozen=True, eq=False)
class MappedArena:
    """Another process' arena, ``uint8``, to read. path, inode: where it was found"""

    array: NDArray[np.uint8]
    path: str
    inode: int

    @property
    def is_shared(self) -> bool:
        """Whether its owner still has it open."""
        try:
            return os.stat(self.path).st_ino == self.inode
        except OSError:
            return False


def map_shared(arena: SharedArena, num_bytes: int) -> MappedArena:
    """An arena of so many bytes, of another process. Raises `OSError` if there is nothing to map, or something else."""
    path = f"/proc/{arena.pid}/fd/{arena.fd}"
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # Looked at once it is open, when nobody can put another one in its place.
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{arena.name} "):
            raise OSError(errno.ENOENT, f"process {arena.pid} is another one than when it gave its address")
        about = os.fstat(fd)
        if about.st_size < max(num_bytes, 1):
            raise OSError(errno.ENOENT, f"process {arena.pid} shares {about.st_size} bytes, not {num_bytes}")
        memory = mmap.mmap(fd, about.st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    return MappedArena(np.frombuffer(memory, dtype=np.uint8), path, about.st_ino)


def numa_node_of_gpu(device: int, root: Path = Path("/")) -> int | None:
    """The NUMA node that GPU ``device`` is attached to; None where the machine has but one or does not tell."""
    try:
        bus_id = str(_cuda_runtime().deviceGetPCIBusId(device)).lower()
    except Exception:  # CuPy's own kind: it has room for 4 digits of a domain, and some virtual machines have 8
        return None
    text = "".join(_lines(root / "sys/bus/pci/devices" / bus_id / "numa_node")).strip()
    return int(text) if text.isdigit() else None


def _cuda_runtime() -> Any:
    import cupy

    return cupy.cuda.runtime
