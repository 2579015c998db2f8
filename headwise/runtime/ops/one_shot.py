"""Collectives of which small sums are one launch: each rank reads what the others have by CUDA IPC, and norms it, too.

The ranks are on one node, a GPU each. They tell each other where their memory is when they start, and need no host
after that. Larger tensors, and all that is no sum, go to NCCL.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ConfigError, first_line
from headwise.kernels.cuda.all_reduce import MOST_RANKS, SOURCE, CudaAllReduce, RankSums, memory_bytes
from headwise.kernels.cuda.launch import address_of
from headwise.kernels.cuda.programs import Programs
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps
from headwise.runtime.ops.comm import Collectives, Communicator, Sampled
from headwise.transfer.connectors.cuda_ipc import HANDLE_BYTES, DeviceSharing

log = logging.getLogger(__name__)

_OFFSET_BYTES = 8


class OneShotCollectives:
    """`Collectives` with sums of what ``small`` takes by it, and all else by ``large``.

    memory: of this rank, which the others read; it is kept for as long as the process lives
    """

    captures = True

    def __init__(self, large: Collectives, small: CudaAllReduce, ops: TensorOps, memory: Any) -> None:
        self._large, self._small, self._ops, self._memory = large, small, ops, memory
        self.name = f"{large.name}+one-shot"

    def all_reduce(self, x: Any) -> Any:
        if not self._small.takes(x):
            return self._large.all_reduce(x)
        x = self._dense(x)
        self._small.all_reduce(x, x)
        return x

    def add_rms_norm(
        self, partial: Any, x: Any, weight: Any, eps: float, bias: Any = None
    ) -> tuple[Tensor, Tensor] | None:
        if not self._small.takes(partial):
            return self._large.add_rms_norm(partial, x, weight, eps, bias)
        total, normed = self._ops.empty_like(x), self._ops.empty_like(x)
        self._small.add_rms_norm(self._dense(partial), self._dense(x), weight, eps, total, normed, bias)
        return total, normed

    def _dense(self, x: Any) -> Any:
        """Without gaps: itself, or a copy."""
        if x.flags.c_contiguous:
            return x
        copy = self._ops.empty_like(x)
        copy[...] = x
        return copy

    def gather(self, x: Tensor) -> Tensor | None:
        return self._large.gather(x)

    def all_gather(self, x: KernelArray, ranks: range) -> KernelArray:
        return self._large.all_gather(x, ranks)

    def exchange(self, x: KernelArray, ranks: range) -> KernelArray:
        return self._large.exchange(x, ranks)

    def share(self, sampled: Sampled | None, count: int) -> Sampled:
        return self._large.share(sampled, count)


def connect_one_shot(
    large: Collectives,
    comm: Communicator,
    ops: TensorOps,
    sharing: DeviceSharing,
    programs: Programs,
    sums: RankSums,
) -> Collectives:
    """``large``, with small sums in one launch where ranks can read each other's memory. All ranks call it together.

    Where one cannot, or has no kernel for ``sums``, ``large`` as it is, on all; a line of the log says why. So it is
    where ranks may be on several nodes, without one.

    Raises:
        EngineDiedError: another rank did not call this in time.
    """
    if comm.size > MOST_RANKS or comm.spans_nodes:
        return large
    memory = ops.empty_bytes(memory_bytes(comm.size))
    memory[...] = 0
    ops.host(memory[-1:])  # the zeros are there before another rank can write
    try:
        programs(SOURCE, sums.defines())
        why = ""
    except ConfigError as error:
        why = f"there is no kernel for them ({first_line(error)})"
    addresses = _map(comm, sharing, memory, why)
    if addresses is None:
        return large
    return OneShotCollectives(large, CudaAllReduce(programs, comm.rank, addresses), ops, memory)


def _map(comm: Communicator, sharing: DeviceSharing, memory: Any, why: str) -> list[int] | None:
    """Where each rank's memory is in this process; None, on all ranks, where one cannot map another's.

    why: this one is to go without, if there is a reason
    """
    own = address_of(memory)
    mine = np.zeros(HANDLE_BYTES + _OFFSET_BYTES, np.uint8)
    try:
        part = sharing.share(memory)
        mine[:] = np.frombuffer(part.handle + part.offset.to_bytes(_OFFSET_BYTES, "little"), np.uint8)
    except Exception as error:  # CuPy's own kinds: memory of a pool that cannot be shared, a container that forbids it
        why = why or f"the memory of its GPU cannot be shared ({first_line(error)})"
    told = _told(comm, mine)
    opened: list[int] = []
    addresses = []
    if not why:
        try:
            for rank, place in enumerate(told):
                if rank != comm.rank:
                    opened.append(sharing.open(place[:HANDLE_BYTES].tobytes()))
                    addresses.append(opened[-1] + int.from_bytes(place[HANDLE_BYTES:].tobytes(), "little"))
                else:
                    addresses.append(own)
        except Exception as error:  # CuPy's own kind: no way between these GPUs
            why = f"it cannot read the memory of another rank's GPU ({first_line(error)})"
    if why:
        log.warning("small sums between tensor-parallel ranks go by NCCL, too: rank %d: %s", comm.rank, why)
    if comm.all_reduce(np.array([bool(why)], np.float32)).any():
        for address in opened:
            sharing.close(address)
        return None
    return addresses


def _told(comm: Communicator, mine: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What each rank tells, ``[ranks, bytes]``, on all of them. Communicators gather floats, which hold a byte."""
    every = comm.gather(mine.astype(np.float32)[None])
    shape = comm.size, mine.size
    return comm.broadcast(None if every is None else every.reshape(shape).astype(np.int32), shape).astype(np.uint8)
