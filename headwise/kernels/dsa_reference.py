"""Latent attention with an indexer in plain NumPy: the definition that other implementations are tested against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import TokenShare
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.dsa import key_roles, latent_roles, load_keys, store_keys
from headwise.kernels.dsa_base import Chosen, IndexQueries
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

    def choose(
        self,
        index: IndexQueries,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
    ) -> ReferenceChosen:
        """See `IndexedKernels.choose`. A visible token whose block is ``-1`` is treated as not visible."""
        found = {}
        for sequence, rows, positions in sequences_of(batch):
            context = np.arange(positions[-1] + 1)
            visible = visible_to(positions, context, int(heads.window[0]), int(heads.sink[0]))
            seen = context[visible.any(axis=0)]
            blocks = blocks_of(batch, sequence, heads.group[0], seen, layout.block_size)
            seen, blocks = seen[blocks >= 0], blocks[blocks >= 0]
            keys = load_keys(arena, layout, (blocks, heads.slot[0], seen % layout.block_size), np.float64)
            of_heads = np.maximum(np.einsum("tnd,kd->tnk", index.query[rows].astype(np.float64), keys), 0)
            scores = np.einsum("tn,tnk->tk", index.weights[rows].astype(np.float64), of_heads)
            chosen = np.zeros(visible.shape, np.bool_)
            chosen[:, seen] = best(scores, visible[:, seen], index.top)
            found[sequence] = chosen, (np.isnan(scores) & visible[:, seen]).any(axis=1)
        return ReferenceChosen(found)

    def attend_chosen(
        self,
        query: NDArray[Any],
        up: UpProjections,
        chosen: Chosen,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        out: NDArray[Any],
    ) -> None:
        """See `IndexedKernels.attend_chosen`."""
        assert isinstance(chosen, ReferenceChosen)
        width = up.key.shape[2] + query.shape[2] - up.key.shape[1]
        for sequence, rows, _ in sequences_of(batch):
            of_queries, is_broken = chosen.of_sequences[sequence]
            seen = np.flatnonzero(of_queries.any(axis=0))
            blocks = blocks_of(batch, sequence, heads.group[0], seen, layout.block_size)
            latents = load_latents(arena, layout, (blocks, heads.slot[0], seen % layout.block_size), width, np.float64)
            compressed, rotated = np.split(latents, [up.value.shape[1]], axis=1)
            for head in range(query.shape[1]):
                key = np.concatenate([compressed @ up.key[head].T.astype(np.float64), rotated], axis=1)
                value = compressed @ up.value[head].astype(np.float64)
                one, sink = slice(head, head + 1), sink_of(up, head)
                out[rows, one] = softmax_attention(
                    query[rows, one], key, value, of_queries[:, seen], scale, softcap=0.0, sink_logits=sink
                )
            out[rows][is_broken] = np.nan  # nothing can be chosen by these

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

    def choose_shared(
        self,
        query: NDArray[Any],
        up: UpProjections,
        index: IndexQueries,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
    ) -> ReferenceChosen:
        """See `SharedIndexedKernels.choose_shared`: all keys of a context are sent to each rank."""
        found: dict[int, tuple[NDArray[np.bool_], NDArray[np.bool_]]] = {}

        def choose(whole: SharedContext) -> None:
            where = whole.arena, whole.layout, whole.batch, whole.heads
            found[whole.sequence] = self.choose(index.of_rows(whole.rows), *where).of_sequences[0]

        gather_all(ranks, (arena, layout, batch, heads), choose, key_roles(layout))
        return ReferenceChosen(found)

    def attend_chosen_shared(
        self,
        query: NDArray[Any],
        up: UpProjections,
        chosen: Chosen,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
        *,
        scale: float,
        out: NDArray[Any],
    ) -> None:
        """See `SharedIndexedKernels.attend_chosen_shared`: as `attend_shared`."""
        assert isinstance(chosen, ReferenceChosen)

        def attend(whole: SharedContext) -> None:
            own = ReferenceChosen({0: chosen.of_sequences[whole.sequence]})
            where = whole.arena, whole.layout, whole.batch, whole.heads
            self.attend_chosen(query[whole.rows], up, own, *where, scale=scale, out=out[whole.rows])

        gather_all(ranks, (arena, layout, batch, heads), attend, latent_roles(layout))


@dataclass(frozen=True)
class ReferenceChosen(Chosen):
    """of_sequences: of each that has queries, ``bool [queries, tokens]``, what is chosen, and ``bool [queries]``,
    whether a score is NaN"""

    of_sequences: dict[int, tuple[NDArray[np.bool_], NDArray[np.bool_]]]


def best(scores: NDArray[np.float64], visible: NDArray[np.bool_], top: int) -> NDArray[np.bool_]:
    """``bool [queries, keys]``: the ``top`` keys of highest score that are visible, of equal ones the first."""
    order = np.argsort(np.where(visible, -scores, np.inf), axis=1, kind="stable")
    chosen = np.zeros_like(visible)
    np.put_along_axis(chosen, order[:, :top], True, axis=1)
    return chosen & visible
