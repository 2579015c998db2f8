"""Latent attention (MLA) of prompts on a GPU, in the expanded form: the host half of `expanded_jit.py`.

Which sequences are prompts, and how long they are, the host knows of steps that are no graphs (`HostLengths`). Memory
is taken for the time of a call, within `PIECE_BYTES` for some heads and a piece of a context at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.attention import LOG2E
from headwise.kernels.cuda.launch import Array, TritonLauncher, Variant, address_of
from headwise.kernels.cuda.mla import (
    LatentShape,
    batch_arguments,
    latent_arguments,
    latent_constants,
    power_of_two,
    typed,
)
from headwise.kernels.cuda.parameters import Argument
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.cuda.tiles import Tile
from headwise.kernels.mla_base import UpProjections
from headwise.kernels.token_ranks import TokenRanks

MODULE = "expanded_jit"
PIECE_TOKENS = 4096
PIECE_BYTES = 256 << 20
"""Of keys, values and softmaxes under way of some heads, unless those of one head are more."""
GATHERED = 32
"""Latents that a program brings."""

_GATHER = (
    "latent:kv", "latent_scale:scale", "block_tables:*i32", "head_group:*i32", "head_slot:*i32", "gathered:q",
    "sequence:i32", "groups:i32", "max_blocks:i32", "block_bytes:i64", "slot_bytes:i64", "first:i32", "count:i32",
)  # fmt: skip
_ATTEND = (
    "query:q", "out:q", "keys:q", "values:q", "latents:q", "mixed:*fp32", "top:*fp32", "sums:*fp32",
    "block_tables:*i32", "head_group:*i32", "head_window:*i32", "head_sink:*i32", "sequence:i32", "groups:i32",
    "max_blocks:i32", "first:i32", "count:i32", "queries:i32", "context:i32", "heads:i32", "query_stride:i32",
    "out_stride:i32", "score_scale:fp32", "is_first:i32", "is_last:i32",
)  # fmt: skip


@dataclass(frozen=True)
class ExpandedShape:
    """What the machine code depends on besides the card.

    plain, value: numbers of a head's keys that are not rotated, and of its values
    parts:        of ranks that keep latents together; then ``latents`` has blocks of one's own tokens
    """

    latents: LatentShape
    plain: int
    value: int
    parts: int = 1


def variants_of(shape: ExpandedShape, sm: int) -> tuple[Variant, Variant]:
    """What gathers latents, and what attends to what they make."""
    return _gather(shape.latents), _attend(shape, sm)


@dataclass
class ExpandedLatents:
    """Attention of prompts to keys and values made of latents; all calls only enqueue, on the current stream.

    piece: tokens of a context at a time
    """

    parts: GpuParts
    piece: int = PIECE_TOKENS

    @property
    def launcher(self) -> TritonLauncher:
        return self.parts.launcher

    def prepare(self, shape: ExpandedShape) -> None:
        """Compile or load all that calls with such arguments need."""
        for variant in variants_of(shape, self.launcher.sm):
            self.launcher.prepare(variant)

    def attend(
        self,
        query: Array,
        up: UpProjections,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        out: Array,
        sequences: Iterable[int] | None = None,
        ranks: TokenRanks | None = None,
    ) -> None:
        """See `LatentKernels.attend_latent`; of these sequences, by default all with more than one query.

        ranks: that keep latents together, see `SharedLatentKernels.attend_shared`; they bring each other each piece
        """
        assert batch.on_host is not None, "who calls this knows the lengths"
        (_, plain, rank), size = up.key.shape, query.shape[2]
        latents = LatentShape.of(layout, query.shape[1], rank, size - plain, query.dtype.name)
        shape = ExpandedShape(latents, plain, up.value.shape[2], 1 if ranks is None else ranks.share.parts)
        given = {**latent_arguments(arena, layout), **batch_arguments(batch, heads)}
        given["score_scale"] = LOG2E * scale
        cu, lens = batch.on_host.cu_seqlens_q, batch.on_host.seq_lens
        for sequence in np.flatnonzero(np.diff(cu) > 1).tolist() if sequences is None else sequences:
            rows = slice(int(cu[sequence]), int(cu[sequence + 1]))
            given["sequence"] = sequence
            self._attend_prompt(query[rows], up, int(lens[sequence]), shape, given, ranks, out[rows])

    def _attend_prompt(
        self,
        query: Array,
        up: UpProjections,
        context: int,
        shape: ExpandedShape,
        given: dict[str, Argument],
        ranks: TokenRanks | None,
        out: Array,
    ) -> None:
        (tokens, heads, _), width = query.shape, shape.latents.rank + shape.latents.rotated
        piece = -(-min(self.piece, context) // shape.parts) * shape.parts
        of_head = piece * (shape.plain + shape.value) * query.itemsize + tokens * (shape.value + 2) * 4
        each = max(1, min(heads, PIECE_BYTES // of_head))
        empty, itemsize = self.parts.empty, query.itemsize
        latents, keys, values = (
            empty((piece, *of), query.dtype) for of in ((width,), (each, shape.plain), (each, shape.value))
        )
        state = [empty((tokens, each, *of), np.float32) for of in ((shape.value,), (), ())]
        given = given | {
            "latents": address_of(latents),
            "keys": address_of(keys), "values": address_of(values),
            **{name: address_of(array) for name, array in zip(("mixed", "top", "sums"), state, strict=True)},
            "queries": tokens, "context": context,
            "query_stride": query.strides[0] // itemsize, "out_stride": out.strides[0] // itemsize,
        }  # fmt: skip
        gather, attend = variants_of(shape, self.launcher.sm)
        rows = dict(attend.constants)["BLOCK_M"]
        for begin in range(0, heads, each):
            some = slice(begin, min(begin + each, heads))
            count = some.stop - begin
            part = UpProjections(up.key[some], up.value[some])
            given |= {"query": address_of(query[:, some]), "out": address_of(out[:, some]), "heads": count}
            for first in range(0, context, piece):
                length = min(piece, context - first)
                given |= {
                    "first": first, "count": length,
                    "is_first": first == 0, "is_last": first + length == context,
                }  # fmt: skip
                self._bring(latents[: -(-length // shape.parts) * shape.parts], gather, given, ranks)
                made = _side_by_side(keys, length, count), _side_by_side(values, length, count)
                self._expand(latents[:length, : shape.latents.rank], part, *made)
                self._launch(attend, -(-tokens // rows) * count, given)

    def _bring(self, latents: Array, gather: Variant, given: dict[str, Argument], ranks: TokenRanks | None) -> None:
        """``latents [count, width]`` of a sequence from ``first`` on; ``ranks`` bring as many each, in turn."""
        if ranks is None:
            self._launch(gather, -(-len(latents) // GATHERED), given | {"gathered": address_of(latents)})
            return
        parts, width = ranks.share.parts, latents.shape[1]
        own = self.parts.empty((len(latents) // parts, width), latents.dtype)
        first = int(given["first"]) // parts
        here = given | {"gathered": address_of(own), "first": first, "count": len(own)}
        self._launch(gather, -(-len(own) // GATHERED), here)
        latents.reshape(len(own), parts, width)[:] = ranks.all_gather(own).transpose(1, 0, 2)

    def _expand(self, compressed: Array, up: UpProjections, keys: Array, values: Array) -> None:
        """``keys`` and ``values [tokens, heads, ...]`` of ``compressed [tokens, rank]``."""
        every = np.broadcast_to(compressed[:, None, :], (len(compressed), len(up.key), compressed.shape[1]))
        self.parts.multiply_heads(every, up.key.transpose(0, 2, 1), keys)
        self.parts.multiply_heads(every, up.value, values)

    def _launch(self, variant: Variant, programs: int, given: dict[str, Argument]) -> None:
        self.launcher.launch(variant, (programs, 1, 1), [given[name] for name, _ in variant.signature])


def _side_by_side(array: Array, tokens: int, heads: int) -> Array:
    """``[tokens, heads, size]`` without gaps in the memory of an array of more of both."""
    return array.reshape(-1)[: tokens * heads * array.shape[2]].reshape(tokens, heads, array.shape[2])


@lru_cache
def _gather(shape: LatentShape) -> Variant:
    constants = {**latent_constants(shape), "ROWS": GATHERED}
    return Variant("gather_latents", typed(_GATHER, shape), tuple(constants.items()), ("block_bytes",), 8, 1, MODULE)


@lru_cache
def _attend(shape: ExpandedShape, sm: int) -> Variant:
    latents = shape.latents
    tile = _tile(latents.q_dtype, sm)
    constants = {
        "PLAIN": shape.plain, "BLOCK_K": power_of_two(shape.plain), "ROTATED": latents.rotated,
        "BLOCK_P": power_of_two(latents.rotated), "RANK": latents.rank, "VALUE": shape.value,
        "BLOCK_V": power_of_two(shape.value), "BLOCK_SIZE": latents.block_size * shape.parts,
        "BLOCK_M": tile.rows, "BLOCK_N": tile.keys,
    }  # fmt: skip
    multiples = ("query", "out", "keys", "values", "latents", "mixed", "query_stride", "out_stride")
    even = shape.plain % 16 == shape.value % 16 == latents.rank % 16 == latents.rotated % 16 == 0
    return Variant(
        "attend_expanded", typed(_ATTEND, latents), tuple(constants.items()), multiples if even else (), tile.warps,
        tile.stages, MODULE,
    )  # fmt: skip


def _tile(dtype: str, sm: int) -> Tile:
    if dtype == "float32":
        return Tile(16, 16, 4, 2)
    return Tile(128, 64, 8, 2) if sm >= 90 else Tile(64, 32, 4, 2)
