"""Where tokens are that have three positions each: in time, in rows and in columns (M-RoPE).

Of text all three are alike and count on. An item on a grid stands at one time; rows and columns of its tokens count
from there on, and what comes behind it goes on behind its longer side (Wang et al., arXiv 2409.12191, section 2.1):

    tokens    a  b | 2 rows of 3 columns  | c  d
    time      0  1 | 2  2  2   2  2  2    | 5  6
    row       0  1 | 2  2  2   3  3  3    | 5  6
    column    0  1 | 2  3  4   2  3  4    | 5  6
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_hash import ExtraKey
from headwise.runtime.models.position_config import AXES


def places_of(items: Iterable[ExtraKey], start: int, end: int) -> NDArray[np.int32]:
    """``[end - start, 3]``: of a sequence's tokens ``[start, end)``. items: all of it, by their places"""
    tokens = np.arange(start, end, dtype=np.int32)
    places = np.repeat(tokens[:, None], AXES, axis=1)
    for each in items:
        if not each.columns or each.start >= end:
            continue
        rows, columns = np.divmod(tokens - each.start, each.columns)
        is_in = (tokens >= each.start) & (tokens < each.end)
        is_behind = tokens >= each.end
        base = places[:, 0] - (tokens - each.start)  # where the item stands, by what came before it
        places[is_in] = np.stack([base, base + rows, base + columns], axis=1)[is_in]
        places[is_behind] -= np.int32(saved_by(each))
    return places


def saved_by(item: ExtraKey) -> int:
    """How many positions fewer than tokens an item takes."""
    if not item.columns:
        return 0
    length = item.end - item.start
    return length - max(item.columns, length // item.columns)
