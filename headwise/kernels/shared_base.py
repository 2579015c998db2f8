"""The contract of kernels of grouped-query attention for ranks that keep a KV head together, each some tokens of it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import TokenShare
from headwise.kernels.base import Array, AttentionBatch, AttentionKernels, HeadTable
from headwise.kernels.token_ranks import TokenRanks


@runtime_checkable
class SharedKernels(AttentionKernels, Protocol):
    """Kernels for ranks that keep one KV head together, each the keys and values of its own tokens.

    ``layout`` is that of blocks of a rank's own tokens (`BlockLayout.own`); all else is of the whole sequence: lengths
    and positions of a batch, and its block tables, which are the same on all ranks. A token at position ``p`` lies in
    column ``p // (parts * layout.block_size)`` at place ``p // parts % layout.block_size``. The head has no window.
    """

    def write_own(
        self,
        key: Array,
        value: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        share: TokenShare,
    ) -> None:
        """`write_kv` of those of the step's ``key`` and ``value [tokens, 1, head_dim]`` that are of ``share``."""

    def attend_shared(
        self,
        query: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
        *,
        scale: float,
        softcap: float,
        out: Array,
        sink_logits: Array | None = None,
    ) -> None:
        """`attend` over what all ``ranks`` keep: they call it together, each with its own heads' queries, of equally
        many heads, of the same batch."""


@runtime_checkable
class SharedRotatingKernels(SharedKernels, Protocol):
    """Those that can rotate what they write on the way, and add a projection's bias before."""

    def write_own_rope(
        self,
        query: Array,
        key: Array,
        value: Array,
        cosines: Array,
        sines: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        share: TokenShare,
        bias: Array | None = None,
    ) -> None:
        """`BiasingKernels.write_kv_rope` of the step's tokens that are of ``share``; ``query`` is rotated, and has its
        bias added, of all."""
