"""In which order requests that share prefixes are sent.

Requests of a file are a tree of prefixes. Visited depth first, each prefix is computed once and needs to be cached only
for as long as its requests last, however many others the file has: no order computes less (Zheng et al., SGLang,
arXiv 2312.07104, theorem 3.1). Sorting what requests begin with, piece by piece, is such a visit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

PIECE_BYTES = 256
"""Of a prompt's text that is compared at once: about a block of 64 tokens."""
MAX_PIECES = 1 << 14
"""Prompts that are alike so far (4 MiB) are neighbours in the order of their file."""

_LEADING = (
    "model",
    "cache_salt",
    "chat_template_kwargs",
    "reasoning_effort",
    "tools",
    "system",
    "instructions",
    "messages",
    "input",
    "prompt",
)
"""What decides which cached tokens a request can use, in about the order in which prompts have it."""


def pieces_of(body: Mapping[str, Any]) -> bytes:
    """What a request's prompt begins with, in an order of its own: a hash of eight bytes for each piece of its text.

    Two requests have as many first hashes in common as they have pieces in common.
    """
    leading = {name: body[name] for name in _LEADING if body.get(name) is not None}
    text = json.dumps(leading, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    return b"".join(
        xxhash.xxh3_64_digest(text[begin : begin + PIECE_BYTES])
        for begin in range(0, min(len(text), PIECE_BYTES * MAX_PIECES), PIECE_BYTES)
    )


def sharing_order(pieces: Sequence[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The requests in an order in which those with a common prefix are neighbours, equals in the order of the file.

    Returns ``order [n]``, places in ``pieces``, and ``shared [n]``: how many pieces each has in common with the one
    before it in that order; 0 for the first.
    """
    order = np.array(sorted(range(len(pieces)), key=pieces.__getitem__), np.int64)
    shared = np.zeros(len(pieces), np.int64)
    for place in range(1, len(pieces)):
        shared[place] = _common(pieces[order[place - 1]], pieces[order[place]])
    return order, shared


def _common(first: bytes, second: bytes) -> int:
    """How many hashes two lists begin with in common."""
    length = min(len(first), len(second)) // 8
    differ = np.nonzero(np.frombuffer(first, "<u8", length) != np.frombuffer(second, "<u8", length))[0]
    return int(differ[0]) if differ.size else length
