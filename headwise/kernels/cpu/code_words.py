# mypy: ignore-errors
"""Codes of 4, 5 and 6 bits in words of 16 bits: how packing writes them, and tiles read them.

Of a column and a turn, codes at even depth lie in words of their own, and so do those at odd depth. Each word has as
many whole codes as fit, the first of them lowest. The bits above those, from word to word, are one more row of bits,
which has the turn's last codes: so no bit is left empty, and most codes take one shift to be read.

    bits  in a word  bits above  words  depth of a turn
       4          4           0      1                8
       5          3           1      5               32
       6          2           4      3               16

A code's *place* is its number among those of its words: half its depth within the turn.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import numba
import numpy as np

WORD_BITS = 16

_pasted = numba.njit(inline="always", nogil=True, error_model="numpy")


class Piece(NamedTuple):
    """``count`` bits of a code from its bit ``to`` on, which lie in ``word`` from its bit ``at`` on."""

    word: int
    at: int
    to: int
    count: int


def words_of(bits: int) -> int:
    """Words of a turn, of one column and half of the depth."""
    return bits // gcd(bits, WORD_BITS % bits)


def depth_of(bits: int) -> int:
    """Depth of a turn."""
    return 2 * words_of(bits) * WORD_BITS // bits


def pieces_of(bits: int, place: int) -> list[Piece]:
    """Where the code at ``place`` lies."""
    each, above = divmod(WORD_BITS, bits)
    whole = each * words_of(bits)
    if place < whole:
        return [Piece(place // each, place % each * bits, 0, bits)]
    pieces, done = [], 0
    while done < bits:
        word, from_there = divmod((place - whole) * bits + done, above)
        count = min(bits - done, above - from_there)
        pieces.append(Piece(word, WORD_BITS - above + from_there, done, count))
        done += count
    return pieces


# --- compiled -------------------------------------------------------------------------------------------------------


def pack_and_get(bits: int) -> tuple[Any, Any]:
    """Make the functions that pack a turn's codes of one column and half of the depth, and that read one of them.

    codes: a pointer to bytes, of which every second one is a code of theirs
    words: a pointer; theirs are ``words[0]``, ``words[step]`` and so on
    """
    each, above, count = WORD_BITS // bits, WORD_BITS % bits, words_of(bits)
    whole, lowest = each * count, WORD_BITS - above
    places, mask, mask_above = depth_of(bits) // 2, (1 << bits) - 1, (1 << above) - 1

    @_pasted
    def pack(codes, words, step):
        last = 0
        for place in range(whole, places):
            last |= np.int64(codes[2 * place]) << ((place - whole) * bits)
        for word in range(count):
            value = (last >> (word * above) & mask_above) << lowest
            for i in range(each):
                value |= np.int64(codes[2 * (word * each + i)]) << (i * bits)
            words[word * step] = np.uint16(value)

    @_pasted
    def get(words, step, place):
        if place < whole:
            return np.int64(words[place // each * step]) >> (place % each * bits) & mask
        last = 0
        for word in range(count):
            last |= np.int64(words[word * step]) >> lowest << (word * above)
        return last >> ((place - whole) * bits) & mask

    return pack, get
