"""Collectives between the tensor-parallel ranks of one engine: of arrays on the host, of tensors where these are."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.ops.base import Tensor, TensorOps


class Communicator(Protocol):
    """All ranks call the same operations in the same order with the same shapes.

    Every operation raises `headwise.errors.EngineDiedError` when a peer does not show up within the
    communicator's timeout, so that a dead rank never hangs the others.
    """

    rank: int
    size: int

    def all_reduce(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """The sum over ranks, summed in rank order so that every rank has the same bits."""

    def gather(self, x: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Concatenate ``x`` of all ranks along the last axis on rank 0; ``None`` elsewhere."""

    def broadcast(self, x: NDArray[np.int32] | None, shape: tuple[int, ...]) -> NDArray[np.int32]:
        """Rank 0's ``x`` (of ``shape``) on every rank."""

    def close(self) -> None:
        """Release what the communicator holds; idempotent."""


class Collectives(Protocol):
    """What a model needs of the other ranks, for tensors; of the calls the same holds as for a `Communicator`'s.

    name:     for people
    captures: whether `CapturingOps.capture` may record it, since it only enqueues: on all ranks, or on none
    """

    name: str
    captures: bool

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, the same bits on every rank. ``x`` is the caller's no more."""

    def gather(self, x: Tensor) -> Tensor | None:
        """Concatenate ``x [rows, columns]`` of all ranks along the last axis on rank 0; ``None`` elsewhere.

        Columns may differ between ranks, but go together: where one has as many as before, so have all.
        """


class SingleRank:
    """The communicator and collectives of an engine without tensor parallelism: they have nothing to do."""

    name = "none"
    captures = True
    rank = 0
    size = 1

    def all_reduce(self, x: Any) -> Any:
        return x

    def gather(self, x: Any) -> Any:
        return x

    def broadcast(self, x: NDArray[np.int32] | None, shape: tuple[int, ...]) -> NDArray[np.int32]:
        if x is None:
            raise ValueError("rank 0 must give the array that it broadcasts")
        return x

    def close(self) -> None:
        pass


class HostCollectives:
    """`Collectives` through host memory, in float32: for CPUs, and for GPUs that cannot reach each other."""

    name = "host"
    captures = False

    def __init__(self, ops: TensorOps, comm: Communicator) -> None:
        self._ops, self._comm = ops, comm

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._ops.tensor(self._comm.all_reduce(self._ops.numpy(x)))

    def gather(self, x: Tensor) -> Tensor | None:
        whole = self._comm.gather(self._ops.numpy(x))
        return None if whole is None else self._ops.tensor(whole)


def host_collectives(ops: TensorOps, comm: Communicator) -> Collectives:
    """Collectives over ``comm``; with one rank they do nothing."""
    return comm if isinstance(comm, SingleRank) else HostCollectives(ops, comm)
