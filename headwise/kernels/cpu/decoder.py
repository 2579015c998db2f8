"""Many layers of a decoder in one compiled call: the Python half (`decoder_jit` is compiled).

For decoders of attention and a gated MLP on one rank. What differs from model to model are numbers and which norms
there are: the compiled code is the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cpu import decoder_jit, matmul_jit
from headwise.kernels.cpu.attention import STORED, strides_of
from headwise.kernels.cpu.attention_jit import LOG2E
from headwise.kernels.cpu.matmul import EPILOGUES, KINDS, PackedWeight
from headwise.kernels.fused import DecoderLayer, DecoderShape
from headwise.kernels.gqa import kv_dtype_of

Floats = NDArray[np.float32]
_numba: Any = numba

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
        self._kinds = frozenset(KINDS[weight.dtype] for weight in weights)
        self._markers = tuple(True if kind in self._kinds else None for kind in matmul_jit.KINDS)
        self._threads = threads
        self._q_heads, self._both = shape.q_heads, shape.q_heads + 2 * shape.kv_heads
        self._dim, self._hidden = shape.head_dim, layers[0].out.outputs
        self._gated = max(layer.gate_up.outputs // 2 for layer in layers)
        self._widest = max(weight.depth for weight in weights)
        self._layer_bytes = sum(weight.nbytes for weight in weights) // len(layers)
        self._groups = max(weight.minima.shape[1] for weight in weights)
        factor = 2 * shape.scale * LOG2E / shape.softcap if shape.softcap else shape.scale * LOG2E
        self._shapes = (
            shape.q_heads, shape.kv_heads, shape.head_dim, EPILOGUES[shape.activation], factor, shape.softcap,
            shape.eps, self._widest,
        )  # fmt: skip
        self._heads: Sequence[HeadTable] = ()
        self._policies: list[tuple[Any, Any]] = []
        self._rooms: tuple[Any, ...] = ()

    def make_ready(self, layout: BlockLayout) -> None:
        """See `FusedDecoder.make_ready`."""
        _compile(self._kinds, np.dtype(STORED[kv_dtype_of(layout)]))

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
        self._set_heads(heads)
        self.make_ready(layout)
        items, parts, table, most = self._plans(batch)
        stored = STORED[kv_dtype_of(layout)]
        partials = tuple(np.empty(most[2] * size, np.float32) for size in (1, 1, self._dim))
        decoder_jit.run_layers(
            *self._markers, x, self._table[layers.start : layers.stop], rotations, self._shapes,
            self._rooms_for(len(x)), (arena.view(stored), arena.view(np.float32), strides_of(layout)),
            (batch.cu_seqlens_q, batch.seq_lens, batch.block_tables, batch.groups), (items, parts, table, most),
            partials, self._workers(len(x)),
        )  # fmt: skip

    def _workers(self, rows: int) -> int:
        """Threads that are worth waking: for weights to be read, or for arithmetic."""
        of_bytes, of_flops = self._layer_bytes // LAYER_BYTES, rows * self._layer_bytes // LAYER_FLOPS
        return max(1, min(self._threads, max(of_bytes, of_flops)))

    def _set_heads(self, heads: Sequence[HeadTable]) -> None:
        """Take where heads lie into the table, and find which layers' attention is planned alike."""
        if heads is self._heads:
            return
        self._heads, plans = heads, {}
        for row, head in zip(self._table, heads, strict=True):
            for at, array in zip(range(decoder_jit.HEADS_AT, decoder_jit.ROPE_AT, 2), _arrays(head), strict=True):
                row[at : at + 2] = array.ctypes.data, array.size
            policy = (head.window.tobytes(), head.sink.tobytes())
            number = plans.setdefault(policy, (len(plans), head.window, head.sink))[0]
            row[decoder_jit.PLAN_AT] = number
        self._policies = [(window, sink) for _, window, sink in plans.values()]

    def _plans(self, batch: AttentionBatch) -> tuple[Any, Any, Any, Any]:
        share = self._q_heads // len(self._policies[0][0])
        plans = [
            decoder_jit.plan_attention(batch.cu_seqlens_q, batch.seq_lens, window, sink, share, self._dim)
            for window, sink in self._policies
        ]
        table, item, part = np.empty((len(plans), decoder_jit.PLAN_FIELDS), np.int64), 0, 0
        for row, plan in zip(table, plans, strict=True):
            items, parts, *rest = plan
            row[:] = (item, item + len(items), part, part + len(parts), *rest)
            item, part = item + len(items), part + len(parts)
        if len(plans) > 1:
            items, parts = (np.concatenate([plan[field] for plan in plans]) for field in (0, 1))
        return items, parts, table, table[:, 4:].max(axis=0)

    def _rooms_for(self, rows: int) -> tuple[Any, ...]:
        """Room for ``rows`` rows; kept for the next steps, which mostly have no more."""
        if not self._rooms or len(self._rooms[0]) < rows:
            self._rooms = (
                np.empty((rows, self._both, self._dim), np.float32),
                np.empty((rows, self._q_heads, self._dim), np.float32),
                np.empty((rows, self._hidden), np.float32),
                np.empty((rows, self._gated), np.float32),
                np.empty(rows * self._widest, np.uint32),
                np.empty(rows * self._groups, np.float32),
            )
        rooms = self._rooms
        return (*(room[:rows] for room in rooms[:4]), *rooms[4:])


@cache
def _compile(kinds: frozenset[int], stored: np.dtype[Any]) -> None:
    decoder_jit.run_layers.compile(decoder_jit.run_signature(kinds, _numba.from_dtype(stored)))


def _weights(layer: DecoderLayer) -> tuple[PackedWeight, ...]:
    return layer.qkv, layer.out, layer.gate_up, layer.down


def _fill(row: NDArray[np.int64], layer: DecoderLayer) -> None:
    at = decoder_jit.WEIGHTS_AT
    for weight in _weights(layer):
        row[at : at + len(weight.table)] = weight.table
        at += len(weight.table)
    biases = (layer.qkv_bias, layer.out_bias, layer.gate_up_bias, layer.down_bias)
    for array in (*biases, *_arrays(layer.norms)):
        row[at : at + 2] = (0, 0) if array is None else (array.ctypes.data, array.size)
        at += 2
    row[decoder_jit.ROPE_AT] = layer.rotation


def _arrays(record: Any) -> list[Any]:
    """The fields of a dataclass of arrays, in order."""
    return [getattr(record, field.name) for field in fields(record)]
