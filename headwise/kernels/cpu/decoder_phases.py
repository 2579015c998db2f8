"""The phases of a decoder's layers, as `decoder_jit` runs them: `decoder_records.PHASE` says what a phase is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.cpu import decoder_records as at
from headwise.kernels.cpu import matmul_jit
from headwise.kernels.cpu.experts import PackedExperts
from headwise.kernels.cpu.gates import padded
from headwise.kernels.cpu.matmul import BLOCK_INPUTS, PackedWeight, is_in_tiles
from headwise.kernels.cpu.records import address_of, place_of
from headwise.kernels.fused import (
    BesideExperts,
    DecoderLayer,
    DeltaNet,
    DenseLayer,
    GroupedQueries,
    KimiDelta,
    Latents,
    MixedLayer,
    StateSpace,
)

Floats = NDArray[np.float32]
Fields = dict[str, Any]
NO_PLACE = -1


@dataclass(frozen=True)
class Run:
    """Phases that are taken in one call.

    fields:       of a `STEP`, which say so
    has_attended: behind them is what the last layer does with what it has seen, of each row by itself
    """

    fields: Mapping[str, int]
    has_attended: bool = False


@dataclass(frozen=True)
class Phases:
    """Those of all layers.

    table:    `PHASE` records, of layer ``i`` those from ``starts[i]`` to ``starts[i + 1]``
    closing:  one for each layer: what is left to be done where its phases are the last ones
    sums:     which of the table add what others made to the residual stream, in order
    most:     of a layer, with that one
    widths:   columns of `PLACES`
    values:   floats of a row that a thread works with
    weights:  that rows are multiplied with, but for experts'
    mixtures: experts
    """

    table: NDArray[Any]
    starts: Sequence[int]
    closing: NDArray[Any]
    sums: Sequence[int]
    most: int
    widths: Mapping[int, int]
    values: int
    weights: Sequence[PackedWeight]
    mixtures: Sequence[PackedExperts]

    @staticmethod
    def made_by(made: Maker, layers: Sequence[DecoderLayer], layer_records: Sequence[int]) -> Phases:
        """layer_records: addresses of the layers' `records.LAYER`"""
        eps = made.eps
        starts, closing, last = [0], [], _Sum()
        for index, (layer, record) in enumerate(zip(layers, layer_records, strict=True)):
            made.begin(index, record)
            last = made.layer(layer, last, len(layers))
            closed = {"eps": eps, **made.rows(at.STREAM, made.hidden, added=last)}
            closing.append(_filled({**closed, **made.numbered(starts[-1])}))
            starts.append(len(made.phases))
        _link(made.phases)
        table, ends = np.array([_filled(phase) for phase in made.phases], at.PHASE), np.array(closing, at.PHASE)
        return Phases(
            table,
            starts,
            ends,
            [at for at, phase in enumerate(made.phases) if phase.get("addend", NO_PLACE) != NO_PLACE],
            max(stop - start for start, stop in pairwise(starts)) + 1,
            made.widths,
            made.values,
            made.weights,
            made.mixtures,
        )

    def run_of(self, layers: range) -> Run:
        """All phases of some layers, and what closes them."""
        first, last = self.starts[layers.start], self.starts[layers.stop]
        return _run(self._at(self.table, first), last - first, self._at(self.closing, layers.stop - 1))

    def runs_of(self, layers: range, *, of_ranks: bool) -> Iterator[Run]:
        """The same in runs: up to where the last layer has attended, the rest, and what closes them. With ``of_ranks``
        there are more: behind each, but for what closes them, a sum over ranks has its place."""
        first, last = self.starts[layers.start], self.starts[layers.stop]
        sums = [at for at in self.sums if first < at < last]
        attended = next((at for at in sums if at > self.starts[layers.stop - 1]), last)
        cuts = [first, *(sums if of_ranks else [attended]), last]
        for begin, end in pairwise(dict.fromkeys(cuts)):  # the last two are one where the last layer has no MLP
            closing = self._at(self.table, end - 1)
            yield _run(self._at(self.table, begin), end - begin - 1, closing, has_attended=end == attended)
        yield _run(0, 0, self._at(self.closing, layers.stop - 1))

    @staticmethod
    def _at(phases: NDArray[Any], index: int) -> int:
        start: int = phases.ctypes.data
        return start + index * at.PHASE.itemsize

    def placed(self, layer: int, **fields: int) -> None:
        """Set fields of a layer's phases that are known with its cache."""
        for name, value in fields.items():
            self.table[name][self.starts[layer] : self.starts[layer + 1]] = value


def _run(first: int, count: int, closing: int, *, has_attended: bool = False) -> Run:
    return Run({"phases": first, "count": count, "closing": closing}, has_attended)


@dataclass(frozen=True)
class _Sum:
    """What is still to be added to rows, and what they are multiplied with then, or have taken off."""

    addend: int = NO_PLACE
    after: Floats | None = None
    scale: float = 1.0
    is_centred: bool = False


@dataclass
class Maker:
    """Phases as fields by name, in order. epilogue: of MLPs; eps: of norms"""

    hidden: int
    epilogue: int
    eps: float
    phases: list[Fields] = field(default_factory=list)
    widths: Counter[int] = field(default_factory=Counter)
    values: int = 0
    weights: list[PackedWeight] = field(default_factory=list)
    mixtures: list[PackedExperts] = field(default_factory=list)
    _layer: int = 0
    _first: int = 0
    _record: int = 0

    def begin(self, layer: int, record: int) -> None:
        self._layer, self._first, self._record = layer, len(self.phases), record

    def layer(self, layer: DecoderLayer, last: _Sum, layers: int) -> _Sum:
        """All phases of a layer, behind one that left a sum to be done; returns what this one leaves."""
        norms, attention = layer.norms, layer.attention
        into = attention.qkv if isinstance(attention, GroupedQueries) else attention.into
        self._add(self.rows(at.STREAM, self.hidden, into, norms.before_attention, last))
        if isinstance(attention, DeltaNet):
            self._states(attention)
        elif isinstance(attention, StateSpace):
            norm = {"norm_parts": attention.norm_groups, "eps": attention.eps}
            self._states(attention, attention.norm, norm)
        elif isinstance(attention, KimiDelta):
            self._kimi_delta(attention)
        elif isinstance(attention, Latents):
            self._latents(attention)
        else:
            self._attention(attention, layer)
        left = self._fed(layer, _Sum(at.ADDED, norms.after_attention))
        if layer.side is not None:
            side, size = layer.side, layer.side.gate.outputs
            self._add(self.rows(at.STREAM, self.hidden, side.gate, added=left))
            self._product(side.gate, at.GATES)
            told = self._gate(at.GATED_BY_GELU, at.SIDES, size, layers * size, self._layer * size)
            self._add(self.rows(at.GATES, size, side.out) | told)
            self._product(side.out, at.ADDED)
            left = _Sum(at.ADDED, side.after)
        return replace(left, scale=layer.scale, is_centred=layer.is_centred)

    def _states(self, net: DeltaNet | StateSpace, norm: Floats | None = None, how: Fields | None = None) -> None:
        self._product(net.into, at.QKV)
        self._add({"kind": at.ATTEND})
        self._add(self.rows(at.HEADS_SEEN, net.out.inputs, net.out, norm) | (how or {}))
        self._product(net.out, at.ADDED)

    def _kimi_delta(self, net: KimiDelta) -> None:
        made, rank = net.into.outputs, net.decays.inputs
        self._product(net.into, at.QKV)
        for weight, first, place in ((net.decays, made - 2 * rank, at.DECAYS), (net.gates, made - rank, at.GATES)):
            self._add(self.rows(at.QKV, rank, weight) | {"source_row": made, "source_at": first})
            self._product(weight, place)
        self._add({"kind": at.ATTEND})
        self._add(self.rows(at.HEADS_SEEN, net.out.inputs, net.out))
        self._product(net.out, at.ADDED)

    def _latents(self, attention: Latents) -> None:
        sizes = LatentSizes.of(attention)
        heads, made, place, row = sizes.heads, attention.into.outputs, at.QKV, attention.into.outputs
        self._product(attention.into, at.QKV, attention.into_bias)
        if attention.ranked is not None:
            norm, into_heads = attention.ranked
            self._add(
                self.rows(at.QKV, into_heads.inputs, into_heads, norm) | {"source_row": made, "eps": attention.eps}
            )
            self._product(into_heads, at.QUERIES)
            place, row = at.QUERIES, into_heads.outputs
        for room, columns in ((at.LATENTS, 1), (at.ABSORBED, heads), (at.HEADS_SEEN, heads)):
            self._widen(room, columns * sizes.width)
        self._add({
            "kind": at.WRITE_LATENTS, "source": at.QKV, "source_row": made, "gate": place, "gate_row": row,
            "before": _span(attention.latent_norm), "eps": attention.eps, "heads": heads, "plain": sizes.plain,
            "rank": sizes.rank, "rotated": sizes.rotated, "is_scaled": attention.is_scaled,
        })  # fmt: skip
        self._add({
            "kind": at.OF_HEADS, "source": place, "source_row": row, "columns": sizes.query, "heads": heads,
            "inputs": sizes.plain, "outputs": sizes.rank, "tail": sizes.rotated, "out": at.ABSORBED,
            "out_columns": sizes.width, "up": address_of(attention.up.key, np.float32),
        })  # fmt: skip
        self._add({"kind": at.ATTEND})
        self._add({
            "kind": at.OF_HEADS, "source": at.HEADS_SEEN, "source_row": heads * sizes.width, "columns": sizes.width,
            "heads": heads, "inputs": sizes.rank, "outputs": sizes.value, "tail": 0, "out": at.VALUES_SEEN,
            "out_columns": sizes.value, "up": address_of(attention.up.value, np.float32),
        })  # fmt: skip
        self._add(self.rows(at.VALUES_SEEN, attention.out.inputs, attention.out))
        self._product(attention.out, at.ADDED, attention.out_bias)

    def _attention(self, attention: GroupedQueries, layer: DecoderLayer) -> None:
        self._product(attention.qkv, at.QKV, attention.qkv_bias)
        gate: Fields = {}
        if attention.gate is not None:
            self._again(at.STREAM, attention.qkv, attention.gate, layer.norms.before_attention)
            self._product(attention.gate, at.GATES)
            gate = self._gate(at.GATED_BY_SIGMOID, at.GATES, attention.gate.outputs, attention.gate.outputs)
        norms = layer.norms.query, layer.norms.key, attention.value_norm
        copies = kept_parts(attention) == 1
        if copies:
            self._widen(at.VALUES, attention.kv_heads * attention.value_dim)
        spans = [_span(norm) for norm in norms]
        self._add({"kind": at.WRITE, "norms": spans, "copies_keys": copies, "is_scaled": attention.is_scaled})
        self._add({"kind": at.ATTEND})
        if words := self._words_of_heads(attention):
            self._widen(at.HEADS_SEEN, words)
            self._product(attention.out, at.ADDED, attention.out_bias, prepared=at.HEADS_SEEN)
            return
        self._add(self.rows(at.HEADS_SEEN, attention.out.inputs, attention.out) | gate)
        self._product(attention.out, at.ADDED, attention.out_bias)

    def _fed(self, layer: DecoderLayer, added: _Sum) -> _Sum:
        """The MLP, or what stands for it."""
        mlp, norms = layer.mlp, layer.norms
        if mlp is None:
            return added
        left = _Sum(at.ADDED, norms.after_mlp)
        before = norms.before_attention if layer.is_parallel else norms.before_mlp
        order: Fields = {"norms_first": layer.is_parallel}
        if isinstance(mlp, DenseLayer):
            self._add(self.rows(at.STREAM, self.hidden, mlp.into, before, added) | order)
            self._gated(mlp, at.ADDED)
        elif isinstance(mlp, MixedLayer):
            self._add(self.rows(at.STREAM, self.hidden, mlp.router, before, added, kept=at.NORMED) | order)
            self._mixed(mlp)
            if mlp.shared is not None:
                shared, gate = mlp.shared.mlp, mlp.shared.gate
                self._add(self.rows(at.STREAM, self.hidden, added=left))
                self._add(self.rows(at.NORMED, self.hidden, gate))
                self._product(gate, at.GATES)
                self._again(at.NORMED, gate, shared.into)
                self._gated(shared, at.ADDED, self._gate(at.GATED_BY_ROW, at.GATES, 0, gate.outputs))
        else:
            left = _Sum(at.BESIDE, norms.after_mlp)
            self._beside(mlp, norms.before_mlp, added)
        return left

    def _beside(self, both: BesideExperts, before_mlp: Floats | None, added: _Sum) -> None:
        self._add(self.rows(at.STREAM, self.hidden, both.mlp.into, before_mlp, added))
        self._gated(both.mlp, at.BESIDE)
        self._add(self.rows(at.STREAM, self.hidden, both.mixed.router, both.choose))
        self._product(both.mixed.router, at.LOGITS)
        self._add(self.rows(at.STREAM, self.hidden, before=both.before, kept=at.NORMED))
        self._mix(both.mixed)
        self._add(self.rows(at.BESIDE, self.hidden, before=both.after_mlp))
        self._add(self.rows(at.BESIDE, self.hidden, added=_Sum(at.ADDED, both.after)))

    def _gated(self, mlp: DenseLayer, out: int, gate: Fields | None = None) -> None:
        """An MLP of rows that are prepared for it."""
        if gate is None and self._stays_in_tiles(mlp):
            self._product(mlp.into, at.GATED, mlp.into_bias, self.epilogue, rows_of=mlp.down)
            self._product(mlp.down, out, mlp.down_bias, prepared=at.GATED)
            return
        self._product(mlp.into, at.GATED, mlp.into_bias, self.epilogue)
        self._add(self.rows(at.GATED, mlp.down.inputs, mlp.down) | (gate or {}))
        self._product(mlp.down, out, mlp.down_bias)

    def _stays_in_tiles(self, mlp: DenseLayer) -> bool:
        """Whether what comes of its activation is prepared for the next product where it is computed."""
        return is_in_tiles(mlp.into) and is_in_tiles(mlp.down)

    def _words_of_heads(self, attention: GroupedQueries) -> int:
        return words_of_heads(attention)

    def _mixed(self, mixed: MixedLayer) -> None:
        self._product(mixed.router, at.LOGITS, mixed.router_bias)
        self._mix(mixed)

    def _mix(self, mixed: MixedLayer) -> None:
        self.mixtures.append(mixed.experts)
        self._add({"kind": at.MIX, "mixture": place_of(mixed.experts.record)})

    def _again(self, source: int, prepared: PackedWeight, weight: PackedWeight, before: Floats | None = None) -> None:
        """Prepare the rows that were prepared for one weight for another one, if that is of another kind."""
        if _rows_of(prepared) != _rows_of(weight):
            self._add(self.rows(source, self.hidden, weight, before))

    def rows(
        self,
        source: int,
        columns: int,
        weight: PackedWeight | None = None,
        before: Floats | None = None,
        added: _Sum | None = None,
        kept: int = NO_PLACE,
    ) -> Fields:
        """Fields of a phase of `ROWS`."""
        self._widen(source, columns)
        if kept != NO_PLACE:
            self._widen(kept, columns)
        self.values = max(self.values, columns, 0 if weight is None else weight.depth)
        total = added or _Sum()
        return {
            "kind": at.ROWS, "source": source, "source_row": columns, "columns": columns, "addend": total.addend,
            "after": _span(total.after), "scale": total.scale, "is_centred": total.is_centred,
            "before": _span(before), "kept": kept, "weight": 0 if weight is None else place_of(weight.table),
        }  # fmt: skip

    def _gate(self, kind: int, place: int, columns: int, row: int, first: int = 0) -> Fields:
        """Fields of a phase of `ROWS` besides, by ``columns`` of rows of a place that are ``row`` long."""
        self.values = max(self.values, 2 * padded(columns))
        return {"gate_kind": kind, "gate": place, "gate_row": row, "gate_at": first}

    def _product(
        self,
        weight: PackedWeight,
        out: int,
        bias: Floats | None = None,
        epilogue: int = matmul_jit.PLAIN,
        rows_of: PackedWeight | None = None,
        prepared: int = NO_PLACE,
    ) -> None:
        """rows_of: what comes out is prepared for that weight; prepared: where rows are that were so before"""
        columns = weight.results
        if rows_of is not None:
            columns, epilogue = rows_of.row_factors, epilogue + matmul_jit.AS_ROWS
        self._widen(out, columns)
        self.weights.append(weight)
        place, length = _span(bias)
        self._add({
            "kind": at.PRODUCT, "weight": place_of(weight.table), "bias": place, "bias_length": length,
            "epilogue": epilogue, "out": out, "out_columns": columns, "prepared": prepared,
        })  # fmt: skip

    def _add(self, phase: Fields) -> None:
        self.phases.append({"eps": self.eps, **phase, "record": self._record, **self.numbered(self._first)})

    def numbered(self, first: int) -> Fields:
        """What a next phase is in its layer, whose phases begin with number ``first``."""
        return {"layer": self._layer, "number": len(self.phases) - first}

    def _widen(self, place: int, columns: int) -> None:
        self.widths[place] = max(self.widths[place], columns)


@dataclass(frozen=True)
class LatentSizes:
    """Of heads over latents.

    query:         numbers of a head's query, ``plain`` ones and those that are rotated
    width, rank:   of a latent, and of its part that is not rotated
    value:         of a head's value
    """

    heads: int
    plain: int
    rank: int
    query: int
    value: int

    @staticmethod
    def of(attention: Latents) -> LatentSizes:
        (heads, plain, rank), value = attention.up.key.shape, attention.up.value.shape[2]
        if attention.ranked is not None:
            return LatentSizes(heads, plain, rank, attention.ranked[1].outputs // heads, value)
        # [plain | rotated] of each head, then rank and rotated numbers of the latent
        rotated = (attention.into.outputs - rank - heads * plain) // (heads + 1)
        return LatentSizes(heads, plain, rank, plain + rotated, value)

    @property
    def rotated(self) -> int:
        return self.query - self.plain

    @property
    def width(self) -> int:
        return self.rank + self.rotated


def words_of_heads(attention: GroupedQueries) -> int:
    """`records.LAYER` has them: of attention that nothing gates, whose product is computed in tiles."""
    is_prepared = attention.gate is None and is_in_tiles(attention.out) and not attention.value_dim % BLOCK_INPUTS
    return attention.out.row_factors if is_prepared else 0


def kept_parts(attention: GroupedQueries) -> int:
    """How many of keys and values are projected."""
    of_kv = attention.qkv.outputs - attention.q_heads * attention.head_dim
    return 0 if not of_kv else 1 if of_kv == attention.kv_heads * attention.head_dim else 2


def _link(phases: Sequence[Fields]) -> None:
    """Tell each product which weight the next one multiplies with, if no experts come before it."""
    following = 0
    for phase in reversed(phases):
        if phase["kind"] == at.MIX:
            following = 0
        elif phase["kind"] == at.PRODUCT:
            phase["following"], following = following, phase["weight"]


def _filled(fields: Fields) -> tuple[Any, ...]:
    return tuple(_values(fields))


def _values(fields: Fields) -> Iterator[Any]:
    spans = {"after": (0, 0), "before": (0, 0), "norms": [(0, 0)] * len(at.HEAD_NORMS)}
    for name in at.PHASE.names or ():
        yield fields.get(name, spans.get(name, 0))


def _rows_of(weight: PackedWeight) -> tuple[Any, ...]:
    """What must be equal for rows to be prepared for one weight as for another one."""
    return weight.dtype, weight.depth, weight.offset, weight.scales.shape[1], weight.minima.shape[1]


def _span(array: Any) -> tuple[int, int]:
    return (0, 0) if array is None else (address_of(array, np.float32), array.size)
