"""Products with packed weights on CPU cores: the Python half (the compiled half is `matmul_jit`).

A weight is packed once, at load, and that copy serves decode and prefill, and the look-up of embeddings. What it is
kept in is its *kind*: float32, bfloat16, or integers with a scale per group of inputs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cores import usable_cores
from headwise.kernels.code_bytes import CPU_SCALES, bits_in_memory
from headwise.kernels.cpu import matmul_jit, matmul_kinds, matmul_rows, packing_jit, records
from headwise.kernels.cpu.matmul_kinds import PANEL
from headwise.kernels.cpu.memory import CACHE_LINE, Slabs, ThreadScratch
from headwise.kernels.cpu.pool import pool_of_this_process
from headwise.kernels.cpu.records import place_of
from headwise.kernels.fused import Activation, is_gated

EPILOGUES = {
    None: matmul_jit.PLAIN,
    "silu": matmul_jit.SILU,
    "gelu_tanh": matmul_jit.GELU,
    "clamped": matmul_jit.CLAMPED,
    "limited_silu": matmul_jit.LIMITED,
    "clipped_silu": matmul_jit.CLIPPED,
    "relu2": matmul_jit.RELU2,
}
"""By `Activation`; None: there is none."""
KINDS = dict(zip(("float32", "bfloat16", "int8", "int4", "int5", "int6"), matmul_kinds.KINDS, strict=True))
PACKED_VERSION = 3
"""Goes up when the same weight is packed differently: copies of packed weights on disk are then made again."""

PACKED_FORMAT = f"numba {PACKED_VERSION}, in tiles" if matmul_kinds.TILES else f"numba {PACKED_VERSION}"
"""Names what `packing_jit` makes of a weight here."""

THREAD_FLOPS = 2_000_000
"""Multiplications that are worth waking a thread for, where weights come from caches."""

THREAD_BYTES = 1 << 19
"""Bytes of weights that are."""

THREAD_ROWS = 4
"""Rows of an embedding that are: their numbers lie apart in memory."""

GROUP_STEP = 16
"""Numbers of a group are a multiple of this: of what a vector has, and of a turn of most codes."""

BLOCK_INPUTS = 32
"""Inputs of a narrow weight are padded to a multiple of this: those of a block in AMX's tiles."""

_LAYOUTS: Mapping[str, tuple[Any, int, tuple[int, ...]]] = {
    "float32": (np.float32, 1, (PANEL,)),
    "bfloat16": (np.uint16, 2, (PANEL, 2)),
    "int8": (np.int8, 2, (PANEL, 2)),
    "int4": (np.uint16, 8, (PANEL, 2)),
    "int5": (np.uint16, 32, (5, PANEL, 2)),
    "int6": (np.uint16, 16, (3, PANEL, 2)),
}
"""Elements of packed arrays, inputs of a turn, and its axes; see `packing_jit`."""

_weights = Slabs()


@dataclass(frozen=True)
class PackedWeight:
    """A weight of ``outputs`` rows of ``inputs`` numbers, in the order that the kernels read.

    dtype:  ``float32``, ``bfloat16``, ``int8``, ``int6``, ``int5`` or ``int4``
    gated:  whether its outputs are the two halves of a gated MLP: they lie interleaved
    packed: `packing_jit` has the layout
    scales, minima: float16 ``[panels, groups, PANEL]``; ``minima`` may have no groups
    """

    dtype: str
    outputs: int
    inputs: int
    gated: bool
    packed: NDArray[Any]
    scales: NDArray[np.float16]
    minima: NDArray[np.float16]
    depth: int
    table: NDArray[np.int64]
    """What `matmul_jit.weight_at` reads: addresses of these arrays, among others."""

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes + self.minima.nbytes

    @property
    def results(self) -> int:
        """Numbers that a row becomes: half as many as there are outputs, where these are a gate's and others."""
        return self.outputs // 2 if self.gated else self.outputs

    @property
    def row_factors(self) -> int:
        """32-bit numbers that a row becomes to be multiplied; 0 where they are the row's own."""
        return 0 if self.dtype == "float32" else matmul_rows.row_factors(KINDS[self.dtype], self.depth)

    @property
    def row_sums(self) -> int:
        """Floats that go with them."""
        return matmul_rows.row_sums(KINDS[self.dtype], self.depth, self.scales.shape[1])

    @property
    def offset(self) -> int:
        """What is subtracted from the codes of integers."""
        return int(self.table[12])


def pack_float(weight: NDArray[np.float32], dtype: str, gated: bool = False) -> PackedWeight:
    """``weight [outputs, inputs]`` kept as ``float32`` or ``bfloat16`` (rounded to nearest even).

    gated: the first half of the outputs are a gated MLP's gate, the other its other factor
    """
    weight = np.ascontiguousarray(weight, dtype=np.float32)
    order, (outputs, inputs) = packed_order(len(weight), gated), weight.shape
    depth = inputs if dtype == "float32" else _padded(inputs, BLOCK_INPUTS)
    packed = _packed(dtype, weight, order, depth)
    return _packed_weight(KINDS[dtype], dtype, outputs, inputs, gated, packed, depth)


def pack_quantised(
    codes: NDArray[Any],
    scale: NDArray[np.float32],
    minimum: NDArray[np.float32] | None,
    bits: int,
    gated: bool = False,
) -> PackedWeight:
    """A weight ``scale * codes + minimum`` of ``codes [outputs, inputs]``, ``scale [outputs, inputs / group]``.

    bits: 4 to 6, of codes 0 to 15 in uint8 or -8 to 7 in int8, and so on; or 8, of codes that fit in an int8. Scales
    and minima are kept in float16.

    Raises:
        ValueError: a group of inputs is no multiple of `GROUP_STEP`.
    """
    order, (outputs, inputs) = packed_order(len(codes), gated), codes.shape
    group = inputs // scale.shape[1]
    if group % GROUP_STEP:
        raise ValueError(f"codes have a scale for each {group} inputs, which are no multiple of {GROUP_STEP}")
    bits = bits_in_memory(bits, group, on_gpu=False)
    dtype, depth = f"int{bits}", _padded(inputs, math.lcm(group, BLOCK_INPUTS))
    offset = 1 << bits - 1 if bits < 8 and codes.dtype == np.int8 else 0
    stored = codes.astype(np.int8, copy=False)
    if bits < 8:
        stored = np.zeros((outputs, depth), np.uint8)
        np.add(codes, offset, out=stored[:, :inputs], casting="unsafe")
    packed = _packed(dtype, stored, order, depth)
    return _packed_weight(
        KINDS[dtype], dtype, outputs, inputs, gated, packed, depth, _halves(scale, order, depth // group),
        None if minimum is None else _halves(minimum, order, depth // group), group, offset,
    )  # fmt: skip


def repacked(
    dtype: str,
    outputs: int,
    inputs: int,
    gated: bool,
    depth: int,
    offset: int,
    packed: NDArray[Any],
    scales: NDArray[np.float16] | None = None,
    minima: NDArray[np.float16] | None = None,
) -> PackedWeight:
    """The `PackedWeight` of these fields, over the same arrays; None stands for an empty one.

    Raises:
        ValueError: they do not go together; compiled code would read what is not there.
    """
    (element, step, turn), panels = _LAYOUTS[dtype], len(packed_order(outputs, gated)) // PANEL
    halves = [numbers for numbers in (scales, minima) if numbers is not None]
    groups = 0 if scales is None else scales.shape[1]
    fits = (
        packed.dtype == element
        and packed.shape == (panels, depth // step, *turn)
        and all(numbers.dtype == CPU_SCALES and numbers.shape == (panels, groups, PANEL) for numbers in halves)
        and inputs <= depth
        and bool(groups) == dtype.startswith("int")
        and not depth % max(groups, 1)
        and not any(place_of(array) % CACHE_LINE for array in (packed, *halves))
    )
    if not fits:
        arrays = ", ".join(f"{array.dtype} {array.shape}" for array in (packed, *halves))
        raise ValueError(f"a {dtype} weight of {outputs} x {inputs} is not packed as {arrays} with a depth of {depth}")
    group = depth // groups if groups else 0
    return _packed_weight(KINDS[dtype], dtype, outputs, inputs, gated, packed, depth, scales, minima, group, offset)


def _packed(dtype: str, numbers: NDArray[Any], order: NDArray[np.int64], depth: int) -> NDArray[Any]:
    """``numbers [rows, inputs]``, padded to ``depth``, as `packing_jit` has the layout of a weight in ``dtype``."""
    element, step, turn = _LAYOUTS[dtype]
    packed = _weights.empty((len(order) // PANEL, depth // step, *turn), element)
    numbers, counter = np.ascontiguousarray(numbers), np.zeros(1, np.int64)
    own = records.filled(
        records.PACKING, kind=KINDS[dtype], source=place_of(numbers), inputs=numbers.shape[1],
        order=place_of(order), panels=len(packed), turns=packed.shape[1], panel_bytes=packed[:1].nbytes,
        packed=place_of(packed), counter=place_of(counter),
    )  # fmt: skip
    threads = min(len(packed), usable_cores())
    pool_of_this_process().run(packing_jit.pack().address, threads, place_of(own))
    return packed


def _halves(numbers: NDArray[np.float32], order: NDArray[np.int64], groups: int) -> NDArray[np.float16]:
    packed = _packed("float32", numbers.astype(np.float32, copy=False), order, groups)
    halves = _weights.empty(packed.shape, CPU_SCALES)
    halves[...] = packed
    return halves


def _packed_weight(
    kind: int,
    dtype: str,
    outputs: int,
    inputs: int,
    gated: bool,
    packed: NDArray[Any],
    depth: int,
    scales: NDArray[np.float16] | None = None,
    minima: NDArray[np.float16] | None = None,
    group: int = 0,
    offset: int = 0,
) -> PackedWeight:
    nothing = np.zeros((len(packed), 0, PANEL), CPU_SCALES)
    scales, minima = nothing if scales is None else scales, nothing if minima is None else minima
    columns, turns = len(packed) * PANEL if gated else outputs, packed.shape[1]
    numbers = (columns, depth, turns, group * turns // depth if group else 1, int(minima.size > 0), offset)
    table = _table(kind, packed, scales, minima, numbers)
    return PackedWeight(dtype, outputs, inputs, gated, packed, scales, minima, depth, table)


def _table(
    kind: int,
    packed: NDArray[Any],
    scales: NDArray[np.float16],
    minima: NDArray[np.float16],
    numbers: Sequence[int],
) -> NDArray[np.int64]:
    arrays = [number for array in (scales, minima) for number in (place_of(array), array.size)]
    return np.array([kind, place_of(packed), packed.nbytes, *arrays, *numbers], np.int64)


def packed_order(outputs: int, gated: bool) -> NDArray[np.int64]:
    """Which row of a weight each packed column is; -1 for none."""
    if not gated:
        order = np.full(_padded(outputs, PANEL), -1, np.int64)
        order[:outputs] = np.arange(outputs)
        return order
    half, side = outputs // 2, PANEL // 2
    rows = np.full(_padded(half, side), -1, np.int64)
    rows[:half] = np.arange(half)
    gate = rows.reshape(-1, side)
    return np.concatenate([gate, np.where(gate >= 0, gate + half, -1)], axis=1).reshape(-1)


def pack_bias(bias: NDArray[np.float32], gated: bool = False) -> NDArray[np.float32]:
    """``bias [outputs]`` in the order of a weight's packed outputs."""
    order = packed_order(len(bias), gated)
    return np.where(order >= 0, bias[np.maximum(order, 0)], 0).astype(np.float32)


def is_in_tiles(weight: PackedWeight) -> bool:
    """Whether AMX's tiles multiply it as it lies: what computes its rows may leave them in tiles, too."""
    return matmul_kinds.TILES and weight.dtype == "bfloat16"


def make_ready(dtype: str) -> None:
    """Compile the product with weights kept in ``dtype``, or load it where this machine has compiled it before."""
    matmul_jit.product_of(KINDS[dtype])


def matmul(
    x: NDArray[np.float32],
    weight: PackedWeight,
    threads: int,
    bias: NDArray[np.float32] | None = None,
    activation: Activation | None = None,
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """``act(x [rows, inputs] @ weight.T + bias)`` -> ``[rows, outputs]``; ``act(gate) * up`` of a gated weight.

    activation: a gated one of a gated weight; of others one that is not, or None. bias: as `pack_bias` made it.

    Sums are float32; what is multiplied with a weight narrower than float32 is rounded to bfloat16; with a weight of
    integers, where `matmul_kinds.INTEGERS` says so, to 1/32767 of the largest of 32 or 16. A row's result does not
    depend on the rows beside it.

    Raises:
        ValueError: arrays, or the activation, do not fit the weight.
    """
    x = np.ascontiguousarray(x)
    rows, outputs = len(x), weight.results
    if x.shape[1] != weight.inputs or x.dtype != np.float32:
        raise ValueError(f"x is {x.dtype} {x.shape}, the weight takes float32 rows of {weight.inputs}")
    if weight.gated != is_gated(activation):
        raise ValueError(f"the activation {activation!r} is not of a weight that was packed with gated={weight.gated}")
    if out is None:
        out = np.empty((rows, outputs), np.float32)
    elif out.shape != (rows, outputs) or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ValueError(f"out is {out.dtype} {out.shape}, it must be contiguous float32 {(rows, outputs)}")
    workers, tile_floats = _workers(weight, rows, threads), matmul_jit.TILE + weight.depth
    x_at, counters = place_of(x), np.zeros(matmul_jit.PRODUCT_COUNTERS + workers, np.int64)
    factors, sums, tiles = _scratch.take(rows * weight.row_factors, rows * weight.row_sums, workers * tile_floats)
    own = records.filled(
        records.PRODUCT, code=matmul_jit.product_of(KINDS[weight.dtype]).address, x=x_at, rows=rows,
        inputs=weight.inputs, weight=place_of(weight.table), bias=0 if bias is None else place_of(bias),
        bias_length=0 if bias is None else bias.size, epilogue=EPILOGUES[activation], out=place_of(out),
        columns=outputs, factors=factors if weight.row_factors else x_at, sums=sums, tiles=tiles,
        tile_floats=tile_floats, counters=place_of(counters), threads=workers,
    )  # fmt: skip
    pool_of_this_process().run(matmul_jit.multiply().address, workers, place_of(own))
    return out


def unactivated_linear(
    x: NDArray[np.float32], weight: PackedWeight, threads: int, bias: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """`matmul` without its activation: ``gate | up`` of a gated weight, ``[rows, outputs]``."""
    if not weight.gated:
        return matmul(x, weight, threads, bias)
    return matmul(x, as_packed(weight), threads, bias)[:, places_of(weight.outputs)]


def as_packed(weight: PackedWeight) -> PackedWeight:
    """A gated weight as one that is not, whose outputs are its packed columns: the same memory."""
    return replace(weight, gated=False, outputs=len(packed_order(weight.outputs, gated=True)))


@lru_cache(maxsize=64)
def places_of(outputs: int) -> NDArray[np.int64]:
    """Which packed column of a gated weight each output is."""
    order = packed_order(outputs, gated=True)
    places = np.empty(outputs, np.int64)
    places[order[order >= 0]] = (order >= 0).nonzero()[0]
    return places


_scratch = ThreadScratch()


def _workers(weight: PackedWeight, rows: int, threads: int) -> int:
    """Threads that are worth waking: for arithmetic, or for weights to be read."""
    of_flops = rows * weight.outputs * weight.depth // THREAD_FLOPS
    return max(1, min(threads, max(of_flops, weight.nbytes // THREAD_BYTES)))


def panels_of(weight: PackedWeight, start: int, stop: int) -> PackedWeight | None:
    """Outputs ``start`` to ``stop`` of a weight, in the same memory; None where they do not begin a panel."""
    if start % PANEL or weight.gated:
        return None
    panels = slice(start // PANEL, _padded(stop, PANEL) // PANEL)
    part, scales, minima = weight.packed[panels], weight.scales[panels], weight.minima[panels]
    numbers = [stop - start, *weight.table[8:].tolist()]
    table = _table(int(weight.table[0]), part, scales, minima, numbers)
    return replace(weight, outputs=stop - start, packed=part, scales=scales, minima=minima, table=table)


def take_rows(
    weight: PackedWeight, ids: NDArray[np.int32], threads: int = 1, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Rows ``ids [n]`` of a packed weight, as float32 ``[n, inputs]``. Each of ``ids`` is less than its outputs.

    out: where they go; no other array is allocated then
    """
    if out is None:
        out = np.empty((len(ids), weight.inputs), np.float32)
    elif out.shape != (len(ids), weight.inputs):
        raise ValueError(f"out is {out.shape}, it must be {(len(ids), weight.inputs)}")
    groups = weight.scales.shape[1]
    own = _taking.fill(
        kind=KINDS[weight.dtype], packed=place_of(weight.packed), panels=weight.packed.shape[0],
        turns=weight.packed.shape[1], ids=records.address_of(ids, np.int32), count=len(ids), inputs=weight.inputs,
        scales=place_of(weight.scales), minima=place_of(weight.minima), groups=groups,
        group_inputs=weight.depth // max(1, groups), offset=weight.offset, has_minima=weight.minima.size > 0,
        out=records.address_of(out, np.float32),
    )  # fmt: skip
    threads = max(1, min(threads, len(ids) // THREAD_ROWS))
    pool_of_this_process().run(packing_jit.take().address, threads, own)
    return out


class _Taking(threading.local):
    """One thread's `records.TAKING`, and its counter."""

    def __init__(self) -> None:
        self._record, self._counter = records.Record(records.TAKING), np.zeros(1, np.int64)

    def fill(self, **fields: Any) -> int:
        """With these fields, and a counter that is 0; where it lies."""
        self._counter[0] = 0
        return self._record.fill(counter=place_of(self._counter), **fields)


_taking = _Taking()


def _padded(number: int, step: int) -> int:
    return -(-number // step) * step
