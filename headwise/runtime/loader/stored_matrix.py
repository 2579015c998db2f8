"""The contract of matrices that a checkpoint keeps quantised, as several tensors: a part of one is read at a time."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.ops.quantised import GroupQuantised


class StoredTensors(Protocol):
    """The tensors of a checkpoint, in the dtypes that they are stored in."""

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def stored(self, name: str) -> NDArray[Any]:
        """A read-only view of the mapped file; of BF16 and F8_E4M3 the bits."""

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A tensor of floats, as float32."""


class StoredMatrix(Protocol):
    """A matrix ``[N, K]``: outputs by inputs, however it is stored."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def part(self, rows: slice, columns: slice) -> NDArray[np.float32]:
        """``[rows, columns]``, expanded. The slices lie within the matrix, and have no steps."""

    def quantised(self, rows: slice, columns: slice) -> GroupQuantised | None:
        """The same without loss; None: not as `GroupQuantised` has it, or columns cut through a group."""
