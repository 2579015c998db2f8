"""Collectives between an engine's tensor-parallel ranks: `Communicator` of host arrays, `Collectives` of tensors."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.token_share import TokenShare
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps

Sampled = tuple[KernelArray, KernelArray]
"""Tokens ``int32 [n]``, and the largest logit ``float32 [n]`` of what each was chosen from."""


class Communicator(Protocol):
    """Collectives of arrays in host memory.

    All ranks must call the same operations in the same order, with the same shapes. Every operation raises
    `EngineDiedError` if another rank does not take part within the communicator's timeout, so that a dead rank never
    hangs the others.

    rank: from 0 to ``size - 1``
    size: number of ranks
    spans_nodes: whether ranks may be on several nodes, and so share no memory
    """

    rank: int
    size: int
    spans_nodes: bool

    def all_reduce(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """The sum over ranks, summed in rank order so that every rank has the same bits."""

    def gather(self, x: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Concatenate ``x`` of all ranks along the last axis on rank 0; ``None`` elsewhere."""

    def all_gather(self, x: NDArray[Any], ranks: range) -> NDArray[Any]:
        """``x`` of each of ``ranks``, of which this is one: ``[len(ranks), *x.shape]``. Others call it for theirs."""

    def exchange(self, x: NDArray[Any], ranks: range) -> NDArray[Any]:
        """Of ``x [len(ranks), ...]`` each goes to its rank; ``[len(ranks), ...]`` of what each had for this one."""

    def broadcast(self, x: NDArray[np.int32] | None, shape: tuple[int, ...]) -> NDArray[np.int32]:
        """Rank 0's ``x``, of ``shape``, on every rank; the others may give None."""

    def close(self) -> None:
        """Release what the communicator holds; idempotent."""


class Collectives(Protocol):
    """Collectives of tensors, which a model calls; all ranks call the same ones in the same order.

    name:     for logs
    captures: whether `CapturingOps.capture` may record its calls, since they only enqueue. All ranks must then record
              a call, or none
    """

    name: str
    captures: bool

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, the same bits on every rank. It may overwrite ``x``: do not use that afterwards."""

    def add_rms_norm(
        self, partial: Tensor, x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """`TensorOps.add_rms_norm` of ``x`` and the sum of ``partial`` over the ranks, as one, with the same bits on
        every rank; None, on all, where that takes two calls: nothing is done then. ``bias`` is the same on all."""

    def gather(self, x: Tensor) -> Tensor | None:
        """Concatenate ``x [rows, columns]`` of all ranks along the last axis on rank 0; ``None`` elsewhere.

        The number of columns may differ between ranks. If one rank has as many as in an earlier call, so must all.
        """

    def all_gather(self, x: KernelArray, ranks: range) -> KernelArray:
        """``x`` of each of ``ranks``, of which this is one: ``[len(ranks), *x.shape]``, of its dtype. Ranks outside of
        them call it at the same time for as many others."""

    def exchange(self, x: KernelArray, ranks: range) -> KernelArray:
        """Of ``x [len(ranks), ...]`` each goes to its rank; ``[len(ranks), ...]`` of what each had for this one.
        Otherwise as `all_gather`."""

    def share(self, sampled: Sampled | None, count: int) -> Sampled:
        """The ``count`` tokens that rank 0 sampled, on every rank; the others give None."""


class SingleRank:
    """The communicator and collectives of an engine of one rank: they return what they are given."""

    name = "none"
    captures = True
    rank = 0
    size = 1
    spans_nodes = False

    def all_reduce(self, x: Any) -> Any:
        return x

    def add_rms_norm(self, partial: Any, x: Any, weight: Any, eps: float, bias: Any = None) -> None:
        return None

    def gather(self, x: Any) -> Any:
        return x

    def all_gather(self, x: Any, ranks: range) -> Any:
        return x[None]

    def exchange(self, x: Any, ranks: range) -> Any:
        return x

    def share(self, sampled: Sampled | None, count: int) -> Sampled:
        assert sampled is not None, "rank 0 samples"
        return sampled

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

    def add_rms_norm(self, partial: Tensor, x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> None:
        return None

    def gather(self, x: Tensor) -> Tensor | None:
        whole = self._comm.gather(self._ops.numpy(x))
        return None if whole is None else self._ops.tensor(whole)

    def all_gather(self, x: KernelArray, ranks: range) -> KernelArray:
        return self._ops.upload(self._comm.all_gather(self._ops.host(x), ranks))

    def exchange(self, x: KernelArray, ranks: range) -> KernelArray:
        return self._ops.upload(self._comm.exchange(self._ops.host(x), ranks))

    def share(self, sampled: Sampled | None, count: int) -> Sampled:
        known = None if sampled is None else np.stack([self._ops.host(array).view(np.int32) for array in sampled])
        tokens, best = self._comm.broadcast(known, (2, count))
        return self._ops.upload(tokens), self._ops.upload(best.view(np.float32))


class CollectiveRanks:
    """The `TokenRanks` of rank ``rank``, of which each ``parts`` neighbours keep tokens together."""

    def __init__(self, collectives: Collectives, rank: int, parts: int) -> None:
        self.share = TokenShare.of_rank(rank, parts)
        self._collectives, first = collectives, rank - self.share.part
        self._ranks = range(first, first + parts)

    def all_gather(self, x: KernelArray) -> KernelArray:
        return self._collectives.all_gather(x, self._ranks)

    def exchange(self, x: KernelArray) -> KernelArray:
        return self._collectives.exchange(x, self._ranks)


def host_collectives(ops: TensorOps, comm: Communicator) -> Collectives:
    """Collectives of tensors over ``comm``, through host memory; with one rank they do nothing."""
    return comm if isinstance(comm, SingleRank) else HostCollectives(ops, comm)
