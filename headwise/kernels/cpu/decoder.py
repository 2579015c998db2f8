"""Many layers of a decoder in one compiled call: the Python half (`decoder_jit` is compiled).

For decoders of attention and a gated MLP on one rank. What differs from model to model are numbers and which norms
there are: the compiled code is the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cpu import decoder_jit, matmul_jit
from headwise.kernels.cpu.attention import STORED, strides_of, work_address
from headwise.kernels.cpu.attention_jit import FIRST_ITEM, LOG2E
from headwise.kernels.cpu.decoder_cache_jit import write_and_attend
from headwise.kernels.cpu.matmul import EPILOGUES, KINDS, PackedWeight
from headwise.kernels.cpu.pool import pool_of_this_process
from headwise.kernels.fused import DecoderLayer, DecoderShape
from headwise.kernels.gqa import kv_dtype_of

Floats = NDArray[np.float32]
LAYER_BYTES = 1 << 17
"""Bytes of a layer's weights that are worth waking a thread for."""

LAYER_FLOPS = 1 << 20
"""Bytes of a layer's weights times rows that are."""


class CpuDecoder:
    """`FusedDecoder` on at most ``threads`` threads."""

    def __init__(self, layers: Sequence[DecoderLayer], shape: DecoderShape, threads: int) -> None:
        self._layers = layers  # keeps alive what the table points to
        self._table = np.zeros((len(layers), decoder_jit.LAYER_FIELDS), np.int64)
        for row, layer in zip(self._table, layers, strict=True):
            _fill(row, layer)
        weights = [weight for layer in layers for weight in _weights(layer)]
        self._dtypes = frozenset(weight.dtype for weight in weights)
        self._shape, self._threads = shape, threads
        self._hidden, self._intermediate = layers[0].out.outputs, max(layer.gate_up.outputs // 2 for layer in layers)
        self._widest = max(weight.depth for weight in weights)
        self._groups = max(weight.minima.shape[1] for weight in weights)
        self._layer_bytes = sum(weight.nbytes for weight in weights) // len(layers)
        factor = shape.scale * LOG2E * (2 / shape.softcap if shape.softcap else 1)
        self._floats = np.array([shape.eps, factor, shape.softcap], np.float32)
        self._heads: Sequence[HeadTable] = ()
        self._policies: list[tuple[Any, Any]] = []
        self._rooms = _Rooms.empty(0, self)
        self._cache: _Cache | None = None

    @property
    def all_heads(self) -> int:
        return self._shape.q_heads + 2 * self._shape.kv_heads

    def make_ready(self, layout: BlockLayout) -> None:
        """See `FusedDecoder.make_ready`."""
        self._cache_of(layout)
        for dtype in self._dtypes:
            matmul_jit.product_of(KINDS[dtype])

    def run(
        self,
        x: Floats,
        layers: range,
        rotations: Floats,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: Sequence[HeadTable],
    ) -> None:
        """See `FusedDecoder.run`."""
        for array, dtype in (
            (x, np.float32), (rotations, np.float32), (arena, np.uint8), (batch.cu_seqlens_q, np.int32),
            (batch.seq_lens, np.int32), (batch.block_tables, np.int32),
        ):  # fmt: skip
            _check(array, dtype)
        self._set_heads(heads)
        rows, workers, shape = len(x), self._workers(len(x)), self._shape
        rooms, plans = self._rooms_for(rows), self._plan(batch)
        cache, products = self._cache_of(layout), self._products
        each = decoder_jit.ATTENTION_AT + FIRST_ITEM + plans.most_items
        counters = np.zeros((len(layers) + 1) * each, np.int64)
        partials = np.empty(plans.most_partial_rows * (2 + shape.head_dim), np.float32)
        tables = batch.block_tables
        step = np.array(
            [
                _at(x), rows, self._hidden, _at(self._table) + layers.start * self._table.strides[0], len(layers),
                shape.q_heads, shape.kv_heads, shape.head_dim, EPILOGUES[shape.activation], self._widest,
                self._intermediate, _at(rooms.qkv), _at(rooms.heads), _at(rooms.out), _at(rooms.gated),
                _at(rooms.factors), rooms.factors.size, _at(rooms.sums), rooms.sums.size, _at(rooms.tiles),
                _at(rooms.values), _at(counters), each, _at(products), cache.write, cache.attend, _at(arena),
                arena.nbytes, _at(cache.strides), _at(batch.cu_seqlens_q), _at(batch.seq_lens), len(batch.seq_lens),
                _at(tables), tables.shape[1], batch.groups, _at(plans.table), _at(partials), plans.most_partial_rows,
                _at(rotations), _at(self._floats), cache.work,
            ],
            np.int64,
        )  # fmt: skip
        pool_of_this_process().run(decoder_jit.run_layers, workers, _at(step))

    @cached_property
    def _products(self) -> NDArray[np.int64]:
        """Addresses of the compiled products of all kinds; 0 for those that no weight is of."""
        own = {KINDS[dtype] for dtype in self._dtypes}
        return np.array(
            [matmul_jit.product_of(kind).address if kind in own else 0 for kind in matmul_jit.KINDS], np.int64
        )

    def _cache_of(self, layout: BlockLayout) -> _Cache:
        if self._cache is None or self._cache.layout is not layout:
            kv_dtype = kv_dtype_of(layout)
            write, attend = write_and_attend(kv_dtype)
            work = work_address(STORED[kv_dtype])
            self._cache = _Cache(layout, strides_of(layout), write.address, attend.address, work)
        return self._cache

    def _workers(self, rows: int) -> int:
        """Threads that are worth waking: for weights to be read, or for arithmetic."""
        of_bytes, of_flops = self._layer_bytes // LAYER_BYTES, rows * self._layer_bytes // LAYER_FLOPS
        return max(1, min(self._threads, max(of_bytes, of_flops)))

    def _set_heads(self, heads: Sequence[HeadTable]) -> None:
        """Take where heads lie into the table, and find which layers' attention is planned alike."""
        if heads is self._heads:
            return
        self._heads = heads
        plans: dict[tuple[bytes, bytes], tuple[int, Any, Any]] = {}
        for row, head in zip(self._table, heads, strict=True):
            for at, array in zip(range(decoder_jit.HEADS_AT, decoder_jit.ROPE_AT, 2), _arrays(head), strict=True):
                _check(array, np.int32)
                row[at : at + 2] = _at(array), array.size
            policy = (head.window.tobytes(), head.sink.tobytes())
            number = plans.setdefault(policy, (len(plans), head.window, head.sink))[0]
            row[decoder_jit.PLAN_AT] = number
        self._policies = [(window, sink) for _, window, sink in plans.values()]

    def _plan(self, batch: AttentionBatch) -> _Plans:
        share, dim = self._shape.q_heads // self._shape.kv_heads, self._shape.head_dim
        plans = [
            decoder_jit.plan_attention(batch.cu_seqlens_q, batch.seq_lens, window, sink, share, dim)
            for window, sink in self._policies
        ]
        table = np.array(
            [(_at(items), len(items), _at(parts), len(parts), *rest) for items, parts, *rest in plans], np.int64
        )
        return _Plans(plans, table)

    def _rooms_for(self, rows: int) -> _Rooms:
        """Room for ``rows`` rows; kept for the next steps, which mostly have no more."""
        if len(self._rooms.qkv) < rows:
            self._rooms = _Rooms.empty(rows, self)
        return self._rooms


@dataclass(frozen=True)
class _Cache:
    """What compiled code needs to know of a cache, and addresses of what is compiled for its dtype."""

    layout: BlockLayout
    strides: NDArray[np.int64]
    write: int
    attend: int
    work: int


@dataclass(frozen=True)
class _Plans:
    """Plans of attention, one for all layers whose heads have the same windows and sinks.

    table: `decoder_jit.PLAN_FIELDS` of each
    """

    plans: Sequence[Any]
    table: NDArray[np.int64]

    @property
    def most_items(self) -> int:
        return int(self.table[:, decoder_jit.ITEM_COUNT].max())

    @property
    def most_partial_rows(self) -> int:
        return int(self.table[:, decoder_jit.PARTIAL_ROWS].max())


@dataclass(frozen=True)
class _Rooms:
    """What the phases of a layer pass on, for so many rows; and a scratch for each thread."""

    qkv: Floats
    heads: Floats
    out: Floats
    gated: Floats
    factors: NDArray[np.uint32]
    sums: Floats
    tiles: Floats
    values: Floats

    @staticmethod
    def empty(rows: int, decoder: CpuDecoder) -> _Rooms:
        shape, threads = decoder._shape, decoder._threads

        def floats(*lengths: int) -> Floats:
            return np.empty(lengths, np.float32)

        return _Rooms(
            qkv=floats(rows, decoder.all_heads * shape.head_dim),
            heads=floats(rows, shape.q_heads * shape.head_dim),
            out=floats(rows, decoder._hidden),
            gated=floats(rows, decoder._intermediate),
            factors=np.empty(rows * decoder._widest, np.uint32),
            sums=floats(rows * decoder._groups),
            tiles=floats(threads * matmul_jit.TILE),
            values=floats(threads * decoder._widest),
        )


def _check(array: NDArray[Any], dtype: Any) -> None:
    """Raise TypeError unless compiled code, which is given an address alone, finds there what it expects."""
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise TypeError(f"need a contiguous array of {np.dtype(dtype)}, got {array.dtype} with strides {array.strides}")


def _at(array: NDArray[Any]) -> int:
    """An array's address."""
    return array.ctypes.data


def _weights(layer: DecoderLayer) -> tuple[PackedWeight, ...]:
    return layer.qkv, layer.out, layer.gate_up, layer.down


def _fill(row: NDArray[np.int64], layer: DecoderLayer) -> None:
    at = decoder_jit.WEIGHTS_AT
    for weight in _weights(layer):
        row[at : at + len(weight.table)] = weight.table
        at += len(weight.table)
    biases = (layer.qkv_bias, layer.out_bias, layer.gate_up_bias, layer.down_bias)
    for array in (*biases, *_arrays(layer.norms)):
        row[at : at + 2] = (0, 0) if array is None else (_at(array), array.size)
        at += 2
    row[decoder_jit.ROPE_AT] = layer.rotation


def _arrays(record: Any) -> list[Any]:
    """The fields of a dataclass of arrays, in order."""
    return [getattr(record, field.name) for field in fields(record)]
