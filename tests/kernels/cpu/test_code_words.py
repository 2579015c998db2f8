"""Codes of few bits lie in words without an empty bit, and each is found where it was written."""

from __future__ import annotations

import numpy as np
import pytest

from headwise.kernels.cpu.code_words import WORD_BITS, depth_of, pieces_of, words_of

BITS = [4, 5, 6]


@pytest.mark.parametrize(("bits", "words", "depth"), [(4, 1, 8), (5, 5, 32), (6, 3, 16)])
def test_a_turn_is_as_deep_as_whole_words_are_filled(bits: int, words: int, depth: int) -> None:
    assert (words_of(bits), depth_of(bits)) == (words, depth)


@pytest.mark.parametrize("bits", BITS)
def test_each_bit_of_a_turns_words_is_one_bit_of_one_code(bits: int) -> None:
    taken = np.zeros((words_of(bits), WORD_BITS), int)
    for place in range(depth_of(bits) // 2):
        of_code = np.zeros(bits, int)
        for piece in pieces_of(bits, place):
            taken[piece.word, piece.at : piece.at + piece.count] += 1
            of_code[piece.to : piece.to + piece.count] += 1
        np.testing.assert_array_equal(of_code, 1)
    np.testing.assert_array_equal(taken, 1)


@pytest.mark.parametrize("bits", BITS)
def test_most_codes_take_one_shift_to_be_read(bits: int) -> None:
    places = depth_of(bits) // 2
    assert sum(len(pieces_of(bits, place)) == 1 for place in range(places)) >= 3 * places // 4
