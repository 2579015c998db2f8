"""What stages of a pipeline give each other: the residual stream of each step, from one to the next."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.errors import EngineDiedError
from headwise.runtime.ops.base import Tensor, TensorOps


class StageLostError(EngineDiedError):
    """The stage before a rank's own does not take part in a step, or is in another one."""


class HostLink(Protocol):
    """From a rank of the stage before, if there is one, and to one of the next, if there is one: arrays in host memory,
    in order.
    """

    def send(self, array: NDArray[np.float32]) -> None:
        """Give the next stage an array, whatever becomes of it here afterwards."""

    def receive(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The next array of the stage before, which is of ``shape``: a new one.

        Raises:
            StageLostError: it does not come within the link's timeout, or what comes is another one.
        """

    def close(self) -> None:
        """Release what the link holds; idempotent."""


class StageLinks(Protocol):
    """One rank's, of tensors. Each step is received, if this is not the first stage, and sent, if it is not the last,
    in the order of steps.

    name: for logs
    """

    name: str

    def receive(self, rows: int) -> Tensor:
        """The residual stream ``[rows, hidden]`` of the stage before. The caller may overwrite it; it is there until
        the next call."""

    def send(self, stream: Tensor) -> None:
        """Give the next stage this one's residual stream, whatever becomes of it here in later steps."""


class HostStageLinks:
    """`StageLinks` through host memory, in float32: for CPUs, and for GPUs that cannot reach each other.

    hidden: numbers of a token
    """

    name = "host"

    def __init__(self, ops: TensorOps, link: HostLink, hidden: int) -> None:
        self._ops, self._link, self._hidden = ops, link, hidden

    def receive(self, rows: int) -> Tensor:
        return self._ops.tensor(self._link.receive((rows, self._hidden)))

    def send(self, stream: Tensor) -> None:
        self._link.send(self._ops.numpy(stream))
