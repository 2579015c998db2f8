"""Many layers of a decoder in one compiled call: the Python half (`decoder_jit` is compiled).

For decoders of attention and a gated MLP, or a mixture of experts, on one rank. What differs from model to model are
numbers and which norms there are: the compiled code is the same for all.
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
from headwise.kernels.cpu import experts_jit, matmul_jit, matmul_kinds, records
from headwise.kernels.cpu.attention_jit import FIRST_ITEM
from headwise.kernels.cpu.attention_pass import CacheKernels, PlanTable, score_factor
from headwise.kernels.cpu.attention_plan import Planner
from headwise.kernels.cpu.decoder_jit import phase_counters, run_layers
from headwise.kernels.cpu.experts import PackedExperts, room_of
from headwise.kernels.cpu.matmul import EPILOGUES, KINDS, PackedWeight, matmul, take_rows
from headwise.kernels.cpu.memory import Scratch
from headwise.kernels.cpu.pool import pool_of_this_process
from headwise.kernels.cpu.records import Record, Room, address_of, place_of
from headwise.kernels.fused import DecoderLayer, DecoderShape, GatedLayer, MixedLayer

Floats = NDArray[np.float32]
LAYER_BYTES = 1 << 17
"""Bytes of a layer's weights that are worth waking a thread for."""

LAYER_FLOPS = 1 << 20
"""Bytes of a layer's weights times rows that are."""


class CpuDecoder:
    """`FusedDecoder` on at most ``threads`` threads."""

    def __init__(self, layers: Sequence[DecoderLayer], shape: DecoderShape, threads: int) -> None:
        self._layers = layers  # keeps alive what the table points to
        self._table = np.zeros(len(layers), records.LAYER)
        for record, layer in zip(self._table, layers, strict=True):
            _fill(record, layer)
        self._table_at: int = self._table.ctypes.data
        self._mixtures: list[PackedExperts] = [
            layer.mlp.experts for layer in layers if isinstance(layer.mlp, MixedLayer)
        ]
        own = [weight for layer in layers for weight in _weights(layer)]
        self._dtypes = frozenset(weight.dtype for weight in own)
        weights = [*own, *(weight for mixture in self._mixtures for weight in mixture.weights)]
        self._shape, self._threads = shape, threads
        gated = [layer.mlp.gate_up.outputs // 2 for layer in layers if isinstance(layer.mlp, GatedLayer)]
        self._hidden, self._intermediate = layers[0].out.outputs, max(gated, default=0)
        self._widest = max(weight.depth for weight in weights)
        self._row_sums = max(weight.row_sums for weight in weights)
        of_experts = sum(mixture.token_bytes for mixture in self._mixtures)
        self._layer_bytes = (sum(weight.nbytes for weight in own) + of_experts) // len(layers)
        self._heads: Sequence[HeadTable] = ()
        self._planners: list[Planner] = []
        self._rooms = _Rooms.empty(0, self)
        self._plans = PlanTable.room(0)
        self._counters, self._angles = Room(np.int64), Room(np.float32)
        self._scratch, self._partials, self._scores = Room(np.float32), Room(np.float32), Room(np.float32)
        self._pass, self._step, self._mixing = map(Record, (records.PASS, records.STEP, experts_jit.MIXING))
        self._mixing_room, self._mixing_counters, self._mixed = Scratch(), 0, (0, 0)
        self._kernels: CacheKernels | None = None

    @property
    def all_heads(self) -> int:
        return self._shape.q_heads + 2 * self._shape.kv_heads

    def make_ready(self, layout: BlockLayout) -> None:
        """See `FusedDecoder.make_ready`."""
        self._kernels_of(layout)
        run_layers()
        for dtype in self._dtypes:
            matmul_jit.product_of(KINDS[dtype])

    def embedded(self, table: PackedWeight, ids: NDArray[np.int32], scale: float = 1.0) -> Floats:
        """See `FusedDecoder.embedded`."""
        x = take_rows(table, ids, self._threads, self._rooms_for(len(ids)).stream[: len(ids)])
        if scale != 1.0:
            x *= np.float32(scale)
        return x

    def scores(self, x: Floats, head: PackedWeight) -> Floats:
        """See `FusedDecoder.scores`."""
        rows = len(x)
        out = self._scores.of(rows * head.outputs)[: rows * head.outputs].reshape(rows, head.outputs)
        return matmul(x, head, self._threads, out=out)

    def rotations(
        self, positions: NDArray[np.int32], inverses: Sequence[Floats], scales: Sequence[Floats | None]
    ) -> Floats:
        """See `FusedDecoder.rotations`."""
        kinds, rows, half = len(inverses), len(positions), self._shape.head_dim // 2
        room = self._angles.of(rows + kinds * 2 * rows * half)
        places, found = room[:rows], room[rows : rows + kinds * 2 * rows * half].reshape(kinds, 2, rows, half)
        places[:] = positions
        for (cosines, sines), inverse, scale in zip(found, inverses, scales, strict=True):
            np.multiply(places[:, None], inverse, out=cosines)
            np.sin(cosines, out=sines)
            np.cos(cosines, out=cosines)
            if scale is not None:
                cosines *= scale
                sines *= scale
        return found

    def run(
        self,
        x: Floats,
        layers: range,
        rotations: Floats,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: Sequence[HeadTable],
        final_norm: Floats | None,
    ) -> None:
        """See `FusedDecoder.run`. A step that is no larger than one before it allocates no array, unless it
        takes more than `records.KEPT_BYTES`.
        """
        self._set_heads(heads)
        rows, workers, shape = len(x), self._workers(len(x)), self._shape
        rooms, kernels = self._rooms_for(rows), self._kernels_of(layout)
        plans = PlanTable.of([planner.plan(batch) for planner in self._planners], self._plans)
        mixing, mixing_counters = self._mixing_for(rows, workers)
        own_counters = phase_counters(workers) + FIRST_ITEM + plans.most_items
        each = own_counters + mixing_counters
        counters = self._counters.of((len(layers) + 1) * each)
        counters[: (len(layers) + 1) * each] = 0
        qkv, row, dim = place_of(rooms.qkv), self.all_heads * shape.head_dim, shape.head_dim
        half, cosines = rotations.shape[-1], address_of(rotations, np.float32)
        scratch_floats = plans.scratch_floats(shape.q_heads // shape.kv_heads, kernels)
        scratch = self._scratch.of(workers * scratch_floats)
        partials = self._partials.of(plans.partial_floats(dim))
        attention = self._pass.fill(
            **kernels.pass_fields(arena, batch), rows=rows, q_heads=shape.q_heads, kv_heads=shape.kv_heads, dim=dim,
            query=qkv, query_row=row, query_head=dim,
            key=qkv + 4 * shape.q_heads * dim, key_row=row, key_head=dim,
            value=qkv + 4 * (shape.q_heads + shape.kv_heads) * dim, value_row=row, value_head=dim,
            out=place_of(rooms.heads), cosines=cosines, sines=cosines + 4 * rows * half, half=half,
            plans=place_of(plans.table), partials=place_of(partials), partial_rows=plans.most_partial_rows,
            scratch=place_of(scratch), scratch_floats=scratch_floats,
            factor=score_factor(shape.scale, shape.softcap), softcap=shape.softcap,
        )  # fmt: skip
        step = self._step.fill(
            products=self._products, x=address_of(x, np.float32), rows=rows, hidden=self._hidden,
            layers=self._table_at + layers.start * records.LAYER.itemsize, layer_count=len(layers),
            epilogue=EPILOGUES[shape.activation], widest=self._widest, intermediate=self._intermediate,
            added=place_of(rooms.added), gated=place_of(rooms.gated), factors=place_of(rooms.factors),
            factors_length=rooms.factors.size, sums=place_of(rooms.sums), sums_length=rooms.sums.size,
            tiles=place_of(rooms.tiles), values=place_of(rooms.values), counters=place_of(counters),
            counters_per_layer=each, threads=workers, attention=attention, write=kernels.write.address,
            attend=kernels.attend.address, final_norm=_span(final_norm)[0], eps=shape.eps,
            mix=self._mix, mixing=mixing, mixing_counters=own_counters,
        )  # fmt: skip
        pool_of_this_process().run(run_layers().address, workers, step)

    @cached_property
    def _products(self) -> NDArray[np.int64]:
        """Addresses of the compiled products of all kinds; 0 for those that no weight is of."""
        own = {KINDS[dtype] for dtype in self._dtypes}
        return np.array(
            [matmul_jit.product_of(kind).address if kind in own else 0 for kind in matmul_kinds.KINDS], np.int64
        )

    @cached_property
    def _mix(self) -> int:
        """The address of what mixes experts; 0 where there are none, who need not have it compiled."""
        return experts_jit.mix().address if self._mixtures else 0

    def _mixing_for(self, rows: int, workers: int) -> tuple[int, int]:
        """Where the `experts_jit.MIXING` of a step lies, and how many counters its layers have for it.

        They are those of the step before, if that was of the same size and in the same rooms.
        """
        if self._mixtures and self._mixed != (rows, workers):
            rooms = self._rooms_for(rows)
            self._mixing.fill(
                **room_of(self._mixtures, rows, workers, self._mixing_room), x=place_of(rooms.normed),
                logits=place_of(rooms.logits), out=place_of(rooms.added),
            )  # fmt: skip
            self._mixing_counters = max(mixture.counters(rows, workers) for mixture in self._mixtures)
            self._mixed = rows, workers
        return self._mixing.place, self._mixing_counters

    def _kernels_of(self, layout: BlockLayout) -> CacheKernels:
        if self._kernels is None or self._kernels.layout is not layout:
            self._kernels = CacheKernels.of(layout)
        return self._kernels

    def _workers(self, rows: int) -> int:
        """Threads that are worth waking: for weights to be read, or for arithmetic."""
        of_bytes, of_flops = self._layer_bytes // LAYER_BYTES, rows * self._layer_bytes // LAYER_FLOPS
        return max(1, min(self._threads, max(of_bytes, of_flops)))

    def _set_heads(self, heads: Sequence[HeadTable]) -> None:
        """Take where heads lie into the table, and find which layers' attention is planned alike."""
        if heads is self._heads:
            return
        self._heads = heads
        share, dim = self._shape.q_heads // self._shape.kv_heads, self._shape.head_dim
        plans: dict[tuple[bytes, bytes], tuple[int, Planner]] = {}
        for record, head in zip(self._table, heads, strict=True):
            record["heads"] = [
                (address_of(array, np.int32), array.size) for array in (head.group, head.slot, head.window, head.sink)
            ]
            policy = (head.window.tobytes(), head.sink.tobytes())
            if policy not in plans:
                plans[policy] = len(plans), Planner(head.window, head.sink, share, dim)
            record["plan"] = plans[policy][0]
        self._planners = [planner for _, planner in plans.values()]
        self._plans = PlanTable.room(len(plans))

    def _rooms_for(self, rows: int) -> _Rooms:
        """Room for ``rows`` rows; kept for the next steps, which mostly have no more."""
        if len(self._rooms.qkv) < rows:
            self._rooms, self._mixed = _Rooms.empty(rows, self), (0, 0)
        return self._rooms


@dataclass(frozen=True)
class _Rooms:
    """What the phases of a layer pass on, for so many rows; and a scratch for each thread. See `records.STEP`.

    stream:         the residual stream's
    normed, logits: what routers multiply, and what they make of it
    """

    stream: Floats
    normed: Floats
    logits: Floats
    qkv: Floats
    heads: Floats
    added: Floats
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
            stream=floats(rows, decoder._hidden),
            normed=floats(rows if decoder._mixtures else 0, decoder._hidden),
            logits=floats(rows, max((mixture.experts for mixture in decoder._mixtures), default=0)),
            qkv=floats(rows, decoder.all_heads * shape.head_dim),
            heads=floats(rows, shape.q_heads * shape.head_dim),
            added=floats(rows, decoder._hidden),
            gated=floats(rows, decoder._intermediate),
            factors=np.empty(rows * decoder._widest, np.uint32),
            sums=floats(rows * decoder._row_sums),
            tiles=floats(threads * matmul_jit.TILE),
            values=floats(threads * decoder._widest),
        )


def _weights(layer: DecoderLayer) -> tuple[PackedWeight, ...]:
    """Those that `_run_layers` multiplies with, in the order of `records.WEIGHTS`."""
    mlp = layer.mlp
    return layer.qkv, layer.out, *((mlp.router,) if isinstance(mlp, MixedLayer) else (mlp.gate_up, mlp.down))


def _fill(record: Any, layer: DecoderLayer) -> None:
    mlp, weights = layer.mlp, _weights(layer)
    of_mlp = (mlp.router_bias,) if isinstance(mlp, MixedLayer) else (mlp.gate_up_bias, mlp.down_bias)
    biases = (layer.qkv_bias, layer.out_bias, *of_mlp)
    record["weights"][: len(weights)] = [place_of(weight.table) for weight in weights]
    record["biases"][: len(biases)] = [_span(array) for array in biases]
    record["norms"] = [_span(array) for array in _arrays(layer.norms)]
    record["sink_logits"] = _span(layer.sink_logits)
    record["rotation"] = layer.rotation
    if isinstance(mlp, MixedLayer):
        record["mixture"] = place_of(mlp.experts.record)


def _span(array: Any) -> tuple[int, int]:
    return (0, 0) if array is None else (address_of(array, np.float32), array.size)


def _arrays(record: Any) -> list[Any]:
    """The fields of a dataclass of arrays, in order."""
    return [getattr(record, field.name) for field in fields(record)]
