"""NCCL between threads of one process, and as much of CuPy as its caller needs: on host memory.

It takes what CuPy's binding takes, refuses what NCCL does not define, and compares what ranks must agree on. Recording
a step as a graph runs it without its collectives; replaying it runs it with them.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, product
from queue import Empty, Queue
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.waiting import PATIENCE_S

from headwise.cache_controller.dtypes import numpy_dtype

DTYPES = {2: np.dtype(np.int32), 6: numpy_dtype("float16"), 7: numpy_dtype("float32"), 9: numpy_dtype("bfloat16")}


class NcclError(RuntimeError):
    """What CuPy raises for NCCL's error codes."""


class Thread(threading.local):
    """A rank's thread.

    gpu:    its PCI address
    stream: the current one; 0 is the legacy default stream. The thread does itself what is on it
    way:    how what is enqueued comes to run: by itself, or by a graph that is being recorded or launched
    machine: where the GPU is
    group:  calls between `groupStart` and `groupEnd`, and whether each is a send
    sent:   what the stream has sent that nobody may have received yet: what is behind it waits for that
    others: streams that were made, by their pointers
    """

    gpu = "0000:00:00.0"
    stream = 0
    way = "eager"
    machine = ""
    group: list[tuple[bool, Callable[[], None]]] | None = None

    def __init__(self) -> None:
        self.sent: list[threading.Event] = []
        self.others: dict[int, HostStream] = {}


class HostStream:
    """A stream beside the thread's, of sends alone: each waits for what was before it, and nobody for it but by events.

    is_ready: whether what is sent next was waited for
    """

    def __init__(self, thread: Thread) -> None:
        self.ptr = 0x9000 + len(thread.others)
        thread.others[self.ptr] = self
        self.sent: list[threading.Event] = []
        self.is_ready = False

    def wait_event(self, event: HostEvent) -> None:
        self.is_ready = True


class OwnStream:
    """The thread's: what waits on it, waits at once."""

    def __init__(self, nccl: HostNccl) -> None:
        self._nccl, self.ptr = nccl, nccl.thread.stream

    def wait_event(self, event: HostEvent) -> None:
        if not all(sent.is_set() for sent in event.behind):
            self._nccl.waits.set()
        if not all(sent.wait(self._nccl.patience_s) for sent in event.behind):
            raise NcclError("what was sent before is not received")


class HostEvent:
    """behind: sends that have to be received before it is reached"""

    def __init__(self, disable_timing: bool) -> None:
        assert disable_timing
        self.behind: list[threading.Event] = []

    def record(self, stream: HostStream | OwnStream) -> None:
        self.behind = list(stream.sent) if isinstance(stream, HostStream) else []


class World:
    """What the communicators of one id share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.gpus: dict[int, tuple[str, Any]] = {}
        self.calls: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)
        # All made here: of two threads that ask for one that is not there, each would make its own.
        self.mail: dict[tuple[int, int], Queue[Any]] = {way: Queue() for way in product(range(size), repeat=2)}


class HostNccl(ModuleType):
    """The module `cupy.cuda.nccl`. ``log`` has what was launched, by rank.

    waits: set once a rank's own stream waits for another one of its
    """

    available = True
    patience_s = PATIENCE_S
    NCCL_SUM, NCCL_INT32, NCCL_FLOAT16, NCCL_FLOAT32, NCCL_BFLOAT16 = 0, 2, 6, 7, 9

    def __init__(self) -> None:
        super().__init__("cupy.cuda.nccl")
        self.thread = Thread()
        self.waits = threading.Event()
        self.log: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
        self._worlds: dict[bytes, World] = {}
        self._lock = threading.Lock()
        self._ids = count()

    def get_unique_id(self) -> bytes:
        return next(self._ids).to_bytes(4, "little") + bytes(range(124))

    def NcclCommunicator(self, ndev: int, commId: bytes, rank: int) -> Communicator:  # noqa: N802, N803
        assert type(commId) is bytes
        if len(commId) != 128:
            raise ValueError(f"commId length {len(commId)} != 128.")
        with self._lock:
            world = self._worlds.setdefault(commId, World(ndev))
            assert world.size == ndev
            gpu = self.thread.machine, self.thread.pci
            if gpu in world.gpus.values():
                raise NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage")
            world.gpus[rank] = gpu
        world.barrier.wait()
        return Communicator(self, world, rank)

    def groupStart(self) -> None:  # noqa: N802
        assert self.thread.group is None
        self.thread.group = []

    def groupEnd(self) -> None:  # noqa: N802
        calls, self.thread.group = self.thread.group, None
        assert calls is not None
        self._run(calls)

    def launch(self, call: Callable[[], None], sends: bool) -> None:
        """Now, or at the end of the group."""
        if self.thread.group is None:
            self._run([(sends, call)])
        else:
            self.thread.group.append((sends, call))

    def _run(self, calls: list[tuple[bool, Callable[[], None]]]) -> None:
        """All at once: whom they send to may wait for them. Behind all that the stream has."""
        sent, self.thread.sent = self.thread.sent, []
        if calls and not all(event.wait(self.patience_s) for event in sent):
            raise NcclError("what was sent is not received: a group would do both at once")
        for _, call in sorted(calls, key=lambda each: not each[0]):
            call()


class Communicator:
    """`NcclCommunicator`."""

    def __init__(self, nccl: HostNccl, world: World, rank: int) -> None:
        self._nccl, self._world, self._rank = nccl, world, rank

    def allReduce(  # noqa: N802
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
    ) -> None:
        mine, total = self._memory(sendbuf, count, datatype), self._memory(recvbuf, count, datatype)
        self._check(stream, op)
        assert op == self._nccl.NCCL_SUM

        def run() -> None:
            world, told = self._world, ("allReduce", count, datatype, op, self._nccl.thread.way)
            world.calls[self._rank] = told, mine.copy()
            world.barrier.wait()
            calls = list(world.calls)
            world.barrier.wait()
            if any(other != told for other, _ in calls):
                raise NcclError(f"ranks differ: {[other for other, _ in calls]}")
            total[:] = calls[0][1]
            for _, part in calls[1:]:
                total[:] = total + part

        self._launch(run, "allReduce", count, datatype)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        mine, target = self._memory(sendbuff, count, datatype), self._memory(recvbuff, count, datatype)
        self._check(stream, root)

        def run() -> None:
            world, told = self._world, ("broadcast", count, datatype, root, self._nccl.thread.way)
            world.calls[self._rank] = told, mine.copy()
            world.barrier.wait()
            calls = list(world.calls)
            world.barrier.wait()
            if any(other != told for other, _ in calls):
                raise NcclError(f"ranks differ: {[other for other, _ in calls]}")
            target[:] = calls[root][1]

        self._launch(run, "broadcast", count, datatype)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        mine = self._memory(sendbuf, count, datatype)
        told = ("p2p", count, datatype, self._nccl.thread.way)
        beside = self._nccl.thread.others.get(stream)
        received = threading.Event()
        if beside is not None:  # read when it is received, maybe much later
            assert beside.is_ready, "sent while it is still computed"
            beside.is_ready = False
            beside.sent.append(received)
            self._nccl.log[self._rank].append((self._nccl.thread.way, "send", count, datatype, peer))
            self._world.mail[self._rank, peer].put((told, mine, received))
            return
        self._check(stream, peer)

        def run() -> None:
            self._nccl.thread.sent.append(received)
            self._world.mail[self._rank, peer].put((told, mine.copy(), received))

        self._launch(run, "send", count, datatype, peer)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        target = self._memory(recvbuf, count, datatype)
        self._check(stream, peer)
        told = ("p2p", count, datatype, self._nccl.thread.way)

        def run() -> None:
            try:
                other, values, received = self._world.mail[peer, self._rank].get(timeout=self._nccl.patience_s)
            except Empty:
                raise NcclError(f"rank {peer} sent nothing") from None
            if other != told:
                raise NcclError(f"ranks differ: {other}, {told}")
            target[:] = values
            received.set()

        self._launch(run, "recv", count, datatype, peer)

    def _launch(self, run: Callable[[], None], *told: Any) -> None:
        way = self._nccl.thread.way
        self._nccl.log[self._rank].append((way, *told))
        if way != "recorded":
            self._nccl.launch(run, told[0] == "send")

    def _check(self, stream: int, number: int) -> None:
        assert type(number) is type(stream) is int
        assert stream == self._nccl.thread.stream
        assert stream > 2, "a stream of one's own"

    def _memory(self, address: int, count: int, datatype: int) -> NDArray[Any]:
        assert type(address) is type(count) is type(datatype) is int
        assert address
        assert count >= 0
        dtype = DTYPES[datatype]
        raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
        return np.frombuffer(raw, np.uint8).view(dtype)


def poisoned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    return np.full(shape, -(1 << 31) if np.dtype(dtype).kind == "i" else np.nan, dtype)


def host_cupy_with(nccl: HostNccl) -> dict[str, ModuleType]:
    """CuPy's modules by the names under which they are imported."""
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    cupy.ascontiguousarray, cupy.empty, cupy.cuda = np.ascontiguousarray, poisoned, cuda
    cuda.nccl = nccl
    cuda.Device = lambda: SimpleNamespace(id=0)
    cuda.get_current_stream = lambda: OwnStream(nccl)
    cuda.Stream = lambda non_blocking, priority: HostStream(nccl.thread)
    cuda.Event = HostEvent
    cuda.runtime = SimpleNamespace(deviceGetAttribute=lambda number, device: nccl.thread.pci[number])
    return {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl}


@contextmanager
def way(nccl: HostNccl, name: str) -> Iterator[None]:
    """How the calling thread's work comes to run meanwhile."""
    nccl.thread.way = name
    try:
        yield
    finally:
        nccl.thread.way = "eager"


@contextmanager
def linked_by_nccl(*modules: str) -> Iterator[HostNccl]:
    """CuPy with this NCCL meanwhile, for ``modules`` of `headwise.runtime.ops`, which are imported anew."""
    nccl, names = HostNccl(), [f"headwise.runtime.ops.{name}" for name in modules]
    with pytest.MonkeyPatch.context() as patch:
        for name, module in host_cupy_with(nccl).items():
            patch.setitem(sys.modules, name, module)
        patch.setenv("NCCL_GRAPH_REGISTER", "0")
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        yield nccl
        for name in names:
            sys.modules.pop(name, None)
