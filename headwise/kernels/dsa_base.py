"""The contract of kernels of latent attention with an indexer (DSA). What `headwise.kernels.mla_base` says holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import ALL_TOKENS, TokenShare
from headwise.kernels.base import Array, AttentionBatch, HeadTable
from headwise.kernels.mla_base import LatentKernels, RotatingLatentKernels, SharedLatentKernels, UpProjections
from headwise.kernels.token_ranks import TokenRanks


@dataclass(frozen=True)
class IndexQueries:
    """What a layer's indexer asks with, for its tokens in a step: the same on every rank.

    float32 and C-contiguous on a CPU; on a GPU of the model's dtype, and tokens may lie apart.

    query:   ``[tokens, index_heads, index_dim]``, rotated as keys are
    weights: ``[tokens, index_heads]``, of any sign
    top:     how many tokens are chosen for a query, at most
    """

    query: Array
    weights: Array
    top: int

    def of_rows(self, rows: Any) -> IndexQueries:
        """Those of some tokens: a slice, or an array of their numbers."""
        return IndexQueries(self.query[rows], self.weights[rows], self.top)


@dataclass(frozen=True)
class IndexKeys:
    """A step's keys of a layer's indexer as they are projected, and the layer norm that they go through.

    rows:         ``[tokens, index_dim]``
    weight, bias: float32 ``[index_dim]``
    """

    rows: Array
    weight: Array
    bias: Array
    eps: float


class Chosen:
    """The tokens that a step's queries see, as the kernels that chose them have it.

    Layers whose members are in the same group, so that their tokens lie in the same blocks, can all attend to what one
    of them chose. It holds nothing of what attended to it before.
    """


class IndexedKernels(LatentKernels, Protocol):
    """Write and attention of latents that an indexer chooses. Its keys may lie beside the latents, or in members of
    their own."""

    def write_index(
        self, key: Array, arena: Array, layout: BlockLayout, batch: AttentionBatch, heads: HeadTable
    ) -> None:
        """Store the indexer's keys of this step's tokens, ``[tokens, index_dim]``, as `write_latent` does latents."""

    def choose(
        self, index: IndexQueries, arena: Array, layout: BlockLayout, batch: AttentionBatch, heads: HeadTable
    ) -> Chosen:
        """Of what is visible to each query, the ``index.top`` best tokens by their keys, or all of fewer.

        A token's score is ``sum over heads of weight * max(query @ key, 0)``. Of equal scores the earlier token's
        counts as the higher. Published code computes them in FP8, for which it turns queries and keys by one Hadamard
        matrix: that leaves their products as they are, so it is left out here.

        layout, heads: of the keys
        """

    def attend_chosen(
        self,
        query: Array,
        up: UpProjections,
        chosen: Chosen,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        out: Array,
    ) -> None:
        """`attend_latent`, but each query sees only what is chosen for it, of the same ``batch``. What a query sees
        is NaN where a score is."""


@runtime_checkable
class SharedIndexedKernels(IndexedKernels, SharedLatentKernels, Protocol):
    """Kernels for ranks that keep latents, and the keys that these are chosen by, together. Those that rotate what they
    write (`RotatingIndexedKernels`) take ``share`` there."""

    def write_index_own(
        self, key: Array, arena: Array, layout: BlockLayout, batch: AttentionBatch, heads: HeadTable, share: TokenShare
    ) -> None:
        """`write_index` of those of the step's keys that are of ``share``."""

    def choose_shared(
        self,
        query: Array,
        up: UpProjections,
        index: IndexQueries,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
    ) -> Chosen:
        """`choose` of what all ``ranks`` keep: the best of all of it.

        query, up: whose shapes those of all layers that see it are; nothing is read of them
        """

    def attend_chosen_shared(
        self,
        query: Array,
        up: UpProjections,
        chosen: Chosen,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
        *,
        scale: float,
        out: Array,
    ) -> None:
        """`attend_chosen` of what all ``ranks`` keep. As `attend_shared`."""


@runtime_checkable
class RotatingIndexedKernels(IndexedKernels, RotatingLatentKernels, Protocol):
    """Kernels that can norm and rotate what they write on the way."""

    def write_index_rope(
        self,
        index: IndexQueries,
        keys: IndexKeys,
        cosines: Array,
        sines: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        share: TokenShare = ALL_TOKENS,
    ) -> None:
        """Norm ``keys``, rotate their first numbers, and store them; rotate those of ``index.query`` in place.

        ``cosines``, ``sines``: float32 ``[tokens, 1, rotated / 2]``. ``keys.rows`` are left as they are. The rest is as
        for `write_index`, or of another ``share`` than all tokens as for `SharedIndexedKernels.write_index_own`.
        """
