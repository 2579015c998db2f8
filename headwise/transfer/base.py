"""The contract of streams and events: how copies run beside the forward pass, and how it waits for them.

    forward   --submit(work)-->  stream: runs its work in order, beside everything else
    forward   --wait_for(event)->  goes on once that work, and all submitted before it, is done

On a CPU a stream is a thread; on a GPU it is a CUDA stream, and ``submit`` only enqueues: there the *compute stream*
is what waits, and the host goes on at once. A stream is used by one thread: the worker's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from headwise.errors import GpuFailedError

Work = Callable[[], None]
"""A piece of work. On a GPU it enqueues copies on the current stream."""


class Event(Protocol):
    """Tells when one piece of work is over. Once it is, the event may be used for another piece."""

    @property
    def done(self) -> bool:
        """Whether the work is over, well or not. Never waits.

        Raises:
            GpuFailedError: the device has failed; no work on it is over, or will be.
        """

    @property
    def busy_s(self) -> float:
        """Seconds the work ran, once it is done."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Let the host wait until the work is over; False if it was not in time. ``None``: however long it takes.

        Raises:
            GpuFailedError: as `done`.
            Exception: what the work raised, to whoever waits.
        """


ALL = 1 << 30
"""A `Stream.lookahead` without limit."""


class Stream(Protocol):
    """Runs work in order of submission. What the caller did before it submits is done before the work begins.

    lookahead: pieces of work to submit before they are needed. On a GPU submitting itself takes the caller's time, so
               only a few are worth it
    """

    lookahead: int

    @property
    def waited_s(self) -> float:
        """Seconds that the forward pass stood still in `wait_for`, in total."""

    def make_event(self) -> Event:
        """An event to hand to `submit`, again and again."""

    def submit(self, work: Work, event: Event | None = None, *, follows: bool = False) -> Event:
        """Run ``work`` when all that was submitted before is done. Returns ``event``, or a new one, at once.

        follows: it belongs to the piece before, and need not wait for what the caller did since that was submitted

        What the work raises is kept in the event; the stream goes on with the next piece.
        """

    def wait_for(self, event: Event, timeout_s: float) -> bool:
        """Let the forward pass wait until the work of ``event`` is over; False if it was not in time.

        On a GPU the compute stream waits, the host does not, and the answer is always True.

        Raises:
            GpuFailedError: the device has failed.
            Exception: what the work raised.
        """

    def close(self) -> None:
        """Finish what was submitted, then end. The last call.

        Raises:
            GpuFailedError: the device has failed: what was submitted may be under way for ever.
        """


def ends_by(event: Event, timeout_s: float) -> bool:
    """Whether the work of an event is over, well or not, after waiting for at most ``timeout_s``.

    Raises:
        GpuFailedError: the device has failed: nobody knows what it still reads and writes.
    """
    try:
        return event.wait(timeout_s)
    except GpuFailedError:
        raise
    except Exception:
        return True


def end(stream: Stream, last: Event | None) -> None:
    """Close a stream, without waiting for a ``last`` piece of work that hangs: the stream's thread ends with it."""
    if last is None or last.done:
        stream.close()
    else:
        threading.Thread(target=stream.close, name="headwise-stream-end", daemon=True).start()
