"""Attention in plain NumPy: the definition that every other implementation is tested against."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import TokenShare
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.bfloat16 import to_bits, to_float32
from headwise.kernels.gqa import QUANTISED, bit_views, kv_dtype_of, kv_views, quantise, scale_views
from headwise.kernels.nibbles import INT4, pack, unpack
from headwise.kernels.shared_context import SharedContext, gather_all
from headwise.kernels.token_ranks import TokenRanks, own_rows

Positions = NDArray[np.int64]
Index = tuple[NDArray[np.int32], Any, Positions]


class ReferenceKernels:
    """Clarity over speed: one (sequence, KV head) at a time, in float64, whatever the cache holds."""

    name = "reference"
    sees_chunks = True

    def write_kv(
        self,
        key: NDArray[Any],
        value: NDArray[Any],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
    ) -> None:
        """See `AttentionKernels.write_kv`."""
        for sequence, rows, positions in sequences_of(batch):
            for head, (group, slot) in enumerate(zip(heads.group, heads.slot, strict=True)):
                blocks = blocks_of(batch, sequence, group, positions, layout.block_size)
                mapped = blocks >= 0
                at = (blocks[mapped], slot, positions[mapped] % layout.block_size)
                _store(arena, layout, at, (key[rows, head][mapped], value[rows, head][mapped]))

    def attend(
        self,
        query: NDArray[Any],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        softcap: float,
        out: NDArray[Any],
        sink_logits: NDArray[np.float32] | None = None,
    ) -> None:
        """See `AttentionKernels.attend`. A visible token whose block is ``-1`` is treated as not visible."""
        kv_heads = len(heads.group)
        share = query.shape[1] // kv_heads
        for sequence, rows, positions in sequences_of(batch):
            ends = _seen_up_to(batch, heads, rows, positions)
            context = np.arange(ends.max())
            for head in range(kv_heads):
                window, sink = int(heads.window[head]), int(heads.sink[head])
                visible = visible_to(positions, context, window, sink, heads.chunked, ends)
                seen = context[visible.any(axis=0)]
                blocks = blocks_of(batch, sequence, heads.group[head], seen, layout.block_size)
                seen, blocks = seen[blocks >= 0], blocks[blocks >= 0]
                at = (blocks, heads.slot[head], seen % layout.block_size)
                queries = slice(head * share, (head + 1) * share)
                key, value = _load(arena, layout, at)
                out[rows, queries] = softmax_attention(
                    query[rows, queries], key, value, visible[:, seen], scale, softcap,
                    None if sink_logits is None else sink_logits[queries].astype(np.float64),
                )  # fmt: skip

    def write_own(
        self,
        key: NDArray[Any],
        value: NDArray[Any],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        share: TokenShare,
    ) -> None:
        """See `SharedKernels.write_own`."""
        rows, own = own_rows(batch, share)
        self.write_kv(key[rows], value[rows], arena, layout, own, heads)

    def attend_shared(
        self,
        query: NDArray[Any],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
        *,
        scale: float,
        softcap: float,
        out: NDArray[Any],
        sink_logits: NDArray[np.float32] | None = None,
    ) -> None:
        """See `SharedKernels.attend_shared`: each rank has all that its queries see sent to it."""

        def attend(whole: SharedContext) -> None:
            self.attend(
                query[whole.rows], whole.arena, whole.layout, whole.batch, whole.heads, scale=scale, softcap=softcap,
                out=out[whole.rows], sink_logits=sink_logits,
            )  # fmt: skip

        gather_all(ranks, (arena, layout, batch, heads), attend)


def sequences_of(batch: AttentionBatch) -> Iterator[tuple[int, slice, Positions]]:
    """(index, its query rows, their positions) of every sequence that has queries."""
    for sequence, length in enumerate(batch.seq_lens):
        first, last = int(batch.cu_seqlens_q[sequence]), int(batch.cu_seqlens_q[sequence + 1])
        if last > first:
            yield sequence, slice(first, last), np.arange(int(length) - (last - first), int(length))


def blocks_of(
    batch: AttentionBatch, sequence: int, group: int, positions: Positions, block_size: int
) -> NDArray[np.int32]:
    row: NDArray[np.int32] = batch.block_tables[sequence * batch.groups + int(group)]
    return row[positions // block_size]


def _store(arena: NDArray[np.uint8], layout: BlockLayout, at: Index, pair: tuple[NDArray[Any], NDArray[Any]]) -> None:
    dtype = kv_dtype_of(layout)
    for role, rows in enumerate(pair):
        if dtype == "bfloat16":
            bit_views(arena, layout)[role][at] = to_bits(rows)
            continue
        if dtype == INT4:
            rows, scale_views(arena, layout)[role][at] = pack(rows)
        elif dtype in QUANTISED:
            rows, scale_views(arena, layout)[role][at] = quantise(rows, dtype)
        kv_views(arena, layout)[role][at] = rows


def _load(arena: NDArray[np.uint8], layout: BlockLayout, at: Index) -> list[NDArray[np.float64]]:
    """Keys and values at ``at``, each ``float64 [tokens, its size]``."""
    if kv_dtype_of(layout) == "bfloat16":
        return [to_float32(view[at]).astype(np.float64) for view in bit_views(arena, layout)]
    if kv_dtype_of(layout) == INT4:
        stored = zip(kv_views(arena, layout), scale_views(arena, layout), strict=True)
        return [unpack(codes[at], scales[at]).astype(np.float64) for codes, scales in stored]
    pair = [view[at].astype(np.float64) for view in kv_views(arena, layout)]
    if kv_dtype_of(layout) not in QUANTISED:
        return pair
    return [
        rows * view[at].astype(np.float64)[:, None] for rows, view in zip(pair, scale_views(arena, layout), strict=True)
    ]


def _seen_up_to(batch: AttentionBatch, heads: HeadTable, rows: slice, positions: Positions) -> Positions:
    """How many tokens of their sequence, the first ones, these rows may see."""
    sees = batch.sees_of(heads)
    return positions + 1 if sees is None else sees[rows].astype(np.int64)


def visible_to(
    queries: Positions, keys: Positions, window: int, sink: int, chunked: bool = False, ends: Positions | None = None
) -> NDArray[np.bool_]:
    """``bool [queries, keys]``: the rule of `HeadPolicy`, or of chunks (`HeadTable.chunked`).

    ends: see `AttentionBatch.sees`; None: queries see up to themselves
    """
    distance = queries[:, None] - keys[None, :]
    before = distance >= 0 if ends is None else keys[None, :] < ends[:, None]
    if window == 0:
        return before
    near = queries[:, None] // window == keys[None, :] // window if chunked else distance < window
    return before & (near | (keys < sink)[None, :])


def softmax_attention(
    query: NDArray[Any],
    key: NDArray[Any],
    value: NDArray[Any],
    visible: NDArray[np.bool_],
    scale: float,
    softcap: float,
    sink_logits: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """``query [T, n, D]`` over ``key [K, D]`` and ``value [K, V]`` under ``visible [T, K]`` -> ``[T, n, V]``.

    ``sink_logits`` are ``[n]``.

    A query that sees nothing gets zeros.
    """
    scores = scale * np.einsum("tnd,kd->tnk", query.astype(np.float64), key.astype(np.float64))
    if softcap > 0:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(visible[:, None, :], scores, -np.inf)
    highest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    if sink_logits is not None:
        highest = np.maximum(highest, sink_logits[:, None])
    reference = np.where(np.isfinite(highest), highest, 0.0)
    weights = np.exp(scores - reference)
    total = weights.sum(axis=-1, keepdims=True)
    if sink_logits is not None:
        total = total + np.exp(sink_logits[:, None] - reference)
    mixed: NDArray[np.float64] = weights @ value.astype(np.float64)
    result: NDArray[np.float64] = np.divide(mixed, total, out=np.zeros_like(mixed), where=total != 0)
    return result
