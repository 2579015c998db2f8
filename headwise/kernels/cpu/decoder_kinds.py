"""Kinds of layers of a decoder: those of a kind have one pass over the cache, and what is compiled for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch
from headwise.kernels.cpu import records, state_walk_jit
from headwise.kernels.cpu.attention_pass import CacheKernels, PlanTable, score_factor
from headwise.kernels.cpu.decoder_phases import LatentSizes, kept_parts
from headwise.kernels.cpu.decoder_records import ABSORBED, DECAYS, GATES, HEADS_SEEN, LATENTS, QKV, VALUES
from headwise.kernels.cpu.delta_attention import sizes_of_weights
from headwise.kernels.cpu.kda_attention import kda_sizes
from headwise.kernels.cpu.records import Record, address_of, place_of
from headwise.kernels.cpu.state_attention import pass_fields, scratch_floats
from headwise.kernels.fused import (
    DecoderLayer,
    DecoderShape,
    DeltaNet,
    GroupedQueries,
    KimiDelta,
    Latents,
    StateSpace,
)

Floats = NDArray[np.float32]
Angles = Sequence[tuple[Floats, Floats]]
Fields = dict[str, Any]


@dataclass(frozen=True)
class StepCache:
    """What a step's passes are over, and where they find what others left.

    chunks:  the batch for layers that see chunks
    places:  addresses of `decoder_records.PLACES`
    scratch, partials: of all kinds; each thread has ``scratch_floats``
    """

    rows: int
    arena: NDArray[np.uint8]
    batch: AttentionBatch
    chunks: AttentionBatch
    rotations: Angles
    places: NDArray[np.int64]
    plans: PlanTable
    partials: Floats
    scratch: Floats
    scratch_floats: int

    @property
    def fields(self) -> Fields:
        """Those of a `records.PASS` that all kinds have."""
        return {
            "rows": self.rows, "out": self.places[HEADS_SEEN], "scratch": place_of(self.scratch),
            "scratch_floats": self.scratch_floats, "partials": place_of(self.partials),
            "partial_rows": self.plans.most_partial_rows, "plans": place_of(self.plans.table),
        }  # fmt: skip


@dataclass(frozen=True)
class AttentionKind:
    """Layers with grouped-query attention.

    row:        floats from one token's projected queries to the next one's
    parts:      of keys and values that are projected, see `kept_parts`
    is_chunked: whether it is over `StepCache.chunks`
    """

    layout: BlockLayout
    q_heads: int
    kv_heads: int
    dim: int
    value_dim: int
    row: int
    parts: int
    rotation: int
    is_chunked: bool

    @property
    def has_own_write(self) -> bool:
        """Whether KV write needs a pass of its own: where keys and values are another layer's, there are none."""
        return not self.parts

    def attending(self, kernels: CacheKernels, shape: DecoderShape, step: StepCache) -> Fields:
        """Fields of a `records.PASS` for attention."""
        query, dim, value_dim, row = int(step.places[QKV]), self.dim, self.value_dim, self.row
        key = query + 4 * self.q_heads * dim
        value, value_row = key + 4 * self.kv_heads * dim, row
        if self.parts == 1:
            value, value_row = int(step.places[VALUES]), self.kv_heads * value_dim
        return {
            **_attending(self, kernels, shape, step), "q_heads": self.q_heads, "kv_heads": self.kv_heads, "dim": dim,
            "value_dim": value_dim, "query": query, "query_row": row, "query_head": dim, "key": key, "key_row": row,
            "key_head": dim, "value": value, "value_row": value_row, "value_head": value_dim,
        }  # fmt: skip

    def writing(self, attending: Fields) -> Fields:
        """Those for a write of its own."""
        return {**attending, "kv_heads": 0}


@dataclass(frozen=True)
class LatentKind:
    """Layers with latents: one KV head for all queries, which are absorbed."""

    layout: BlockLayout
    q_heads: int
    dim: int
    rotation: int
    kv_heads = 1
    is_chunked = False
    has_own_write = True

    def attending(self, kernels: CacheKernels, shape: DecoderShape, step: StepCache) -> Fields:
        """See `AttentionKind.attending`."""
        query, latent, dim = int(step.places[ABSORBED]), int(step.places[LATENTS]), self.dim
        return {
            **_attending(self, kernels, shape, step), "q_heads": self.q_heads, "kv_heads": 1, "dim": dim,
            "value_dim": dim, "query": query, "query_row": self.q_heads * dim, "query_head": dim,
            "key": latent, "key_row": dim, "key_head": dim, "value": latent, "value_row": dim, "value_head": dim,
        }  # fmt: skip

    def writing(self, attending: Fields) -> Fields:
        """Latents are rotated already, and queries are not made yet."""
        return {**attending, "q_heads": 0, "half": 0}


@dataclass(frozen=True)
class StatesKind:
    """Layers with recurrent states.

    row:     floats from what is projected of one token to the next one's
    scratch: floats that each thread works with
    decays, gates: floats of a token in `DECAYS` and `GATES`, where they are there
    """

    layout: BlockLayout
    row: int
    scratch: int
    decays: int = 0
    gates: int = 0


Kind = AttentionKind | LatentKind | StatesKind


def kind_of(layer: DecoderLayer, layout: BlockLayout) -> Kind:
    """The kind of a layer whose blocks have that layout."""
    attention = layer.attention
    if isinstance(attention, DeltaNet):
        return StatesKind(layout, attention.into.outputs, scratch_floats(sizes_of_weights(attention.between)))
    if isinstance(attention, KimiDelta):
        scratch, beside = scratch_floats(kda_sizes(attention.between)), (attention.decays, attention.gates)
        return StatesKind(layout, attention.into.outputs, scratch, *(weight.outputs for weight in beside))
    if isinstance(attention, StateSpace):
        return StatesKind(layout, attention.into.outputs, scratch_floats(attention.sizes))
    if isinstance(attention, Latents):
        sizes = LatentSizes.of(attention)
        return LatentKind(layout, sizes.heads, sizes.width, attention.rotation)
    return _grouped(attention, layout)


def _grouped(attention: GroupedQueries, layout: BlockLayout) -> AttentionKind:
    heads = attention.q_heads, attention.kv_heads, attention.head_dim, attention.value_dim
    how = kept_parts(attention), attention.rotation, attention.is_chunked
    return AttentionKind(layout, *heads, attention.qkv.outputs, *how)


def _attending(kind: AttentionKind | LatentKind, kernels: CacheKernels, shape: DecoderShape, step: StepCache) -> Fields:
    cosines, sines = step.rotations[kind.rotation]
    return {
        **kernels.pass_fields(step.arena, step.chunks if kind.is_chunked else step.batch), **step.fields,
        "cosines": address_of(cosines, np.float32), "sines": address_of(sines, np.float32), "half": cosines.shape[1],
        "factor": score_factor(shape.scale, shape.softcap), "softcap": shape.softcap,
    }  # fmt: skip


@dataclass(frozen=True)
class Passes:
    """The `records.PASS` of a kind's KV write and its attention, which mostly are one, and what is compiled for them.

    kernels: None for states
    record:  a `decoder_records.KIND`
    """

    kind: Kind
    kernels: CacheKernels | None
    writing: Record
    attending: Record
    record: tuple[int, ...]

    @staticmethod
    def of(kind: Kind, known: CacheKernels | None) -> Passes:
        """known: what is compiled for its layout already"""
        attending = Record(records.PASS)
        if isinstance(kind, StatesKind):
            record = attending.place, 0, attending.place, state_walk_jit.attend().address
            return Passes(kind, None, attending, attending, record)
        writing = Record(records.PASS) if kind.has_own_write else attending
        kernels = known or CacheKernels.of(kind.layout)
        record = writing.place, kernels.write.address, attending.place, kernels.attend.address
        return Passes(kind, kernels, writing, attending, record)

    def scratch_floats(self, plans: PlanTable) -> int:
        """How many each thread works with."""
        if isinstance(self.kind, StatesKind):
            return self.kind.scratch
        assert self.kernels is not None, "made so"
        return plans.scratch_floats(self.kind.q_heads // self.kind.kv_heads, self.kernels)

    def fill(self, shape: DecoderShape, step: StepCache) -> None:
        """Tell them of a step."""
        if isinstance(self.kind, StatesKind):
            kind, places = self.kind, step.places
            self.attending.fill(
                **pass_fields(step.arena, kind.layout, step.batch), **step.fields, query=places[QKV],
                query_row=kind.row, key=places[DECAYS], key_row=kind.decays, value=places[GATES], value_row=kind.gates,
            )  # fmt: skip
            return
        assert self.kernels is not None, "made so"
        fields = self.kind.attending(self.kernels, shape, step)
        self.attending.fill(**fields)
        if self.kind.has_own_write:
            self.writing.fill(**self.kind.writing(fields))
