"""Collectives between the tensor-parallel ranks of one engine, behind one small interface."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


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


class SingleRank:
    """The communicator of an engine without tensor parallelism."""

    rank = 0
    size = 1

    def all_reduce(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        return x

    def gather(self, x: NDArray[np.float32]) -> NDArray[np.float32] | None:
        return x

    def broadcast(self, x: NDArray[np.int32] | None, shape: tuple[int, ...]) -> NDArray[np.int32]:
        if x is None:
            raise ValueError("rank 0 must give the array that it broadcasts")
        return x

    def close(self) -> None:
        pass
