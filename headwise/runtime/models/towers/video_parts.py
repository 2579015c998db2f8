"""What stands in a prompt for videos of whose parts each has a grid of its own, and a text that says when it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_hash import ExtraKey


def parts_with_texts(
    texts: Sequence[Sequence[int]],
    around: tuple[int, int],
    token: int,
    grid: tuple[int, int],
    *,
    is_text_first: bool,
) -> tuple[NDArray[np.int32], tuple[ExtraKey, ...]]:
    """Tokens, and which of them are each part's.

    texts:  of each part, as tokens
    around: what stands in front of a part's own tokens, and behind them
    token:  which these are
    grid:   rows and columns of each part
    is_text_first: whether the text is in front of a part, or behind
    """
    rows, columns = grid
    length, (start, end) = rows * columns, around
    tokens: list[int] = []
    items: list[ExtraKey] = []
    for text in texts:
        tokens += [*text, start] if is_text_first else [start]
        items.append(ExtraKey(len(tokens), len(tokens) + length, "", columns))
        tokens += [*[token] * length, end]
        if not is_text_first:
            tokens += text
    return np.array(tokens, np.int32), tuple(items)
