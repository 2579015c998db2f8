"""Which adapter each row's sequence is computed with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.models.low_rank import AdaptedRows
from headwise.runtime.protocol.batch import BatchRequest, NewSequence


class AdaptersOfRows:
    """Of a worker's rows, from when a sequence is given one until it is given anew.

    names: of the adapters, in the order in which the model has them
    """

    def __init__(self, names: Sequence[str], max_rows: int) -> None:
        self._places = _places(names)
        self._of_rows: NDArray[np.int16] = np.zeros(max_rows, np.int16)

    def rename(self, names: Sequence[str]) -> None:
        """The model has these now. Rows keep theirs, but for those that are there no more."""
        places, former = _places(names), {place: name for name, place in self._places.items()}
        moved = [0, *(places.get(former[place], 0) for place in range(1, len(former) + 1))]
        self._of_rows = np.array(moved, np.int16)[self._of_rows]
        self._places = places

    def open(self, new: Iterable[NewSequence]) -> None:
        if self._places:
            for each in new:
                self._of_rows[each.row] = self._places[each.adapter] if each.adapter else 0

    def are_in(self, batch: BatchRequest) -> bool:
        """Whether some row of a step has one."""
        return bool(self._places) and bool(self._of_rows[batch.rows].any())

    def of(self, batch: BatchRequest) -> AdaptedRows:
        """Those of a step's tokens."""
        return AdaptedRows(self._of_rows[batch.token_rows])


def _places(names: Sequence[str]) -> dict[str, int]:
    return {name: place for place, name in enumerate(names, start=1)}
