"""Many layers of a decoder in one compiled call: the Python half (`decoder_jit` is compiled).

For decoders of attention or recurrent states, and MLPs or mixtures of experts. What differs from model to model
are phases and their numbers (`decoder_phases`): the compiled code is the same for all. Ranks take a layer in two calls,
of the same phases, and sum over all of them what each call leaves to be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cpu import decoder_records, experts_jit, matmul_jit, matmul_kinds, records
from headwise.kernels.cpu.attention_jit import FIRST_ITEM
from headwise.kernels.cpu.attention_pass import PlanTable
from headwise.kernels.cpu.attention_plan import Planner
from headwise.kernels.cpu.decoder_adapted import AdaptedLayers, fields_of
from headwise.kernels.cpu.decoder_jit import phase_counters, run_phases
from headwise.kernels.cpu.decoder_kinds import Angles, Kind, Passes, StatesKind, StepCache, kind_of
from headwise.kernels.cpu.decoder_phases import Maker, Phases, Run, kept_parts, words_of_heads
from headwise.kernels.cpu.decoder_records import ADDED, LOGITS, NORMED, PLACES, QUERY_SCALES, SIDES, STREAM
from headwise.kernels.cpu.delta_attention import delta_record, sizes_of_weights
from headwise.kernels.cpu.experts import room_of
from headwise.kernels.cpu.kda_attention import kda_record, kda_sizes
from headwise.kernels.cpu.low_rank import NO_GROUPS, RowGroups
from headwise.kernels.cpu.matmul import EPILOGUES, KINDS, PackedWeight, matmul, take_rows
from headwise.kernels.cpu.memory import Scratch, from_a_line_on
from headwise.kernels.cpu.mla_attention import EXPANDED_QUERIES
from headwise.kernels.cpu.pool import pool_of_this_process
from headwise.kernels.cpu.records import Record, Room, address_of, place_of
from headwise.kernels.cpu.ssm_attention import ssm_record
from headwise.kernels.fused import (
    NOTHING,
    Besides,
    DecoderLayer,
    DecoderShape,
    GroupedQueries,
    KimiDelta,
    Latents,
    StateSpace,
    SumOverRanks,
    WithStates,
)
from headwise.kernels.mla import has_scales

Floats = NDArray[np.float32]
LAYER_BYTES = 1 << 17
"""Bytes of a layer's weights that are worth waking a thread for."""

LAYER_FLOPS = 1 << 20
"""Bytes of a layer's weights times rows that are."""

NO_PLAN = -1
"""In place of a plan's number."""


class CpuDecoder:
    """`FusedDecoder` on at most ``threads`` threads."""

    def __init__(self, layers: Sequence[DecoderLayer], shape: DecoderShape, threads: int) -> None:
        self._layers = layers  # keeps alive what records point to
        with_latents = (index for index, layer in enumerate(layers) if isinstance(layer.attention, Latents))
        self._latents = next(with_latents, None)
        self._table = np.zeros(len(layers), records.LAYER)
        self._states: list[NDArray[np.int64]] = []
        for record, layer in zip(self._table, layers, strict=True):
            if isinstance(layer.attention, WithStates):
                self._states.append(_states_record(layer.attention))
                record["states"] = place_of(self._states[-1])
            elif isinstance(layer.attention, GroupedQueries):
                record["sink_logits"] = _span(layer.attention.sink_logits)
                record["out_words"] = words_of_heads(layer.attention)
        each = records.LAYER.itemsize
        places = [self._table.ctypes.data + index * each for index in range(len(layers))]
        made = Maker(layers[0].attention.out.outputs, EPILOGUES[shape.activation], shape.eps)
        self._phases = Phases.made_by(made, layers, places)
        self._adapted = AdaptedLayers.of(layers, EPILOGUES[shape.activation], shape.eps)
        self._groups = NO_GROUPS
        self._runs: dict[tuple[range, bool, bool], list[Run]] = {}
        self._shape, self._threads = shape, threads
        self._hidden: int = layers[0].attention.out.outputs
        own, mixtures = self._phases.weights, self._phases.mixtures
        self._dtypes = frozenset(weight.dtype for weight in own)
        weights = [*own, *(weight for mixture in mixtures for weight in mixture.weights)]
        self._widest = max(weight.depth for weight in weights)
        every = [self._phases] if self._adapted is None else [self._phases, self._adapted.phases]
        self._values = max(self._widest, *(phases.values for phases in every))
        self._widths = [max(phases.widths[place] for phases in every) for place in PLACES]
        self._row_sums = max(weight.row_sums for weight in weights)
        of_experts = sum(mixture.token_bytes for mixture in mixtures)
        self._layer_bytes = (sum(weight.nbytes for weight in own) + of_experts) // len(layers)
        self._layouts: Sequence[BlockLayout] = ()
        self._heads: Sequence[HeadTable] = ()
        self._passes: list[Passes] = []
        self._kind_table = np.zeros(0, decoder_records.KIND)
        self._planners: list[tuple[Planner, bool]] = []
        self._unbounded = np.zeros(0, np.int32)
        self._rooms = _Rooms.empty(0, self)
        keeping = [not _only_attends(layer) for layer in layers]
        self._last_kept = max(index for index, keeps in enumerate(keeping) if keeps)
        self._plans, self._last_plan = PlanTable.room(0), NO_PLAN
        self._counters, self._angles = Room(np.int64), Room(np.float32)
        self._scratch, self._partials, self._scores = Room(np.float32), Room(np.float32), Room(np.float32)
        self._step, self._mixing = Record(decoder_records.STEP), Record(experts_jit.MIXING)
        self._mixing_room, self._mixing_counters, self._mixed = Scratch(), 0, (0, 0)
        self._sides = np.zeros(0, np.float32)  # keeps alive what places point to

    def takes(self, batch: AttentionBatch, layouts: Sequence[BlockLayout]) -> bool:
        """See `FusedDecoder.takes`: not latents that are expanded, as those of prompts, nor those with scales."""
        if self._latents is None:
            return True
        queries: int = np.diff(batch.cu_seqlens_q).max(initial=0)
        return queries < EXPANDED_QUERIES and not has_scales(layouts[self._latents])

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
    ) -> Angles:
        """See `FusedDecoder.rotations`."""
        rows, behind, found = len(positions), positions.size, []
        room = self._angles.of(behind + 2 * rows * sum(each.shape[-1] for each in inverses))
        places = room[:behind].reshape(positions.shape)
        places[:] = positions
        for inverse, scale in zip(inverses, scales, strict=True):
            count = 2 * rows * inverse.shape[-1]
            cosines, sines = room[behind : behind + count].reshape(2, rows, inverse.shape[-1])
            behind += count
            if inverse.ndim == 1:
                np.multiply(places[:, None], inverse, out=cosines)
            else:  # exact: one of a token's positions turns a pair, the others add zeros
                np.matmul(places, inverse, out=cosines)
            np.sin(cosines, out=sines)
            np.cos(cosines, out=cosines)
            if scale is not None:
                cosines *= scale
                sines *= scale
            found.append((cosines, sines))
        return found

    def run(
        self,
        x: Floats,
        layers: range,
        rotations: Angles,
        arena: NDArray[np.uint8],
        layouts: Sequence[BlockLayout],
        batch: AttentionBatch,
        heads: Sequence[HeadTable],
        final_norm: Floats | None,
        besides: Besides = NOTHING,
        sum_over_ranks: SumOverRanks | None = None,
        wanted: NDArray[np.int64] | None = None,
    ) -> None:
        """See `FusedDecoder.run`. A step that is no larger than one before it allocates no array, unless it
        takes more than `records.KEPT_BYTES`.
        """
        self._set_cache(layouts, heads)
        rows, workers, phases = len(x), self._workers(len(x)), self._phases_for(besides)
        rooms = self._rooms_for(rows)
        chunks = batch if besides.chunks is None else besides.chunks
        plans = self._planned(batch, chunks, wanted)
        mixing, mixing_counters = self._mixing_for(rows, workers)
        of_phases = phase_counters(phases.most, workers)
        of_attention = FIRST_ITEM + plans.most_items
        each = of_phases + of_attention + mixing_counters
        counters = self._counters.of(len(layers) * each)
        counters[: len(layers) * each] = 0
        places = rooms.places
        places[STREAM] = address_of(x, np.float32)
        places[SIDES], places[QUERY_SCALES] = _span(besides.sides)[0], _span(besides.query_scales)[0]
        self._fill_passes(rows, workers, rotations, arena, batch, chunks, plans)
        step = self._step.fill(
            products=self._products, places=places, rows=rows, hidden=self._hidden,
            **phases.run_of(layers).fields, first_layer=layers.start,
            kinds=place_of(self._kind_table.view(np.int64)), counters=place_of(counters), counters_per_layer=each,
            attend_counters=of_phases, mixing_counters=of_phases + of_attention, threads=workers,
            values=place_of(rooms.values), value_floats=self._values, tiles=place_of(rooms.tiles),
            factors=place_of(rooms.factors), factors_length=rooms.factors.size, sums=place_of(rooms.sums),
            sums_length=rooms.sums.size, final_norm=_span(final_norm)[0], mix=self._mix, mixing=mixing,
            **self._adding(besides.adapters),
        )  # fmt: skip
        if sum_over_ranks is None and wanted is None:
            pool_of_this_process().run(run_phases().address, workers, step)
        else:
            self._run_parts(x, layers, workers, besides, sum_over_ranks, wanted)

    def _phases_for(self, besides: Besides) -> Phases:
        if besides.adapters is None:
            return self._phases
        assert self._adapted is not None, "rows go by adapters where layers have some"
        return self._adapted.phases

    def _adding(self, adapters: NDArray[np.int16] | None) -> Mapping[str, int]:
        """Fields of a step that tell which rows go by which adapters."""
        if adapters is None or self._adapted is None:
            return {}
        self._groups = RowGroups.of(adapters)
        return {**self._adapted.wanted, **fields_of(self._groups)}

    def _planned(self, batch: AttentionBatch, chunks: AttentionBatch, wanted: NDArray[np.int64] | None) -> PlanTable:
        """Plans of a step's attention; of the last layer's that keeps anything, what makes rows that are ``wanted``."""
        plans = [planner.plan(chunks if is_chunked else batch) for planner, is_chunked in self._planners]
        if self._last_plan != NO_PLAN:
            last = plans[self._last_plan]
            plans.append(last if wanted is None else last.of_rows(wanted))
        return PlanTable.of(plans, self._plans)

    def _run_parts(
        self,
        x: Floats,
        layers: range,
        workers: int,
        besides: Besides,
        sum_over_ranks: SumOverRanks | None,
        wanted: NDArray[np.int64] | None,
    ) -> None:
        """A step that is filled, in parts: between them, what is to be added is summed over ranks, and rows that are
        not wanted are left out."""
        step, pool, phases = self._step, pool_of_this_process(), run_phases().address
        which = layers, sum_over_ranks is not None, besides.adapters is not None
        if which not in self._runs:
            found = self._phases_for(besides).runs_of(layers, of_ranks=sum_over_ranks is not None)
            self._runs[which] = list(found)
        *runs, closing = self._runs[which]
        added = self._rooms.kept[ADDED][: x.size].reshape(x.shape)
        final_norm = step.of("final_norm")
        step.change(final_norm=0)
        for run in runs:
            step.change(**run.fields)
            pool.run(phases, workers, step.place)
            if run.has_attended and wanted is not None:
                if not len(wanted):
                    return
                added = self._narrow(x, added, workers, besides, wanted)
            if sum_over_ranks is not None:
                added[:] = sum_over_ranks(added)
            step.change(goes_on=1)
        step.change(**closing.fields, final_norm=final_norm)
        pool.run(phases, workers, step.place)

    def _narrow(self, x: Floats, added: Floats, workers: int, besides: Besides, wanted: NDArray[np.int64]) -> Floats:
        """Have a step go on with the ``wanted`` rows, which become the first ones; returns ``added`` of these."""
        rows = len(wanted)
        for array in (x, added):
            array[:rows] = array[wanted]
        self._mixing_for(rows, workers)  # of fewer rows: no more counters than there are
        self._step.change(rows=rows)
        if besides.adapters is not None:
            self._step.change(**self._adding(besides.adapters[wanted]))
        if besides.sides is not None:
            self._sides = np.ascontiguousarray(besides.sides[wanted])
            places = self._rooms.places
            places[SIDES] = address_of(self._sides, np.float32)
            self._step.change(places=places)
        return added[:rows]

    def _fill_passes(
        self,
        rows: int,
        workers: int,
        rotations: Angles,
        arena: NDArray[np.uint8],
        batch: AttentionBatch,
        chunks: AttentionBatch,
        plans: PlanTable,
    ) -> None:
        """Tell each kind of layers where this step's tokens and their cache are."""
        dims = [own.kind.dim for own in self._passes if not isinstance(own.kind, StatesKind)]
        partials = self._partials.of(plans.partial_floats(max(dims, default=0)))
        each = max(own.scratch_floats(plans) for own in self._passes)
        scratch, places = self._scratch.of(workers * each), self._rooms.places
        step = StepCache(rows, arena, batch, chunks, rotations, places, plans, partials, scratch, each)
        for own in self._passes:
            own.fill(self._shape, step)

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
        return experts_jit.mix().address if self._phases.mixtures else 0

    def _mixing_for(self, rows: int, workers: int) -> tuple[int, int]:
        """Where the `experts_jit.MIXING` of a step lies, and how many counters its layers have for it.

        They are those of the step before, if that was of the same size and in the same rooms.
        """
        mixtures = self._phases.mixtures
        if mixtures and self._mixed != (rows, workers):
            places = self._rooms_for(rows).places
            self._mixing.fill(
                **room_of(mixtures, rows, workers, self._mixing_room), x=places[NORMED], logits=places[LOGITS],
                out=places[ADDED],
            )  # fmt: skip
            self._mixing_counters = max(mixture.counters(rows, workers) for mixture in mixtures)
            self._mixed = rows, workers
        return self._mixing.place, self._mixing_counters

    def _workers(self, rows: int) -> int:
        """Threads that are worth waking: for weights to be read, or for arithmetic."""
        of_bytes, of_flops = self._layer_bytes // LAYER_BYTES, rows * self._layer_bytes // LAYER_FLOPS
        return max(1, min(self._threads, max(of_bytes, of_flops)))

    def _set_cache(self, layouts: Sequence[BlockLayout], heads: Sequence[HeadTable]) -> None:
        """Find which layers are of a kind and whose attention is planned alike, and tell phases where heads lie."""
        if heads is self._heads and layouts is self._layouts:
            return
        kinds: dict[Kind, int] = {}
        plans: dict[tuple[Any, ...], tuple[int, Planner]] = {}
        self._unbounded = np.zeros(max(len(head.window) for head in heads), np.int32)
        count = len(self._layers)
        told = zip(self._table, self._layers, heads[:count], layouts[:count], strict=True)
        for index, (record, layer, head, layout) in enumerate(told):
            kind = kind_of(layer, layout)
            if not isinstance(kind, StatesKind) and kind.is_chunked:
                everything = self._unbounded[: len(head.window)]
                head = HeadTable(head.group, head.slot, everything, everything)
            record["heads"] = [
                (address_of(array, np.int32), array.size) for array in (head.group, head.slot, head.window, head.sink)
            ]
            which = kinds.setdefault(kind, len(kinds))
            self._phases.placed(index, which=which)
            if self._adapted is not None:
                self._adapted.phases.placed(index, which=which)
            if not isinstance(kind, StatesKind):
                share = kind.q_heads // kind.kv_heads
                seeing = share, kind.dim, head.both_ways
                policy = (head.window.tobytes(), head.sink.tobytes(), *seeing, kind.is_chunked)
                if policy not in plans:
                    plans[policy] = len(plans), Planner(head.window, head.sink, *seeing)
                record["plan"] = plans[policy][0]
        self._set_kinds(kinds)
        self._planners = [(planner, is_chunked) for (*_, is_chunked), (_, planner) in plans.items()]
        self._last_plan = NO_PLAN
        last, net = self._table[self._last_kept], self._layers[self._last_kept].attention
        if not isinstance(net, WithStates):  # one of its own, behind all others
            self._last_plan, last["plan"] = int(last["plan"]), len(plans)
        self._plans = PlanTable.room(len(plans) + (self._last_plan != NO_PLAN))
        if self._adapted is not None:
            self._adapted.tell(self._table)
        self._heads, self._layouts = heads, layouts

    def _set_kinds(self, kinds: Iterable[Kind]) -> None:
        known = {own.kind.layout: own.kernels for own in self._passes}
        self._passes = [Passes.of(kind, known.get(kind.layout)) for kind in kinds]
        self._kind_table = np.array([own.record for own in self._passes], decoder_records.KIND)

    def _rooms_for(self, rows: int) -> _Rooms:
        """Room for ``rows`` rows; kept for the next steps, which mostly have no more."""
        if self._rooms.rows < rows:
            self._rooms, self._mixed = _Rooms.empty(rows, self), (0, 0)
        return self._rooms


@dataclass(frozen=True)
class _Rooms:
    """What phases pass on, for so many rows; and a scratch for each thread. See `decoder_records.STEP`.

    stream: the residual stream's
    places: addresses of `PLACES`, and kept what lies there
    """

    rows: int
    stream: Floats
    places: NDArray[np.int64]
    kept: Sequence[Floats]
    factors: NDArray[np.uint32]
    sums: Floats
    tiles: Floats
    values: Floats

    @staticmethod
    def empty(rows: int, decoder: CpuDecoder) -> _Rooms:
        threads, widths = decoder._threads, decoder._widths
        kept = [from_a_line_on(rows * widths[place], np.float32) for place in PLACES]
        return _Rooms(
            rows,
            stream=kept[STREAM].reshape(rows, decoder._hidden),
            places=np.array([place_of(room) for room in kept], np.int64),
            kept=kept,
            factors=from_a_line_on(rows * decoder._widest, np.uint32),
            sums=np.empty(rows * decoder._row_sums, np.float32),
            tiles=from_a_line_on(threads * matmul_jit.TILE, np.float32),
            values=np.empty(threads * decoder._values, np.float32),
        )


def _states_record(net: WithStates) -> NDArray[np.int64]:
    """A `records.STATES`."""
    members = len(net.between.speed)
    if isinstance(net, KimiDelta):
        return kda_record(net.between, kda_sizes(net.between), members)
    if isinstance(net, StateSpace):
        return ssm_record(net.between, net.sizes, members)
    return delta_record(net.between, sizes_of_weights(net.between), members)


def _only_attends(layer: DecoderLayer) -> bool:
    """Whether its keys and values are another layer's."""
    return isinstance(layer.attention, GroupedQueries) and not kept_parts(layer.attention)


def _span(array: Any) -> tuple[int, int]:
    return (0, 0) if array is None else (address_of(array, np.float32), array.size)
