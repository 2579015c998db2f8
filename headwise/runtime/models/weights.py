"""Where a model's weights come from: a checkpoint's tensors, and what was made of them at an earlier start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.ops.base import Weight
from headwise.runtime.ops.quantised import Matrix


class Weights(Protocol):
    """Reads weights, or the parts that a rank needs: float32, by their Hugging Face names; `byte_rows` those of bytes.

    Where weights are to stay as a file has them, quantised or in the model's dtype, `kept_rows` and `kept_columns`
    give the same part so; None: not this one.
    """

    @property
    def names(self) -> Sequence[str]: ...

    def tensor(self, name: str) -> NDArray[np.float32]: ...

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]: ...

    def columns(self, name: str, start: int, stop: int) -> NDArray[np.float32]: ...

    def byte_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]: ...

    def kept_rows(self, name: str, start: int, stop: int) -> Matrix | None: ...

    def kept_columns(self, name: str, start: int, stop: int) -> Matrix | None: ...


Prepare = Callable[[str, Callable[[], Weight]], Weight]
"""Gives a rank's weight of some name: made by the function, or as the function made it at an earlier start.

A name is that of one weight of a model, and tells which parts of which tensors it is made of.
"""


def make_anew(name: str, make: Callable[[], Weight]) -> Weight:
    """The `Prepare` that knows nothing of earlier starts."""
    return make()


class PreparedWeights:
    """The weights of a model that is there, for another one of the same checkpoint: with other adapters."""

    def __init__(self) -> None:
        self._made: dict[str, Weight] = {}

    def __len__(self) -> int:
        return len(self._made)

    def remembering(self, prepare: Prepare) -> Prepare:
        """Gives what is there, and makes the rest by ``prepare``."""

        def prepared(name: str, make: Callable[[], Weight]) -> Weight:
            if name not in self._made:
                self._made[name] = prepare(name, make)
            return self._made[name]

        return prepared

    @property
    def weights(self) -> Iterable[Weight]:
        """Those that are there."""
        return self._made.values()

    def clear(self) -> None:
        """That model is to go."""
        self._made.clear()
