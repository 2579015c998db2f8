"""In which order requests that share prefixes are sent.

Prompts are a tree of prefixes. Visited depth first, each prefix is computed once and needs to be cached only for as
long as its requests last, however many others there are: no order computes less, if the longest prompt can be cached
(Zheng et al., SGLang, arXiv 2312.07104, theorem 3.1). Sorting prompts piece by piece is such a visit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

PIECE_BYTES = 256
"""Of a prompt that are compared at once: 64 tokens, or about as many of a text."""
MAX_PIECES = 1 << 14
"""Prompts that are alike so far keep their order."""
_HASH_BYTES = 8


def pieces_of(prompt: bytes) -> bytes:
    """A hash for each piece of a prompt: two prompts have as many first ones in common as they have pieces."""
    view = memoryview(prompt)
    return b"".join(
        xxhash.xxh3_64_digest(view[begin : begin + PIECE_BYTES])
        for begin in range(0, min(len(prompt), PIECE_BYTES * MAX_PIECES), PIECE_BYTES)
    )


def sharing_order(pieces: Sequence[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """An order in which prompts with a common prefix are neighbours. Those that share nothing, and equal ones, keep
    their order.

    Returns ``order [n]``, places in ``pieces``, and ``shared [n]``: how many pieces each has in common with the one
    before it in that order; 0 for the first.
    """
    order = np.array(sorted(range(len(pieces)), key=pieces.__getitem__), np.int64)
    shared = np.zeros(len(pieces), np.int64)
    for place in range(1, len(pieces)):
        shared[place] = _common(pieces[order[place - 1]], pieces[order[place]])
    begins = np.flatnonzero(shared == 0)
    if not len(begins):
        return order, shared
    first = np.minimum.reduceat(order, begins)
    counts = np.diff(np.append(begins, len(order)))
    group = np.repeat(np.argsort(np.argsort(first)), counts)  # whose first prompt comes first
    moved = np.argsort(group, kind="stable")
    return order[moved], shared[moved]


def _common(first: bytes, second: bytes) -> int:
    """How many hashes two lists begin with in common."""
    length = min(len(first), len(second)) // _HASH_BYTES
    differ = np.nonzero(np.frombuffer(first, "<u8", length) != np.frombuffer(second, "<u8", length))[0]
    return int(differ[0]) if differ.size else length
