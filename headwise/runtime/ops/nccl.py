"""Collectives between GPUs by NCCL, through CuPy's binding: on the current stream, in the dtype of the tensors.

They only enqueue work: no host waits for another rank here. If a rank is gone, the kernels of the others wait for ever,
and so does a host that waits for their results, until the engine ends the processes.
"""

from __future__ import annotations

import ctypes
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from types import ModuleType
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from headwise.errors import DeploymentError, EngineDiedError, first_line
from headwise.kernels.cuda.launch import address_of
from headwise.runtime.ops.comm import Communicator, Sampled
from headwise.transfer.connectors.base import this_node

log = logging.getLogger(__name__)

ID_BYTES = 128
"""``NCCL_UNIQUE_ID_BYTES`` in ``nccl.h``."""

_PCI_ADDRESS = (50, 33, 34)
"""``cudaDevAttrPciDomainId``, ``PciBusId`` and ``PciDeviceId``. CuPy also gives the address as text, but its buffer is
too short for the domains of some machines."""

CONNECT, _NO_LIBRARY, _SHARED_GPU = range(3)
"""What ranks agree on."""

WHY_NOT = {
    _NO_LIBRARY: "NCCL is not to be had on every rank (`pip install nvidia-nccl-cu12`, for CUDA 13 -cu13)",
    _SHARED_GPU: "two of them have the same GPU",
}


def connect_gpus(comm: Communicator) -> NcclCollectives | None:
    """Collectives between the ranks' current devices. All ranks of ``comm`` must call this together.

    None, on all ranks, if NCCL is missing on one or two ranks share a GPU; rank 0 then logs why. Ranks on several nodes
    cannot do without.

    Raises:
        DeploymentError: NCCL is there, and fails to connect; or ranks are on several nodes, and it is missing.
        EngineDiedError: another rank did not call this in time.
    """
    nccl = load_nccl()
    verdict, unique_id = _agree(comm, nccl)
    if nccl is None or verdict != CONNECT:
        if comm.spans_nodes:
            raise DeploymentError(f"tensor-parallel ranks on several nodes need NCCL, and {WHY_NOT[verdict]}")
        if comm.rank == 0:
            log.warning("tensor-parallel ranks reduce through host memory: %s", WHY_NOT[verdict])
        return None
    communicator = connect(nccl, comm.size, unique_id, comm.rank, f"TP rank {comm.rank}")
    return NcclCollectives(nccl, communicator, comm)


class NcclCollectives:
    """`Collectives` of CuPy arrays: float32, float16 or bfloat16, and int32: tokens, and words of whatever else.

    Raises `EngineDiedError` if NCCL reports a failure: the ranks are then out of step for good.
    """

    name = "nccl"
    captures = True

    def __init__(self, nccl: ModuleType, communicator: Any, comm: Communicator) -> None:
        self._nccl, self._communicator, self._comm = nccl, communicator, comm
        self._sum = int(nccl.NCCL_SUM)
        self._codes = codes_of(nccl)
        self._widths: dict[int, list[int]] = {}

    def all_reduce(self, x: Any) -> Any:
        x = cupy.ascontiguousarray(x)
        address, stream = address_of(x), current_stream()
        with self._checked():
            self._communicator.allReduce(address, address, x.size, self._codes[x.dtype.name], self._sum, stream)
        return x

    def add_rms_norm(self, partial: Any, x: Any, weight: Any, eps: float, bias: Any = None) -> None:
        return None

    def gather(self, x: Any) -> Any | None:
        widths, stream = self._widths_beside(x.shape[1]), current_stream()
        x = cupy.ascontiguousarray(x)
        if self._comm.rank:
            with self._checked():
                self._communicator.send(address_of(x), x.size, self._codes[x.dtype.name], 0, stream)
            return None
        parts = [x, *(cupy.empty((len(x), width), x.dtype) for width in widths[1:])]
        with self._checked(), self._at_once():
            for rank, part in enumerate(parts[1:], start=1):
                self._communicator.recv(address_of(part), part.size, self._codes[x.dtype.name], rank, stream)
        whole = cupy.empty((len(x), sum(widths)), x.dtype)
        start = 0
        for part in parts:
            whole[:, start : start + part.shape[1]] = part
            start += part.shape[1]
        return whole

    def all_gather(self, x: Any, ranks: range) -> Any:
        x = cupy.ascontiguousarray(x)
        whole = cupy.empty((len(ranks), *x.shape), x.dtype)
        self._send_and_receive([x] * len(ranks), whole, ranks)
        return whole

    def exchange(self, x: Any, ranks: range) -> Any:
        x = cupy.ascontiguousarray(x)
        whole = cupy.empty(x.shape, x.dtype)
        self._send_and_receive(x, whole, ranks)
        return whole

    def _send_and_receive(self, parts: Any, whole: Any, ranks: range) -> None:
        """Send each of ``ranks`` its part, and receive its own for this one into ``whole [len(ranks), ...]``."""
        stream = current_stream()
        with self._checked(), self._at_once():
            for index, rank in enumerate(ranks):
                if rank == self._comm.rank:
                    continue
                sent, received = parts[index], whole[index]
                code = self._codes[received.dtype.name]
                self._communicator.send(address_of(sent), sent.size, code, rank, stream)
                self._communicator.recv(address_of(received), received.size, code, rank, stream)
        own = ranks.index(self._comm.rank)
        whole[own] = parts[own]

    def share(self, sampled: Sampled | None, count: int) -> Sampled:
        tokens, best = sampled or (cupy.empty(count, np.int32), cupy.empty(count, np.float32))
        stream = current_stream()
        with self._checked(), self._at_once():
            for array in (tokens, best):
                address = address_of(array)
                self._communicator.broadcast(address, address, count, self._codes[array.dtype.name], 0, stream)
        return tokens, best

    def _widths_beside(self, mine: int) -> list[int]:
        """The number of columns on every rank, known on rank 0 only; the first time gathered through host memory."""
        if mine not in self._widths:
            told = self._comm.gather(np.array([[mine]], dtype=np.float32))
            self._widths[mine] = [] if told is None else told[0].astype(int).tolist()
        return self._widths[mine]

    @contextmanager
    def _at_once(self) -> Iterator[None]:
        """Launch all calls within the block as one NCCL group."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()  # else all later calls would wait for it, unlaunched

    @contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise EngineDiedError(f"NCCL failed on TP rank {self._comm.rank}: {first_line(error)}") from error


def load_nccl() -> ModuleType | None:
    """CuPy's binding of NCCL; None if it does not find the library."""
    # Set before NCCL reads it. By default, NCCL maps captured buffers into all ranks during a capture, for which the
    # ranks wait for each other. A capture that fails on one rank would then hang the others, and CuPy's pools could
    # free memory that other ranks have mapped.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns of a missing library; `connect_gpus` logs that in one line
        from cupy.cuda import nccl
    return nccl if nccl.available else None


def _agree(comm: Communicator, nccl: ModuleType | None) -> tuple[int, bytes]:
    """Whether all ranks can connect: `verdict_of` them; and NCCL's unique id for it."""
    told = comm.gather(told_of(nccl)[None])
    answer = None
    if told is not None:
        verdict = verdict_of(told.reshape(comm.size, -1))
        unique_id = new_id(nccl, "TP rank 0") if verdict == CONNECT else bytes(ID_BYTES)
        answer = np.array([verdict, *np.frombuffer(unique_id, np.int32)], dtype=np.int32)
    answer = comm.broadcast(answer, (1 + ID_BYTES // 4,))
    return int(answer[0]), answer[1:].tobytes()


def told_of(nccl: ModuleType | None) -> NDArray[np.float32]:
    """What `verdict_of` needs to know of this rank: whether it has NCCL, its machine, and its GPU's PCI address."""
    device, attribute = cupy.cuda.Device().id, cupy.cuda.runtime.deviceGetAttribute
    address = [attribute(number, device) for number in _PCI_ADDRESS]
    return np.array([nccl is not None, *_machine(), *address], dtype=np.float32)


TOLD = 1 + 8 + len(_PCI_ADDRESS)
"""Numbers of `told_of`."""


def _machine() -> list[int]:
    """What tells this machine from others, as numbers that float32 holds."""
    return list(sha256(this_node().encode()).digest()[:8])


def verdict_of(ranks: NDArray[np.float32]) -> int:
    """Whether ranks can connect, by `told_of` each: `CONNECT`, or one of `WHY_NOT`. GPUs are compared as NCCL does."""
    if not ranks[:, 0].all():
        return _NO_LIBRARY
    return CONNECT if len(np.unique(ranks[:, 1:], axis=0)) == len(ranks) else _SHARED_GPU


def new_id(nccl: Any, who: str) -> bytes:
    """NCCL's for a new communicator. who: asks, for errors

    Raises:
        DeploymentError: there is none.
    """
    try:
        return bytes(nccl.get_unique_id())
    except Exception as error:
        raise _failed(who, error) from error


def connect(nccl: Any, size: int, unique_id: bytes, rank: int, who: str) -> Any:
    """One rank's communicator, once all of them call this. who: calls, for errors

    Raises:
        DeploymentError: NCCL fails to connect them.
    """
    try:
        communicator = nccl.NcclCommunicator(size, unique_id, rank)
    except Exception as error:
        raise _failed(who, error) from error
    # Never destroy the communicator before the process ends: that would wait for all graphs that use it, and for other
    # ranks, which may be gone.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(communicator))
    return communicator


def codes_of(nccl: Any) -> dict[str, int]:
    """NCCL's numbers of dtypes, by their names."""
    return {
        "int32": int(nccl.NCCL_INT32),
        "float32": int(nccl.NCCL_FLOAT32),
        "float16": int(nccl.NCCL_FLOAT16),
        "bfloat16": int(nccl.NCCL_BFLOAT16),
    }


def current_stream() -> int:
    """CuPy's, as NCCL takes it."""
    return int(cupy.cuda.get_current_stream().ptr)


def _failed(who: str, error: Exception) -> DeploymentError:
    return DeploymentError(
        f"NCCL cannot connect the GPU of {who} with the others ({first_line(error)}): NCCL_DEBUG=INFO in the "
        "workers' environment says why; in a container, shared memory may be too small (in Docker --shm-size); between "
        "nodes, ports may be closed, or NCCL_SOCKET_IFNAME name a network that does not lead there"
    )
