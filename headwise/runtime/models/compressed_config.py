"""Geometry of attention to a window and to entries that stand for several tokens (DeepSeek-V4), and what it keeps.

A decoder layer keeps its tokens' keys in the cache of its own number. What it keeps besides lies in caches with numbers
behind those of all layers: rows that entries are made of, and entries. Rows of keys for an indexer are apart from those
of entries, which would else be larger than all entries of a block in codes, and make blocks of that size.

Entries of many tokens are small: those of several layers lie side by side in one cache, which is as large as that of
one layer's entries of few tokens. So both fill blocks of the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from headwise.cache_controller.policy import FULL, HeadPolicy

LEAST_PIECE = 16
"""Numbers: kernels read rows in vectors."""

Policies = tuple[tuple[HeadPolicy, ...], ...]

USUAL_BLOCK = 64
"""Tokens of a block for which as many layers' entries lie side by side as are as large as one layer's with an indexer.
In blocks of others they are padded, or pad those."""


@dataclass(frozen=True)
class SideCache:
    """A cache beside those of layers. layers: whose it is; width: of rows, numbers of a token in a piece of these"""

    kind: Literal["rows", "entries"]
    layers: tuple[int, ...]
    width: int = 0
    pieces: int = 1


@dataclass(frozen=True)
class Sides:
    """Where a layer keeps rows, of entries and of their keys for an indexer, and entries: numbers of caches. place: of
    its entries among those beside them"""

    rows: tuple[int, ...]
    entries: int
    place: int


@dataclass(frozen=True)
class CompressedConfig:
    """
    rates:     ``[num_layers]``, tokens that an entry of a layer stands for; 0: it has none
    indexed:   the rate of layers whose entries overlap, and are chosen by an indexer; 0: there are none
    index_heads, index_dim, index_top: of that indexer
    head_dim:  of queries, keys and entries
    rotated:   elements of these that are rotated, and of an indexer's
    q_rank:    numbers that a token's queries are made of
    out_groups, out_rank: parts of the heads whose results are projected to so many numbers each
    window:    tokens that are seen as such
    cuts:      first layers of a pipeline's stages but the first: what layers of different stages keep is never in one
               cache
    pieces:    that rows are kept in, where these are as large as `LEAST_PIECE`: a stage has fewer entries, which blocks
               are to fit
    """

    rates: tuple[int, ...]
    indexed: int
    index_heads: int
    index_dim: int
    index_top: int
    head_dim: int
    rotated: int
    q_rank: int
    out_groups: int
    out_rank: int
    window: int
    cuts: tuple[int, ...] = ()
    pieces: int = 1

    def is_indexed(self, layer: int) -> bool:
        """Whether a layer's entries overlap, and are chosen by an indexer."""
        return 0 < self.rates[layer] == self.indexed

    def row_widths(self, layer: int) -> tuple[int, ...]:
        """Numbers of a token that each thing of a layer's entries is made of: keys and gates."""
        return (4 * self.head_dim, 4 * self.index_dim) if self.is_indexed(layer) else (2 * self.head_dim,)

    def pieces_of(self, size: int) -> int:
        """That rows are kept in of which things of so many numbers are made."""
        fitting = (count for count in range(self.pieces, 0, -1) if not size % (count * LEAST_PIECE))
        return next(fitting, 1)

    def _rows(self, layer: int, thing: int) -> SideCache:
        pieces = self.pieces_of((self.head_dim, self.index_dim)[thing])
        return SideCache("rows", (layer,), self.row_widths(layer)[thing] // pieces, pieces)

    @cached_property
    def caches(self) -> tuple[SideCache, ...]:
        """Those beside the layers' own, in the order of their numbers."""
        having = [layer for layer, rate in enumerate(self.rates) if rate]
        indexed = [layer for layer in having if self.is_indexed(layer)]
        found = [self._rows(layer, 0) for layer in having] + [self._rows(layer, 1) for layer in indexed]
        found += [SideCache("entries", (layer,)) for layer in indexed]
        for rate in sorted({self.rates[layer] for layer in having} - {self.indexed}):
            each = self._beside(rate) if indexed else 1
            for first, last in pairwise([0, *self.cuts, len(self.rates)]):
                others = [layer for layer in range(first, last) if self.rates[layer] == rate]
                found += [SideCache("entries", tuple(others[at : at + each])) for at in range(0, len(others), each)]
        return tuple(found)

    def _beside(self, rate: int) -> int:
        """Layers with entries of this rate that lie side by side."""
        own = max(1, USUAL_BLOCK // self.indexed) * (self.head_dim + self.index_dim)
        return max(1, own // (max(1, USUAL_BLOCK // rate) * self.head_dim))

    @cached_property
    def _sides(self) -> dict[int, Sides]:
        first, rows = len(self.rates), dict[int, tuple[int, ...]]()
        for number, cache in enumerate(self.caches, first):
            if cache.kind == "rows":
                rows[cache.layers[0]] = (*rows.get(cache.layers[0], ()), number)
        return {
            layer: Sides(rows[layer], first + index, place)
            for index, cache in enumerate(self.caches)
            if cache.kind == "entries"
            for place, layer in enumerate(cache.layers)
        }

    def sides(self, layer: int) -> Sides | None:
        """Where a layer keeps what it keeps besides; None: it has no entries."""
        return self._sides.get(layer)

    def cache_of(self, number: int) -> SideCache | None:
        """The cache of a number; None: a layer's own."""
        return self.caches[number - len(self.rates)] if number >= len(self.rates) else None

    @property
    def policies(self) -> Policies:
        """Of all caches, ``[numbers]``: rows are needed until the last entry of them is made."""

        def of(cache: SideCache) -> HeadPolicy:
            layer = cache.layers[0]
            rate = self.rates[layer]
            return FULL if cache.kind == "entries" else HeadPolicy(window=2 * rate if self.is_indexed(layer) else rate)

        beside = ((of(cache),) * cache.pieces for cache in self.caches)
        return (*((HeadPolicy(window=self.window),) for _ in self.rates), *beside)
