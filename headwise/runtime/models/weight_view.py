"""A checkpoint's weights as they are; for models whose checkpoints have some by other names or in another order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.models.decoder import Weights
from headwise.runtime.ops.quantised import GroupQuantised


class WeightView:
    """`Weights` of ``source``, none of them quantised. Models override what differs."""

    def __init__(self, source: Weights) -> None:
        self._source = source

    @property
    def names(self) -> Sequence[str]:
        return self._source.names

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self._source.tensor(name)

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        return self._source.rows(name, start, stop)

    def columns(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        return self._source.columns(name, start, stop)

    def byte_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        return self._source.byte_rows(name, start, stop)

    def quantised_rows(self, name: str, start: int, stop: int) -> GroupQuantised | None:
        """None: no such files are read."""
        return None

    def quantised_columns(self, name: str, start: int, stop: int) -> GroupQuantised | None:
        """None: no such files are read."""
        return None
