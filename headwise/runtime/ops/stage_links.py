"""What stages of a pipeline give each other: the residual stream of each step, from one to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.errors import EngineDiedError
from headwise.runtime.ops.array_ops import Array, ArrayOps
from headwise.runtime.ops.base import Tensor, TensorOps


class StageLostError(EngineDiedError):
    """The stage before a rank's own does not take part in a step, or is in another one; or at start, its neighbours."""


class HostLink(Protocol):
    """From a rank of the stage before, if there is one, and to one of the next, if there is one: arrays in host memory,
    in order; and answers the other way, for what both ends agree on at start.
    """

    def send(self, array: NDArray[np.float32]) -> None:
        """Give the next stage an array, whatever becomes of it here afterwards."""

    def receive(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The next array of the stage before, which is of ``shape``: a new one.

        Raises:
            StageLostError: it does not come within the link's timeout, or what comes is another one.
        """

    def answer(self, array: NDArray[np.float32]) -> None:
        """Give the stage before an array, after one of its own was received."""

    def answered(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The next array that the next stage answers, which is of ``shape``: a new one. Raises as `receive`."""

    def close(self) -> None:
        """Release what the link holds; idempotent."""


@dataclass(frozen=True)
class LinkedStage:
    """What links are made for.

    rank:     of all stages', for errors
    hidden:   numbers of a token between layers
    rows:     of a step at most, with the padding of what is recorded
    is_first: there is no stage before
    is_last:  there is no next one
    """

    rank: int
    hidden: int
    rows: int
    is_first: bool
    is_last: bool


class Incoming(Protocol):
    """From the stage before.

    name:       for logs
    holds_host: whether `receive` waits for the stage before, not the device alone
    """

    name: str
    holds_host: bool

    def place(self, rows: int) -> Tensor | None:
        """Where `receive` puts so many rows in every step, for steps that are recorded. None: each time elsewhere."""

    def receive(self, rows: int) -> Tensor:
        """The next residual stream ``[rows, hidden]``. The caller may overwrite it; it is there until the next call."""


class Outgoing(Protocol):
    """To the next stage.

    name:       for logs
    holds_host: whether `send` waits for the device
    """

    name: str
    holds_host: bool

    def send(self, stream: Tensor) -> None:
        """Give this stage's residual stream ``[rows, hidden]``, whatever becomes of it here in later steps."""


@dataclass(frozen=True)
class StageLinks:
    """One rank's, of tensors. Each step is received, if this is not the first stage, and sent, if it is not the last,
    in the order of steps.

    before, next: None: there is no such stage
    """

    before: Incoming | None = None
    next: Outgoing | None = None

    @property
    def name(self) -> str:
        """For logs."""
        return "+".join(sorted({end.name for end in (self.before, self.next) if end is not None}))

    @property
    def holds_host(self) -> bool:
        """Whether the host waits for other stages within a step: nothing else can be told meanwhile."""
        return any(end.holds_host for end in (self.before, self.next) if end is not None)

    @property
    def is_first(self) -> bool:
        return self.before is None

    @property
    def is_last(self) -> bool:
        return self.next is None

    def place(self, rows: int) -> Tensor | None:
        """See `Incoming.place`; None of the first stage."""
        return None if self.before is None else self.before.place(rows)

    def receive(self, rows: int) -> Tensor | None:
        """See `Incoming.receive`; None on the first stage."""
        return None if self.before is None else self.before.receive(rows)

    def send(self, stream: Tensor) -> None:
        """See `Outgoing.send`; not on the last stage."""
        assert self.next is not None, "the last stage sends nothing"
        self.next.send(stream)


class HostIncoming:
    """`Incoming` through host memory, in float32: for CPUs, and for GPUs that cannot reach each other.

    place: see `place_for`
    """

    name, holds_host = "host", True

    def __init__(self, ops: TensorOps, link: HostLink, hidden: int, place: Array | None = None) -> None:
        self._ops, self._link, self._hidden, self._place = ops, link, hidden, place

    def place(self, rows: int) -> Tensor | None:
        return None if self._place is None else self._place[:rows]

    def receive(self, rows: int) -> Tensor:
        stream = self._ops.tensor(self._link.receive((rows, self._hidden)))
        if self._place is None:
            return stream
        self._place[:rows] = stream
        return self._place[:rows]


class HostOutgoing:
    """`Outgoing` through host memory, as `HostIncoming` takes it."""

    name, holds_host = "host", True

    def __init__(self, ops: TensorOps, link: HostLink) -> None:
        self._ops, self._link = ops, link

    def send(self, stream: Tensor) -> None:
        self._link.send(self._ops.numpy(stream))


def place_for(ops: ArrayOps, stage: LinkedStage) -> Array | None:
    """Where a GPU has what comes from the stage before, at the same address in every step; None: nothing does.

    Zeros at first: steps are recorded, and so run once, before any stream has come.
    """
    if stage.is_first:
        return None
    place = ops.empty_bytes(stage.rows * stage.hidden * ops.dtype.itemsize).view(ops.dtype)
    place[...] = 0
    return place.reshape(stage.rows, stage.hidden)


def host_links(ops: TensorOps, link: HostLink, stage: LinkedStage, place: Array | None = None) -> StageLinks:
    """Those through host memory on both sides of a stage."""
    return StageLinks(
        None if stage.is_first else HostIncoming(ops, link, stage.hidden, place),
        None if stage.is_last else HostOutgoing(ops, link),
    )
