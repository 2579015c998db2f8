"""Waits for sockets that change their mind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from headwise.liveness_clock import LivenessClock
from headwise.sockets.context import close_context, open_context
from headwise.sockets.waiting import within


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context = open_context()
    one, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    one.bind("inproc://waiting")
    other.connect("inproc://waiting")
    yield one, other
    close_context(context)


def test_what_is_there_is_taken(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    one, other = pair
    other.send(b"said")
    assert within(one, zmq.POLLIN, lambda: one.recv(zmq.NOBLOCK), LivenessClock()() + 30, LivenessClock()) == b"said"


def test_what_never_comes_is_waited_for_until_then(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    one, clock = pair[0], LivenessClock()
    assert within(one, zmq.POLLIN, lambda: one.recv(zmq.NOBLOCK), clock() + 0.05, clock) is None


def test_an_attempt_that_comes_too_late_is_made_again(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    """As a connection that could be written to, and was refused before anything was."""
    one, clock, attempts = pair[0], LivenessClock(), list[int]()

    def send() -> bool:
        attempts.append(len(attempts))
        if len(attempts) < 3:
            raise zmq.Again
        return True

    assert within(one, zmq.POLLOUT, send, clock() + 30, clock) is True
    assert attempts == [0, 1, 2]


def test_attempts_that_are_always_too_late_end_with_the_time(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    def never() -> bool:
        raise zmq.Again

    clock = LivenessClock()
    assert within(pair[0], zmq.POLLOUT, never, clock() + 0.05, clock) is None
