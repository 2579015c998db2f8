"""Latent attention with an indexer in plain NumPy: the definition that other implementations are tested against."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import TokenShare
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.dsa import load_keys, store_keys
from headwise.kernels.dsa_base import IndexQueries
from headwise.kernels.mla import load_latents
from headwise.kernels.mla_base import UpProjections
from headwise.kernels.mla_reference import ReferenceLatentKernels, sink_of
from headwise.kernels.reference import blocks_of, sequences_of, softmax_attention, visible_to
from headwise.kernels.shared_context import SharedContext, gather_all
from headwise.kernels.token_ranks import TokenRanks, own_rows


class ReferenceIndexedKernels(ReferenceLatentKernels):
    """Clarity over speed: one (sequence, head) at a time, in the expanded form, in float64."""

    def write_index(
        self,
        key: NDArray[Any],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
    ) -> None:
        """See `IndexedKernels.write_index`."""
        for sequence, rows, positions in sequences_of(batch):
            blocks = blocks_of(batch, sequence, heads.group[0], positions, layout.block_size)
            mapped = blocks >= 0
            at = (blocks[mapped], heads.slot[0], positions[mapped] % layout.block_size)
            store_keys(arena, layout, at, key[rows][mapped])

    def attend_chosen(
        self,
        query: NDArray[Any],
        up: UpProjections,
        index: IndexQueries,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        out: NDArray[Any],
    ) -> None:
        """See `IndexedKernels.attend_chosen`. A visible token whose block is ``-1`` is treated as not visible."""
        width = up.key.shape[2] + query.shape[2] - up.key.shape[1]
        for sequence, rows, positions in sequences_of(batch):
            context = np.arange(positions[-1] + 1)
            visible = visible_to(positions, context, int(heads.window[0]), int(heads.sink[0]))
            seen = context[visible.any(axis=0)]
            blocks = blocks_of(batch, sequence, heads.group[0], seen, layout.block_size)
            seen, blocks = seen[blocks >= 0], blocks[blocks >= 0]
            at = blocks, heads.slot[0], seen % layout.block_size
            latents = load_latents(arena, layout, at, width, np.float64)
            keys = load_keys(arena, layout, at, np.float64)
            of_heads = np.maximum(np.einsum("tnd,kd->tnk", index.query[rows].astype(np.float64), keys), 0)
            scores = np.einsum("tn,tnk->tk", index.weights[rows].astype(np.float64), of_heads)
            is_seen = visible[:, seen]
            chosen = best(scores, is_seen, index.top)
            compressed, rotated = np.split(latents, [up.value.shape[1]], axis=1)
            for head in range(query.shape[1]):
                key = np.concatenate([compressed @ up.key[head].T.astype(np.float64), rotated], axis=1)
                value = compressed @ up.value[head].astype(np.float64)
                one = slice(head, head + 1)
                out[rows, one] = softmax_attention(
                    query[rows, one], key, value, chosen, scale, softcap=0.0, sink_logits=sink_of(up, head)
                )
            out[rows][(np.isnan(scores) & is_seen).any(axis=1)] = np.nan  # nothing can be chosen by these

    def write_index_own(
        self,
        key: NDArray[Any],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        share: TokenShare,
    ) -> None:
        """See `SharedIndexedKernels.write_index_own`."""
        rows, own = own_rows(batch, share)
        self.write_index(key[rows], arena, layout, own, heads)

    def attend_chosen_shared(
        self,
        query: NDArray[Any],
        up: UpProjections,
        index: IndexQueries,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
        *,
        scale: float,
        out: NDArray[Any],
    ) -> None:
        """See `SharedIndexedKernels.attend_chosen_shared`: each rank has all that its queries see sent to it."""

        def attend(whole: SharedContext) -> None:
            where = whole.arena, whole.layout, whole.batch, whole.heads
            of_rows = index.of_rows(whole.rows)
            self.attend_chosen(query[whole.rows], up, of_rows, *where, scale=scale, out=out[whole.rows])

        gather_all(ranks, (arena, layout, batch, heads), attend)


def best(scores: NDArray[np.float64], visible: NDArray[np.bool_], top: int) -> NDArray[np.bool_]:
    """``bool [queries, keys]``: the ``top`` keys of highest score that are visible, of equal ones the first."""
    order = np.argsort(np.where(visible, -scores, np.inf), axis=1, kind="stable")
    chosen = np.zeros_like(visible)
    np.put_along_axis(chosen, order[:, :top], True, axis=1)
    return chosen & visible
