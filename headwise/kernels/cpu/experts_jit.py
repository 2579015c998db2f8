# mypy: ignore-errors
"""The compiled half of `headwise.kernels.cpu.experts`: all experts of a layer in one call, on several threads.

A *part* is some tokens of one expert. Threads take parts from a counter, and one thread computes a part alone: it
gathers the tokens' rows, and multiplies them with both of the expert's weights, while its results are in its caches.
Then, when all parts are done, threads take tokens, and add up what their experts made of them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np

from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.addresses import call_at, floats_at, longs_at, record_at
from headwise.kernels.cpu.attention_micro import row_copy
from headwise.kernels.cpu.records import PRODUCT
from headwise.kernels.cpu.threads import fetch_add, wait_for

_FIELDS = """
    multiply products parts firsts order x inputs scratch scratch_bytes factors sums gated tiles down out columns rows
    per_token places weights counters
"""
EXPERTS = np.dtype([(name, np.int64) for name in _FIELDS.split()])
"""A layer's experts.

multiply:      address of the compiled product
products:      ``[parts, 2]`` `PRODUCT` records, of a gated weight and the one behind it, each for one thread; ``x``,
               ``factors``, ``sums``, ``out`` and ``tiles`` are filled in by who computes the part
firsts:        int64 ``[parts]``: where a part's tokens begin in ``order``, int64 ``[rows * per_token]``
x:             float32 ``[rows, inputs]``
scratch:       ``scratch_bytes`` for each thread: gathered rows first; then, at these bytes, ``factors``, ``sums``,
               ``gated`` results, and ``tiles``
down:          float32 ``[rows * per_token, columns]``, in that order
out:           float32 ``[rows, columns]``, to which is added
places:        int64 ``[rows, per_token]``: where a token's results lie in ``down``
weights:       float32 ``[rows, per_token]``
counters:      three, that are 0: parts taken, parts done, pieces of rows taken
"""

PIECE = 4
"""Rows of ``out`` that a thread takes at a time."""

_experts_at, _product_at = record_at(EXPERTS), record_at(PRODUCT)
_PRODUCT_BYTES = PRODUCT.itemsize
_pasted = numba.njit(inline="always", nogil=True, error_model="numpy")


@_pasted
def _place(product, x, scratch, call, out):
    """Say where a product's rows, its scratch and its results are."""
    is_narrow = product.factors != 0
    product.x, product.out, product.tiles = x, out, scratch + call.tiles
    product.factors, product.sums = scratch + call.factors if is_narrow else x, scratch + call.sums


@_pasted
def _compute(call, part, thread):
    scratch, at = call.scratch + thread * call.scratch_bytes, call.products + 2 * part * _PRODUCT_BYTES
    gate, down = _product_at(at), _product_at(at + _PRODUCT_BYTES)
    first = longs_at(call.firsts, call.parts)[part]
    order = longs_at(call.order, call.rows * call.per_token)
    for row in range(gate.rows):
        source = floats_at(call.x + order[first + row] * call.inputs * 4, call.inputs)
        row_copy(source, 0, floats_at(scratch + row * call.inputs * 4, call.inputs), 0, call.inputs)
    _place(gate, scratch, scratch, call, scratch + call.gated)
    call_at(call.multiply, (at, np.int64(0)))
    _place(down, scratch + call.gated, scratch, call, call.down + first * call.columns * 4)
    call_at(call.multiply, (at + _PRODUCT_BYTES, np.int64(0)))


@_pasted
def _add_up(call, row):
    places = longs_at(call.places + row * call.per_token * 8, call.per_token)
    weights = floats_at(call.weights + row * call.per_token * 4, call.per_token)
    target = floats_at(call.out + row * call.columns * 4, call.columns)
    for expert in range(call.per_token):
        source, weight = floats_at(call.down + places[expert] * call.columns * 4, call.columns), weights[expert]
        for column in range(call.columns):
            target[column] += weight * source[column]


def _run(address, thread):
    call = _experts_at(address)
    counters, rows = longs_at(call.counters, 3), call.rows
    part = fetch_add(counters, 0)
    while part < call.parts:
        _compute(call, part, thread)
        fetch_add(counters, 1)
        part = fetch_add(counters, 0)
    wait_for(counters, 1, call.parts)
    row = fetch_add(counters, 2) * PIECE
    while row < rows:
        for each in range(row, min(rows, row + PIECE)):
            _add_up(call, each)
        row = fetch_add(counters, 2) * PIECE


@cache
def run() -> Any:
    """The compiled function of an `EXPERTS`'s address and a thread: its share of all parts, then of all tokens."""
    return machine_code.unit(_run, 2, error_model="numpy")
