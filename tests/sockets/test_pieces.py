"""Messages that are cut up on one side and joined on the other."""

from __future__ import annotations

import os

import pytest

from headwise.sockets.pieces import PieceError, PieceJoiner, is_piece, split


def _join(joiner: PieceJoiner, pieces: list[bytes], sender: bytes = b"a") -> list[bytes]:
    return [whole for piece in pieces if (whole := joiner.take(sender, piece)) is not None]


@pytest.mark.parametrize("size", [101, 182, 183, 1000, 100_000])
def test_what_is_cut_up_is_joined_again(size: int) -> None:
    data, joiner = os.urandom(size), PieceJoiner(100_000)
    pieces = split(data, 100)
    assert all(is_piece(piece) and len(piece) <= 100 for piece in pieces)
    assert _join(joiner, pieces) == [data]
    assert joiner.num_bytes == 0


def test_a_short_message_stays_as_it_is() -> None:
    assert split(b"x" * 100, 100) == [b"x" * 100]


def test_messages_of_several_senders_do_not_mix() -> None:
    joiner = PieceJoiner(10_000)
    mine, yours = split(b"m" * 1000, 100), split(b"y" * 1000, 100)
    joined = []
    for a, b in zip(mine, yours, strict=True):
        joined += _join(joiner, [a], b"me") + _join(joiner, [b], b"you")
    assert joined == [b"m" * 1000, b"y" * 1000]


@pytest.mark.parametrize("lost", [0, 3, -1])
def test_a_message_of_which_a_piece_is_lost_is_dropped_and_the_next_one_joined(lost: int) -> None:
    joiner, pieces = PieceJoiner(10_000), split(b"m" * 1000, 100)
    del pieces[lost]
    assert _join(joiner, pieces + split(b"n" * 1000, 100)) == [b"n" * 1000]
    assert joiner.num_bytes == 0


def test_a_message_that_is_too_long_is_refused_as_soon_as_that_is_known() -> None:
    joiner = PieceJoiner(1000)
    assert _join(joiner, split(b"m" * 1000, 100)) == [b"m" * 1000]
    pieces = split(b"m" * 10_000, 100)
    with pytest.raises(PieceError, match="at most 1000"):
        _join(joiner, pieces[:13])
    assert joiner.num_bytes == 0


def test_a_mark_alone_is_no_piece() -> None:
    assert not is_piece(b"\xc1")
    assert not is_piece(split(bytes(1000), 100)[0][:13])
