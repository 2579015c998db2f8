"""CUDA's streams and events as CuPy gives them, on the host: what is enqueued runs when it is let, as late as it may.

Streams are queues of host functions. A wait for an event blocks its queue until the record that it saw is run, and
nothing runs before `HostCuda.advance`, which whoever waits on the host calls, too. A piece of work may be a fault: then
nothing runs any more, and all calls say so.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from support.gpu.host_faults import NOT_READY, CUDARuntimeError, HostFaults


class HostCuda(SimpleNamespace):
    """In place of `cupy.cuda`. Nothing runs on the GPU while it ``is_held``.

    Whichever stream need not wait for another runs first: the oldest, which is the compute stream, or the newest.
    """

    def __init__(self, *, oldest_first: bool = False) -> None:
        super().__init__(Device=_Device, Event=lambda **options: HostEvent(self), runtime=HostRuntime(self))
        self.faults = HostFaults()
        self.streams: list[HostStream] = []
        self.is_held = False
        self._oldest_first = oldest_first
        self.compute = HostStream(self)
        self._current = [self.compute]

    def Stream(self, non_blocking: bool = False, priority: int = 0) -> HostStream:  # noqa: N802
        assert non_blocking
        assert priority < 0, "copies go before the forward pass"
        return HostStream(self)

    def get_current_stream(self) -> HostStream:
        return self._current[-1]

    def get_elapsed_time(self, begin: HostEvent, end: HostEvent) -> float:
        self.faults.check()
        return 1.0

    def launch(self, work: Callable[[], Any]) -> None:
        """On the current stream."""
        self.faults.check()
        self.get_current_stream().queue.append(work)

    def advance(self) -> None:
        """Run what can be run: what is enqueued on the first stream as far as it goes, then on the next."""
        order = self.streams if self._oldest_first else self.streams[::-1]
        while not self.is_held and not self.faults.code and any(stream.step() for stream in order):
            pass


class HostRuntime:
    """`cupy.cuda.runtime`: an event's pointer is the event, a stream's the stream."""

    CUDARuntimeError = CUDARuntimeError
    memcpyHostToDevice, memcpyDeviceToHost = 1, 2  # noqa: N815

    def __init__(self, cuda: HostCuda) -> None:
        self._cuda = cuda

    def eventQuery(self, event: HostEvent) -> int:  # noqa: N802
        """A code, which is never raised."""
        is_over = event.look()
        return self._cuda.faults.code or (0 if is_over else NOT_READY)

    def memcpyAsync(self, target: int, source: int, num_bytes: int, kind: int, stream: HostStream) -> None:  # noqa: N802
        self._cuda.faults.check()
        stream.queue.append(lambda: ctypes.memmove(target, source, num_bytes))


class _Device:
    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class HostEvent:
    def __init__(self, cuda: HostCuda) -> None:
        self._cuda = cuda
        self.recorded = self.reached = self._looks = 0

    @property
    def ptr(self) -> HostEvent:
        return self

    @property
    def done(self) -> bool:
        """As CuPy has it."""
        return self._cuda.runtime.eventQuery(self.ptr) == 0

    def look(self) -> bool:
        """Whether it was reached. A first look is always in time to see what is still to come."""
        self._looks += 1
        if self._looks > 1:
            self._cuda.advance()
        return self.reached == self.recorded

    def record(self, stream: HostStream) -> None:
        self._cuda.faults.check()
        self.recorded, self._looks = self.recorded + 1, 0
        number = self.recorded
        stream.queue.append(lambda: setattr(self, "reached", max(self.reached, number)))

    def synchronize(self) -> None:
        self._cuda.advance()
        self._cuda.faults.check()
        assert self.done, "the host would wait for ever"


class HostStream:
    """queue: functions to run, and waits, as pairs of an event and the number of its record"""

    def __init__(self, cuda: HostCuda) -> None:
        self._cuda = cuda
        self.queue: deque[Callable[[], Any] | tuple[HostEvent, int]] = deque()
        cuda.streams.append(self)

    @property
    def ptr(self) -> HostStream:
        return self

    def wait_event(self, event: HostEvent) -> None:
        self._cuda.faults.check()
        self.queue.append((event, event.recorded))

    def step(self) -> bool:
        """Run the next entry; False if there is none, or it has to wait."""
        if not self.queue:
            return False
        first = self.queue[0]
        if isinstance(first, tuple):
            event, number = first
            if event.reached < number:
                return False
        else:
            first()
        self.queue.popleft()
        return True

    def synchronize(self) -> None:
        self._cuda.advance()
        self._cuda.faults.check()
        assert not self.queue, "the host would wait for ever"

    def __enter__(self) -> None:
        self._cuda._current.append(self)

    def __exit__(self, *error: object) -> None:
        self._cuda._current.pop()
