"""The contract of kernels of attention to a window, and behind it to entries that stand for several tokens each.

DeepSeek-V4 has two kinds of it: entries of few tokens, of which an indexer chooses those that a query sees, and which
overlap (CSA), and entries of many tokens, all of which a query sees (HCA). In both a token's key is its value, too, and
all query heads share it. Of each layer three things are kept:

window   of each token its key, as far back as the window reaches
rows     of each token what entries are made of: keys and gates, until its last entry is made; and where an indexer
         chooses, those of its keys apart
entries  each like a token's key, for good; and where an indexer chooses, its key for that

Every ``rate`` tokens make an entry, once the last of them is there, of each of its numbers by itself:

    entry i = rotated at i * rate (norm (sum over tokens of softmax over tokens (gates + bias) * keys))

where ``bias`` is a token's by its place in the entry. Where entries overlap, tokens have two keys and two gates, side
by side: an entry is made of the second ones of its own tokens and of the first ones of the tokens of the entry before.
A query at position ``p`` sees the entries of tokens up to its own, ``(p + 1) // rate``.

Source: transformers' `deepseek_v4`, with what it cites of the model's paper.
What `headwise.kernels.base` says of kernels holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol, runtime_checkable

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import Array, AttentionBatch, HeadTable
from headwise.kernels.dsa_base import IndexQueries


@dataclass(frozen=True)
class Kept:
    """Where a rank keeps one thing of a layer: a member of these blocks, or rows in several pieces, a member each.

    heads: of these members
    """

    layout: BlockLayout
    heads: HeadTable

    @property
    def pieces(self) -> int:
        count: int = self.heads.group.shape[0]
        return count

    def piece(self, index: int) -> Kept:
        """One of them alone."""
        if self.pieces == 1:
            return self
        heads, one = self.heads, slice(index, index + 1)
        return Kept(self.layout, HeadTable(heads.group[one], heads.slot[one], heads.window[one], heads.sink[one]))


@dataclass(frozen=True)
class Making:
    """How one thing is made of a layer's rows.

    size:    its numbers
    bias:    float32 ``[rate, size]``, or ``[rate, 2 * size]`` where entries overlap
    norm:    float32 ``[size]``, the weight of the RMS norm; eps: of that
    inverse: float32 ``[size / 2]``, inverse frequencies by which element ``i`` turns with ``i + size / 2``
    """

    size: int
    bias: Array
    norm: Array
    eps: float
    inverse: Array


@dataclass(frozen=True)
class EntryMaking:
    """How a layer makes its entries.

    rate:    tokens that one stands for
    overlap: whether they do
    makings: of entries, and of their keys for an indexer, if there is one. A row of each is ``[keys | gates]``, or in
             pieces ``[keys | gates]`` of so many neighbouring numbers each
    begin:   of what a block has of an entry the number with which this layer's begin: several layers' may lie side by
             side
    """

    rate: int
    overlaps: bool
    makings: tuple[Making, ...]
    begin: int = 0

    @property
    def keys(self) -> int:
        """That a token has of each thing."""
        return 2 if self.overlaps else 1

    @cached_property
    def parts(self) -> tuple[slice, ...]:
        """Which numbers are the row of each thing, where a token's lie side by side."""
        ends = list(accumulate((2 * self.keys * making.size for making in self.makings), initial=0))
        return tuple(map(slice, ends, ends[1:]))


@dataclass(frozen=True)
class Entries:
    """What a layer keeps beside its window. rows: of each making"""

    making: EntryMaking
    rows: tuple[Kept, ...]
    made: Kept


class CompressedKernels(Protocol):
    """Entries and attention; keys are written as the kernels that extend this one have it."""

    name: str

    def write_pieces(self, rows: Array, arena: Array, entries: Entries, batch: AttentionBatch) -> None:
        """Store all that the step's entries are made of, ``rows [tokens, width]``, at the tokens' positions: those of
        each thing side by side, and of each its pieces. A token whose block is ``-1`` is skipped."""

    def make_entries(self, arena: Array, entries: Entries, batch: AttentionBatch) -> None:
        """Make the entries whose last token is of this step, of the rows that are stored, and store them."""

    def attend(
        self,
        query: Array,
        arena: Array,
        window: Kept,
        entries: Entries | None,
        index: IndexQueries | None,
        batch: AttentionBatch,
        *,
        scale: float,
        sink_logits: Array,
        out: Array,
    ) -> None:
        """Attention of ``query [tokens, q_heads, size]`` into ``out``, of the same shape.

        A query sees the tokens of its window and, of the entries up to its own, all, or those that ``index`` chooses,
        as `IndexedKernels.attend_chosen` has it. Scores are ``scale * query @ key``; ``sink_logits``, float32
        ``[q_heads]``, are as for `AttentionKernels.attend`. Without ``entries`` a layer has none.
        """


class PlainCompressedKernels(CompressedKernels, Protocol):
    """Kernels that are given keys, and queries, that are turned."""

    def write_rows(self, rows: Array, arena: Array, kept: Kept, batch: AttentionBatch) -> None:
        """Store the step's ``rows [tokens, width]`` at their positions. A token whose block is ``-1`` is skipped."""


@runtime_checkable
class TurningCompressedKernels(CompressedKernels, Protocol):
    """Kernels that can turn heads in place, and keys on the way to the cache.

    Of a head of ``size`` elements ``turning`` turn with as many: element ``i`` with number ``i + size / 2``, by the
    first ones of ``cosines, sines``, float32 ``[tokens, 1, angles]``.
    """

    def write_turned(
        self,
        query: Array,
        key: Array,
        cosines: Array,
        sines: Array,
        turning: int,
        arena: Array,
        kept: Kept,
        batch: AttentionBatch,
    ) -> None:
        """Turn ``query [tokens, heads, size]`` in place, and store ``key [tokens, size]``, turned, at the tokens'
        positions. A token whose block is ``-1`` is skipped."""

    def turn(self, heads: Array, cosines: Array, sines: Array, turning: int) -> None:
        """Turn ``heads [tokens, heads, size]`` in place."""
