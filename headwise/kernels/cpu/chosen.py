"""What an indexer chooses on CPU cores: the best tokens by their scores, and where these are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.dsa_base import Chosen
from headwise.kernels.token_ranks import TokenRanks

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class ChosenTokens(Chosen):
    """
    early:     ``[sequences]``, of how many queries all that is visible is chosen; these are the first ones
    tokens:    ``int32 [others, top]``, the tokens chosen for each other query, in order, by their number in the arena,
               ``block * block_size`` and what is before them in their block; -1 behind them
    is_broken: ``bool [others]``, whether a score is NaN: nothing can be chosen by it
    """

    early: NDArray[Any]
    tokens: Ints
    is_broken: NDArray[np.bool_]

    def of_queries(self, some: slice) -> ChosenTokens:
        """Of some of those others."""
        return replace(self, tokens=self.tokens[some], is_broken=self.is_broken[some])


@dataclass(frozen=True, eq=False)
class ChosenOfRanks(Chosen):
    """The same of what ranks keep together.

    of_whole: of sequences whose contexts are gathered
    sees_all: ``bool [queries]``, whether a query sees all that is visible to it; the others' ``tokens [queries, top]``
              are those that this rank keeps, with -1 among them
    """

    of_whole: dict[int, ChosenTokens]
    sees_all: NDArray[np.bool_]
    tokens: Ints
    is_broken: NDArray[np.bool_]


def chosen(scores: Floats, top: int) -> NDArray[np.bool_]:
    """``bool [queries, keys]``: the ``top`` highest scores above minus infinity, of equal ones the first."""
    keys = scores.shape[1]
    if keys <= top:
        return scores > -np.inf
    least = np.partition(scores, keys - top, axis=1)[:, keys - top, None]
    above = scores > least
    equal = (scores == least) & (scores > -np.inf)
    room = top - above.sum(axis=1, keepdims=True)
    found: NDArray[np.bool_] = above | (equal & (np.cumsum(equal, axis=1) <= room))
    return found


def best_of_all(scores: Floats, at: Ints, ranks: TokenRanks) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which of a rank's candidates are among the best of all ranks', ``bool [queries, top]``, and of which queries a
    score is NaN, ``bool [queries]``.

    scores, at: of each query the rank's own best, ``[queries, top]``, with minus infinity behind them, and their
                positions among its own tokens
    """
    (count, top), share = scores.shape, ranks.share
    every = ranks.all_gather(scores).swapaxes(0, 1).reshape(count, share.parts * top)
    positions = ranks.all_gather(at * share.parts + share.part).swapaxes(0, 1).reshape(every.shape)
    order = np.lexsort((positions, -every), axis=1)[:, :top]
    is_best = np.zeros(every.shape, np.bool_)
    np.put_along_axis(is_best, order, True, axis=1)
    own = slice(share.part * top, (share.part + 1) * top)
    return (is_best & (every > -np.inf))[:, own], np.isnan(every).any(axis=1)


def tokens_at(at: Ints, layout: BlockLayout, tables: Ints) -> Ints:
    """`ChosenTokens.tokens` of sequences with these ``tables [queries, columns]``, ``at int32 [queries, top]`` among
    those that a rank has; -1 for none."""
    blocks = np.take_along_axis(tables, np.maximum(at, 0) // layout.block_size, axis=1)
    return np.where(at < 0, -1, blocks * layout.block_size + at % layout.block_size).astype(np.int32)


def tokens_of(is_chosen: NDArray[np.bool_], top: int, layout: BlockLayout, table: Ints) -> Ints:
    """`ChosenTokens.tokens` by their positions, ``bool [queries, keys]``."""
    positions = np.nonzero(is_chosen)[1]
    at = table[positions // layout.block_size].astype(np.int64) * layout.block_size + positions % layout.block_size
    return _one_behind_the_other(is_chosen, top, at)


def _one_behind_the_other(is_chosen: NDArray[np.bool_], top: int, at: NDArray[np.int64]) -> Ints:
    """``int32 [queries, top]``: of each query what ``at`` has of its chosen tokens, and -1 behind that."""
    rows, counts = np.nonzero(is_chosen)[0], is_chosen.sum(axis=1)
    places = np.full((len(counts), top), -1, np.int32)
    places[rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)] = at
    return places
