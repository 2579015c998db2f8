"""The contract of kernels of multi-head latent attention (MLA). What `headwise.kernels.base` says of kernels holds.

Each query head has keys and values of its own, made of the cached latents by its up-projections ``K`` and ``V``: a key
is ``[latent[:rank] @ K.T | latent[rank:]]``, a value ``latent[:rank] @ V``. There are two ways to the same numbers:

expanded  make keys and values of the latents, then attend to them. Least arithmetic for many queries.
absorbed  ``query @ key = [query @ K | rotated query] @ latent``, and the sum of values is the sum of latents times
          ``V``: attend to the latents as they lie in the cache, which are read once for all heads. Least to read.

Which one is taken, and for which sequences, is the implementation's choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import ALL_TOKENS, TokenShare
from headwise.kernels.base import Array, AttentionBatch, HeadTable
from headwise.kernels.token_ranks import TokenRanks


@dataclass(frozen=True)
class UpProjections:
    """What one rank's query heads of a layer make of a latent; both C-contiguous, on a CPU float32.

    key:         ``[q_heads, plain, rank]``, the part of the keys that is not rotated
    value:       ``[q_heads, rank, value_dim]``
    sink_logits: float32 ``[q_heads]``, as for `AttentionKernels.attend`; None: there are none. Kernels of a GPU take
                 none
    """

    key: Array
    value: Array
    sink_logits: Array | None = None

    def of_heads(self, some: slice) -> UpProjections:
        """Those of some of the heads."""
        sinks = None if self.sink_logits is None else self.sink_logits[some]
        return UpProjections(self.key[some], self.value[some], sinks)


def saves_arithmetic(up: UpProjections, queries: Any, contexts: Any, expansion_cost: float) -> bool:
    """Whether the expanded form is less arithmetic for sequences of so many ``queries`` and tokens of ``contexts``.

    Products with up-projections are of the whole context there. In the absorbed form they are of queries, whose
    products with a token are longer.

    queries, contexts: int64 arrays ``[sequences]``, or numbers
    expansion_cost:    of a number that is expanded, in those of a product
    """
    _, plain, rank = up.key.shape
    value_dim = up.value.shape[2]
    projecting = rank * (plain + value_dim)
    saved = 2 * rank - plain - value_dim  # of each query's product with a key and a value
    expanding = expansion_cost * contexts * projecting
    return bool(np.sum(expanding) < np.sum(queries * (projecting + contexts * saved)))


class LatentKernels(Protocol):
    """Latent write and attention. A layer has one member: its `HeadTable` has one entry."""

    name: str

    def write_latent(
        self, latent: Array, arena: Array, layout: BlockLayout, batch: AttentionBatch, heads: HeadTable
    ) -> None:
        """Store this step's latents ``[tokens, width]``, whose part behind the rank is rotated, at their positions.

        A token whose block is ``-1`` is skipped.
        """

    def attend_latent(
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
    ) -> None:
        """Causal attention of ``query [tokens, q_heads, plain + rotated]`` into ``out [tokens, q_heads, value_dim]``.

        The last ``width - rank`` numbers of a query are rotated. What a query sees is as for
        `AttentionKernels.attend`; scores are ``scale * query @ key``.
        """


@runtime_checkable
class RotatingLatentKernels(LatentKernels, Protocol):
    """Kernels that can rotate what they write on the way."""

    def write_latent_rope(
        self,
        query: Array,
        compressed: Array,
        shared: Array,
        cosines: Array,
        sines: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        share: TokenShare = ALL_TOKENS,
    ) -> None:
        """Rotate the last numbers of ``query [tokens, q_heads, plain + rotated]`` in place, and store latents
        ``[compressed [tokens, rank] | shared [tokens, rotated]]``, the second part of which is rotated.

        ``cosines``, ``sines``: float32 ``[tokens, 1, rotated / 2]``, as for `RotatingKernels.write_kv_rope`. ``shared``
        is left as it is. The rest is as for `write_latent`, or of another ``share`` than all tokens as for
        `SharedLatentKernels.write_own`.
        """


@runtime_checkable
class SharedLatentKernels(LatentKernels, Protocol):
    """Kernels for ranks that keep latents together, each those of its own tokens.

    ``layout`` is that of blocks of a rank's own tokens (`BlockLayout.own`); all else is of the whole sequence: lengths
    and positions of a batch, and its block tables, which are the same on all ranks. A token at position ``p`` lies in
    column ``p // (parts * layout.block_size)`` at place ``p // parts % layout.block_size``. Groups are full: a query
    sees all tokens up to its own. Kernels that rotate what they write (`RotatingLatentKernels`) take ``share`` there.
    """

    def write_own(
        self,
        latent: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        share: TokenShare,
    ) -> None:
        """`write_latent` of those of the step's ``latent [tokens, width]`` that are of ``share``."""

    def attend_shared(
        self,
        query: Array,
        up: UpProjections,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
        *,
        scale: float,
        out: Array,
    ) -> None:
        """`attend_latent` over what all ``ranks`` keep: they call it together, each with its own heads' queries, of
        equally many heads, of the same batch. Which form is taken must hang on what all of them know alike."""
