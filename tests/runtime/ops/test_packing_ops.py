"""Packed weights can be taken apart and put together, and say when they are packed differently than before."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from headwise.runtime.ops.base import PackedParts, PackingOps
from headwise.runtime.ops.quantised import GroupQuantised
from headwise.runtime.ops.select import make_ops

ROWS, COLUMNS = 140, 64
FLOATS = (np.arange(ROWS * COLUMNS, dtype=np.float32) * 7 % 97 * np.float32(0.37) - 18).reshape(ROWS, COLUMNS)


def ops_in(weights_dtype: str) -> PackingOps:
    ops = make_ops("numba", 1, "float32" if weights_dtype == "float32" else "bfloat16", weights_dtype)
    assert isinstance(ops, PackingOps)
    return ops


def blocks() -> Iterator[GroupQuantised]:
    """In every form that GGUF files have them."""
    codes = (np.arange(ROWS * COLUMNS) * 7 % 16).astype(np.uint8).reshape(ROWS, COLUMNS)
    signed = codes.view(np.int8) - np.int8(8)
    for group in (16, 32):
        scale = (np.arange(ROWS * COLUMNS // group, dtype=np.float32) / 64).reshape(ROWS, -1)
        yield GroupQuantised(codes, scale, -scale, group, 4)
        yield GroupQuantised(signed, scale, None, group, 4)
        yield GroupQuantised(signed, scale, -scale, group, 8)
        yield GroupQuantised(signed, scale, None, group, 8)
        for bits in (5, 6):
            wide = (np.arange(ROWS * COLUMNS) * 7 % (1 << bits)).astype(np.uint8).reshape(ROWS, COLUMNS)
            yield GroupQuantised(wide, scale, -scale, group, bits)
            yield GroupQuantised(wide.view(np.int8) - np.int8(1 << bits - 1), scale, None, group, bits)


def packed_parts(weights_dtype: str) -> Iterator[PackedParts]:
    ops = ops_in(weights_dtype)
    for weight in (FLOATS, *blocks()):
        for pack in (ops.linear_weight, ops.gated_weight, ops.embedding_table):
            yield ops.parts_of(pack(weight))


WEIGHTS_DTYPES = ("float32", "bfloat16", "int8", "gguf")
PACKED_AS = {"numba 3": 2155613146, "numba 3, in tiles": 107741200}
"""What the bytes of all weights above come to; the latter where AMX multiplies them."""


def test_the_format_has_another_name_when_weights_are_packed_differently() -> None:
    check, ops = 0, ops_in("float32")
    for weights_dtype in WEIGHTS_DTYPES:
        for parts in packed_parts(weights_dtype):
            check = zlib.crc32(repr(sorted(parts.facts.items())).encode(), check)
            for array in parts.arrays.values():
                check = zlib.crc32(array.reshape(-1).view(np.uint8), check)
    assert PACKED_AS.get(ops.packed_format) == check, "weights are packed differently: raise PACKED_VERSION"


@pytest.mark.parametrize("weights_dtype", WEIGHTS_DTYPES)
def test_a_weight_is_put_together_of_its_parts_in_the_same_memory(weights_dtype: str) -> None:
    ops = ops_in(weights_dtype)
    for parts in packed_parts(weights_dtype):
        again = ops.parts_of(ops.weight_of(parts))
        assert again.facts == parts.facts
        assert again.elements == parts.elements == ROWS * COLUMNS
        assert all(again.arrays[name] is array for name, array in parts.arrays.items())


def test_what_are_no_parts_of_a_weight_is_refused() -> None:
    ops, parts = ops_in("int8"), next(packed_parts("int8"))
    for wrong in (
        {"facts": {}},
        {"arrays": {}},
        {"facts": {**parts.facts, "dtype": "int2"}},
        {"facts": {**parts.facts, "depth": "64"}},
        {"facts": {**parts.facts, "more": 1}},
        {"arrays": {**parts.arrays, "scales": np.zeros(8, np.float16)}},
        {"arrays": {"packed": parts.arrays["packed"]}},
    ):
        with pytest.raises(ValueError, match="packed"):
            ops.weight_of(replace(parts, **wrong))
