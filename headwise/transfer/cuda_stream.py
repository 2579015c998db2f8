"""A stream on a GPU: CuPy's streams and events. Imports CuPy when the first stream is made."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headwise.errors import ConfigError
from headwise.transfer.base import Event, Work
from headwise.transfer.gpu_failure import is_over, told_as_failure

QUERY_S = 50e-6
"""Time between two looks at an event that the host waits for: CUDA has no wait with a timeout."""

COPY_PRIORITY = -1
"""Of copies, before the forward pass, which has 0: theirs are small grids, which steps and blocks wait for. Behind a
prompt's grids of thousands of programs they would begin when these have."""

LEGACY_DEFAULT = (0, 1)
"""What the runtime takes for the legacy default stream: no stream at all, and ``cudaStreamLegacy``."""


class CudaEvent:
    """`Event` of a `CudaStream`: recorded behind the work, with another before it to time it."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self.begin, self.end = cuda.Event(block=True), cuda.Event(block=True)
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        return is_over(self._cuda.runtime, self.end)

    @property
    def busy_s(self) -> float:
        return float(self._cuda.get_elapsed_time(self.begin, self.end)) / 1e3

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Event.wait`. Work that raised may have enqueued copies before: these are waited for, too."""
        if timeout_s is None:
            with told_as_failure(self._cuda.runtime):
                self.end.synchronize()
        elif not self._ends_within(timeout_s):
            return False
        if self.error is not None:
            raise self.error
        return True

    def _ends_within(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not is_over(self._cuda.runtime, self.end):
            if time.monotonic() >= deadline:
                return False
            time.sleep(QUERY_S)
        return True


class ComputeStream:
    """The stream of the forward pass on GPU ``device``. Not the legacy default stream, for which all others wait.

    ``raw`` is the ``cudaStream_t`` of another framework that computes, too, and keeps it; by default, there is a new
    one.

    Raises:
        ConfigError: that is the legacy default stream.
    """

    def __init__(self, device: int, raw: int | None = None) -> None:
        import cupy

        if raw in LEGACY_DEFAULT:
            raise ConfigError(
                f"the compute stream given for GPU {device} is CUDA's legacy default stream, for which all other "
                "streams wait: make another one current in the framework that it comes from"
            )
        self._device = cupy.cuda.Device(device)
        with self._device:
            cuda = cupy.cuda
            self._stream = cuda.Stream(non_blocking=True) if raw is None else cuda.ExternalStream(raw, device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """What CuPy is asked for on this thread meanwhile goes to the device, and to this stream."""
        with self._device, self._stream:
            yield


class CudaStream:
    """`Stream` on GPU ``device``. The compute stream is CuPy's current stream of the calling thread.

    Work is called by `submit` itself, with this stream as the current one, and must only enqueue. It begins when all
    that was on the compute stream before is done: blocks are stored after they were written, and loaded after whoever
    had them before is through with them.
    """

    lookahead = 1  # the host waits for no piece: the next ones are submitted long before they are needed

    def __init__(self, device: int) -> None:
        import cupy

        self._cuda = cupy.cuda
        self._device = cupy.cuda.Device(device)
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True, priority=COPY_PRIORITY)
            self._submitted = cupy.cuda.Event(disable_timing=True)
        self._waited_s = 0.0
        self._waits: deque[tuple[Any, Any]] = deque()

    @property
    def waited_s(self) -> float:
        """See `Stream.waited_s`: what the compute stream is through with so far."""
        while self._waits and is_over(self._cuda.runtime, self._waits[0][1]):
            self._waited_s += self._cuda.get_elapsed_time(*self._waits.popleft()) / 1e3
        return self._waited_s

    def make_event(self) -> CudaEvent:
        with self._device:
            return CudaEvent(self._cuda)

    def submit(self, work: Work, event: Event | None = None, *, follows: bool = False) -> CudaEvent:
        """See `Stream.submit`."""
        event = event or self.make_event()
        assert isinstance(event, CudaEvent), f"an event of another kind of stream: {event!r}"
        event.error = None
        with self._device:
            if not follows:
                self._submitted.record(self._cuda.get_current_stream())
                self._stream.wait_event(self._submitted)
            event.begin.record(self._stream)
            try:
                with self._stream:
                    work()
            except Exception as error:
                event.error = error
            event.end.record(self._stream)
        return event

    def wait_for(self, event: Event, timeout_s: float) -> bool:
        """See `Stream.wait_for`."""
        assert isinstance(event, CudaEvent), f"an event of another kind of stream: {event!r}"
        if event.error is not None:
            raise event.error
        if event.done:
            return True
        with self._device:
            compute = self._cuda.get_current_stream()
            before, after = self._cuda.Event(), self._cuda.Event()
            before.record(compute)
            compute.wait_event(event.end)
            after.record(compute)
        self._waits.append((before, after))
        return True

    def close(self) -> None:
        """See `Stream.close`."""
        with told_as_failure(self._cuda.runtime):
            self._stream.synchronize()
