"""Chained hashes of token blocks: equal hashes mean an equal prefix, of the same model, tenant and adapter.

SHA-256 cut to 128 bits: a collision would serve one request's cache to another, so the hash must be strong; it
costs 90 us for 10,000 tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HASH_BYTES = 16

_KEPT = slice(HASH_BYTES)


class ExtraKey(NamedTuple):
    """A multimodal item over the tokens ``[start, end)``.

    content: the hash of it
    columns: of an item whose tokens lie on a grid, row by row: how wide that is; 0: they follow each other as text does
    later:   of an item that goes on with the grid of the one in front, as a video's do: how many positions later in
             time its tokens are; -1: it has a place of its own
    """

    start: int
    end: int
    content: str
    columns: int = 0
    later: int = -1


def hash_seed(model: str, cache_salt: str = "", lora_id: str = "") -> bytes:
    """The hash that a chain starts from. Parts are length-prefixed, so no two triples give one seed.

    Raises ValueError without a ``model``: hashes of any two would be taken for one another's.
    """
    if not model:
        raise ValueError("blocks are hashed for a model whose identity is known")
    digest = sha256()
    for part in (model, cache_salt, lora_id):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()[:HASH_BYTES]


def extend_hashes(
    hashes: list[bytes],
    seed: bytes,
    tokens: NDArray[np.int32],
    block_size: int,
    extra_keys: Sequence[ExtraKey] = (),
) -> None:
    """Append to ``hashes`` those of the full blocks of ``tokens`` (``int32 [n]``), which follow those of ``hashes``.

    extra_keys: of all items of the sequence, one behind the other
    """
    count, first = len(tokens) // block_size, len(hashes) * block_size
    whole = np.ascontiguousarray(tokens[: count * block_size], dtype=np.int32)
    blocks: list[bytes] = whole.view(f"V{4 * block_size}").tolist()
    if extra_keys and extra_keys[-1].end > first:
        begins, ends = [each.start for each in extra_keys], [each.end for each in extra_keys]
        for index, start in enumerate(range(first, first + count * block_size, block_size)):
            overlapping = slice(bisect_right(ends, start), bisect_left(begins, start + block_size))
            blocks[index] += _placed(extra_keys[overlapping], start)
    previous = hashes[-1] if hashes else seed
    hashes += [previous := sha256(previous + block).digest()[_KEPT] for block in blocks]


def _placed(items: Sequence[ExtraKey], first: int) -> bytes:
    """Items, with where they lie relative to the token ``first``."""
    return "".join(
        f"{start - first}:{end - first}:{columns}:{later}:{len(content)}:{content};"
        for start, end, content, columns, later in items
    ).encode()
