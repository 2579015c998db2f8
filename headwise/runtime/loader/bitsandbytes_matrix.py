"""Matrices as bitsandbytes stores them: in 4 bits, places in a table of 16 numbers (NF4, FP4), or int8 by rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.loader.scaled_matrix import ScaledMatrix
from headwise.runtime.loader.stored_matrix import StoredTensors
from headwise.runtime.ops.quantised import GroupQuantised

KINDS = ("nf4", "fp4")
STATE = "quant_state.bitsandbytes__"
_MOST_STATE_BYTES = 1 << 16
_INT8 = np.float32(127)


@dataclass(frozen=True, eq=False)
class TableMatrix:
    """A `StoredMatrix` of ``codes uint8 [N * K / 2]``, row after row, the high half of a byte first.

    table:   float32 ``[16]``
    largest: float32, what numbers of the table are times, of each ``run`` of the matrix
    """

    shape: tuple[int, int]
    codes: NDArray[np.uint8]
    table: NDArray[np.float32]
    largest: NDArray[np.float32]
    run: int

    def part(self, rows: slice, columns: slice) -> NDArray[np.float32]:
        width = self.shape[1]
        first, last = rows.start * width, rows.stop * width
        halves = self.codes[first // 2 : -(-last // 2)]
        numbers = self.table[np.stack([halves >> 4, halves & 15], axis=-1).reshape(-1)]
        numbers = numbers[first % 2 :][: last - first]
        numbers *= self.largest[np.arange(first, last) // self.run]
        return np.ascontiguousarray(numbers.reshape(-1, width)[:, columns])

    def quantised(self, rows: slice, columns: slice) -> GroupQuantised | None:
        """None: the table's numbers are no integers."""
        return None


def table_matrix(tensors: StoredTensors, name: str) -> TableMatrix:
    """The matrix ``name`` in 4 bits. Raises ModelError if what is stored beside it does not fit."""
    state = _state(tensors, name)
    rows, columns = _sizes(name, state, "shape", 2)
    (run,) = _sizes(name, state, "blocksize", 1)
    codes, table, largest = tensors.stored(name), tensors.tensor(f"{name}.quant_map"), _largest(tensors, name, state)
    halves, runs = -(-rows * columns // 2), -(-rows * columns // run)
    if codes.dtype != np.uint8 or (codes.size, table.size, largest.size) != (halves, 16, runs):
        raise ModelError(
            f"{name!r} has {codes.size} codes as {codes.dtype}, a table of {table.size} and {largest.size} scales: "
            f"{halves} as uint8, 16 and {runs} are expected; fetch the model again"
        )
    return TableMatrix((rows, columns), codes.reshape(-1), table.reshape(-1), largest, run)


def _largest(tensors: StoredTensors, name: str, state: Mapping[str, Any]) -> NDArray[np.float32]:
    """The scales, which may be in codes of their own (double quantisation)."""
    stored = tensors.stored(f"{name}.absmax")
    if stored.dtype != np.uint8:
        return tensors.tensor(f"{name}.absmax").reshape(-1)
    (run,), offset = _sizes(name, state, "nested_blocksize", 1), state.get("nested_offset")
    table, largest = (tensors.tensor(f"{name}.nested_{of}").reshape(-1) for of in ("quant_map", "absmax"))
    runs = -(-stored.size // run)
    if not isinstance(offset, float) or (table.size, largest.size) != (256, runs):
        raise ModelError(
            f"{name!r} has scales in codes, of which the table has {table.size} numbers, and there are {largest.size} "
            f"scales and the offset {offset!r:.40}: 256, {runs} and a number are expected; fetch the model again"
        )
    codes = stored.reshape(-1)
    return np.asarray(table[codes] * largest[np.arange(codes.size) // run] + np.float32(offset), np.float32)


def row_matrix(tensors: StoredTensors, name: str, largest_name: str) -> ScaledMatrix:
    """The matrix ``name`` in int8, with the largest number of each row. Raises ModelError if they do not fit."""
    codes, largest = tensors.stored(name), tensors.tensor(largest_name)
    if codes.ndim != 2 or codes.dtype != np.int8 or largest.size != len(codes):
        raise ModelError(
            f"{name!r} is {codes.dtype} {list(codes.shape)}, and {largest_name!r} {list(largest.shape)}: int8, and the "
            "largest number of each row, are expected"
        )
    return ScaledMatrix(codes, largest.reshape(-1, 1) / _INT8, (1, max(codes.shape[1], 1)))


def _state(tensors: StoredTensors, name: str) -> Mapping[str, Any]:
    state = next((f"{name}.{STATE}{kind}" for kind in KINDS if f"{name}.{STATE}{kind}" in tensors), "")
    if not state:
        raise ModelError(f"{name!r} lacks its state, {STATE}{' or '.join(KINDS)}: fetch the model again")
    raw = tensors.stored(state)
    try:
        found = json.loads(raw[:_MOST_STATE_BYTES].tobytes())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ModelError(f"{state!r} is no JSON object: fetch the model again")
    return found


def _sizes(name: str, state: Mapping[str, Any], key: str, count: int) -> list[int]:
    """So many positive integers of a state. Raises ModelError if they are none."""
    found = state.get(key)
    given = found if isinstance(found, list) else [found]
    sizes = [each for each in given if type(each) is int and each > 0]
    if not len(sizes) == len(given) == count:
        raise ModelError(f"the state of {name!r} says {key} is {found!r:.80}: fetch the model again")
    return sizes
