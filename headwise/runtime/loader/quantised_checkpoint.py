"""A checkpoint whose matrices are quantised as its ``config.json`` says, read as floats, or as they are."""

from __future__ import annotations

from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.loader.quantisation import scheme_of
from headwise.runtime.loader.safetensors_file import CODES
from headwise.runtime.loader.schemes import Scheme
from headwise.runtime.loader.stored_matrix import StoredMatrix
from headwise.runtime.ops.quantised import GroupQuantised, Matrix

_WEIGHT = "weight"


class QuantisedCheckpoint:
    """The `Weights` of a checkpoint in a `Scheme`; matrices are expanded to float32 a part at a time.

    keeps_codes: whether `kept_rows` and `kept_columns` give what the checkpoint has as integers
    keeps_fp8:   whether they give what it has as float8_e4m3fn; matrices that are not quantised they give as ``source``

    Raises:
        ModelError: as `Checkpoint` does, or a matrix and its scales do not belong together.
    """

    def __init__(self, source: Checkpoint, scheme: Scheme, keeps_codes: bool = False, keeps_fp8: bool = False) -> None:
        self.directory, self.config = source.directory, source.config
        self._source, self._scheme, self._keeps = source, scheme, {False: keeps_codes, True: keeps_fp8}
        self._matrices: dict[str, StoredMatrix | None] = {}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every weight's name, a matrix's as if it were not quantised."""
        own, beside = self._scheme.suffix, self._scheme.beside
        known, names = set(self._source.names), (name.rpartition(".") for name in self._source.names)
        kept = (
            (at, last)
            for at, _, last in names
            if last not in beside or (last == "scale" and f"{at}.{own}" not in known)
        )
        return tuple(f"{at}.{_WEIGHT if last == own else last}" if at else last for at, last in kept)

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.names)

    @property
    def num_elements(self) -> int:
        """Number of elements in all weights together."""
        return sum(prod(self.shape(name)) for name in self.names)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def shape(self, name: str) -> tuple[int, ...]:
        matrix = self._matrix(name)
        return self._source.shape(name) if matrix is None else matrix.shape

    def tensor(self, name: str) -> NDArray[np.float32]:
        matrix = self._matrix(name)
        if matrix is None:
            return self._source.tensor(name)
        return matrix.part(*(slice(0, size) for size in matrix.shape))

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        matrix = self._matrix(name)
        if matrix is None:
            return self._source.rows(name, start, stop)
        return matrix.part(self._range(name, matrix, 0, start, stop), slice(0, matrix.shape[1]))

    def columns(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        matrix = self._matrix(name)
        if matrix is None:
            return self._source.columns(name, start, stop)
        return matrix.part(slice(0, matrix.shape[0]), self._range(name, matrix, 1, start, stop))

    def byte_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        return self._source.byte_rows(name, start, stop)

    def kept_rows(self, name: str, start: int, stop: int) -> Matrix | None:
        matrix = self._matrix(name)
        if matrix is None:
            return self._source.kept_rows(name, start, stop)
        if not any(self._keeps.values()):
            return None
        return self._kept(matrix.quantised(self._range(name, matrix, 0, start, stop), slice(0, matrix.shape[1])))

    def kept_columns(self, name: str, start: int, stop: int) -> Matrix | None:
        matrix = self._matrix(name)
        if matrix is None:
            return self._source.kept_columns(name, start, stop)
        if not any(self._keeps.values()):
            return None
        return self._kept(matrix.quantised(slice(0, matrix.shape[0]), self._range(name, matrix, 1, start, stop)))

    def _kept(self, codes: GroupQuantised | None) -> GroupQuantised | None:
        return codes if codes is not None and self._keeps[codes.is_float] else None

    def _matrix(self, name: str) -> StoredMatrix | None:
        """None: the checkpoint has it as floats, or not at all."""
        if not name.endswith(_WEIGHT):
            return None
        if name not in self._matrices:
            self._matrices[name] = self._scheme.matrix(self._source, name.removesuffix(_WEIGHT))
        return self._matrices[name]

    def _range(self, name: str, matrix: StoredMatrix, axis: int, start: int, stop: int) -> slice:
        if not 0 <= start <= stop <= matrix.shape[axis]:
            raise ModelError(
                f"{name!r} of {self.directory} has the shape {matrix.shape}: no part {start}:{stop} of axis {axis}"
            )
        return slice(start, stop)


def open_weights(
    directory: Path,
    *,
    blocks: bool = False,
    keeps: np.dtype[Any] | None = None,
    keeps_codes: bool = False,
    keeps_fp8: bool = False,
) -> Checkpoint | QuantisedCheckpoint:
    """A model directory's weights, however they are quantised.

    blocks, keeps: see `Checkpoint`; keeps_codes, keeps_fp8: see `QuantisedCheckpoint`
    """
    source = Checkpoint(directory, blocks=blocks, keeps=keeps)
    scheme = scheme_of(source.config)
    if scheme is None:
        return source
    return QuantisedCheckpoint(Checkpoint(directory, keeps=keeps, also=CODES), scheme, keeps_codes, keeps_fp8)
