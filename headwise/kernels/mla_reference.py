"""Latent attention in plain NumPy: the definition that every other implementation is tested against."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import TokenShare
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.mla import load_latents, store_latents
from headwise.kernels.mla_base import UpProjections
from headwise.kernels.reference import blocks_of, sequences_of, softmax_attention, visible_to
from headwise.kernels.shared_context import SharedContext, gather_all
from headwise.kernels.token_ranks import TokenRanks, own_rows


class ReferenceLatentKernels:
    """Clarity over speed: one (sequence, head) at a time, in the expanded form, in float64."""

    name = "reference"

    def write_latent(
        self,
        latent: NDArray[Any],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
    ) -> None:
        """See `LatentKernels.write_latent`."""
        for sequence, rows, positions in sequences_of(batch):
            blocks = blocks_of(batch, sequence, heads.group[0], positions, layout.block_size)
            mapped = blocks >= 0
            at = (blocks[mapped], heads.slot[0], positions[mapped] % layout.block_size)
            store_latents(arena, layout, at, latent[rows][mapped])

    def attend_latent(
        self,
        query: NDArray[Any],
        up: UpProjections,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        out: NDArray[Any],
    ) -> None:
        """See `LatentKernels.attend_latent`. A visible token whose block is ``-1`` is treated as not visible."""
        width = up.key.shape[2] + query.shape[2] - up.key.shape[1]
        for sequence, rows, positions in sequences_of(batch):
            context = np.arange(positions[-1] + 1)
            visible = visible_to(positions, context, int(heads.window[0]), int(heads.sink[0]))
            seen = context[visible.any(axis=0)]
            blocks = blocks_of(batch, sequence, heads.group[0], seen, layout.block_size)
            seen, blocks = seen[blocks >= 0], blocks[blocks >= 0]
            at = (blocks, heads.slot[0], seen % layout.block_size)
            latents = load_latents(arena, layout, at, width, np.float64)
            compressed, rotated = np.split(latents, [up.value.shape[1]], axis=1)
            for head in range(query.shape[1]):
                key = np.concatenate([compressed @ up.key[head].T.astype(np.float64), rotated], axis=1)
                value = compressed @ up.value[head].astype(np.float64)
                one = slice(head, head + 1)
                out[rows, one] = softmax_attention(
                    query[rows, one], key, value, visible[:, seen], scale, softcap=0.0, sink_logits=sink_of(up, head)
                )

    def write_own(
        self,
        latent: NDArray[Any],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        share: TokenShare,
    ) -> None:
        """See `SharedLatentKernels.write_own`."""
        rows, own = own_rows(batch, share)
        self.write_latent(latent[rows], arena, layout, own, heads)

    def attend_shared(
        self,
        query: NDArray[Any],
        up: UpProjections,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
        *,
        scale: float,
        out: NDArray[Any],
    ) -> None:
        """See `SharedLatentKernels.attend_shared`: each rank has all latents that its queries see sent to it."""

        def attend(whole: SharedContext) -> None:
            where = whole.arena, whole.layout, whole.batch, whole.heads
            self.attend_latent(query[whole.rows], up, *where, scale=scale, out=out[whole.rows])

        gather_all(ranks, (arena, layout, batch, heads), attend)


def sink_of(up: UpProjections, head: int) -> NDArray[np.float64] | None:
    """The logit of a head's sink, ``[1]``, if there is one."""
    return None if up.sink_logits is None else up.sink_logits[head : head + 1].astype(np.float64)
