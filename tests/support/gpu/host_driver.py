"""A stand-in for a GPU's copies in host memory: what is enqueued happens later, in order, as on a stream."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from support.gpu.host_faults import CUDARuntimeError, HostFaults

from headwise.kernels.cuda.copy_driver import Addresses, CopyEvent, Staging
from headwise.kernels.cuda.launch import Grid, Kernel, Program
from headwise.kernels.cuda.parameters import Argument
from headwise.kernels.cuda.programs import Programs

LAUNCH_OUT_OF_RESOURCES = 701


class HostDriver:
    """`CopyDriver` whose one stream runs only when somebody waits for it, so that memory reused too early shows.

    calls: what was asked for, in order: "copy", "batch" or "kernel", and how many pieces
    faults: once there is one, all calls raise it; and a launch may be refused, which leaves all else as it is
    """

    def __init__(self, *, pinned: bool = True, has_batch: bool = True) -> None:
        self.pinned, self.has_batch = pinned, has_batch
        self.calls: list[tuple[str, int]] = []
        self.waits = 0
        self.faults = HostFaults()
        self.refuses_launches = False
        self._stream: deque[Callable[[], Any]] = deque()
        self._done = 0
        self._allocated: list[np.ndarray] = []  # for what is on the stream when its owner has gone

    def device_address(self, address: int, num_bytes: int) -> int | None:
        return address if self.pinned else None

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self.calls.append(("copy", 1))
        self._enqueue(lambda: ctypes.memmove(target, source, num_bytes))

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> bool:
        if not self.has_batch:
            return False
        self.calls.append(("batch", len(sizes)))
        pieces = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        self._enqueue(lambda: [ctypes.memmove(*piece) for piece in reversed(pieces)])  # in no order
        return True

    def allocate(self, num_bytes: int) -> Staging:
        host, device = np.full((2, num_bytes + 16), 0xA5, np.uint8)
        self._allocated += (host, device)
        at = -device.ctypes.data % 16
        return Staging(host[:num_bytes], device.ctypes.data + at, (device,))

    def record(self) -> CopyEvent:
        self.faults.check()
        return HostEvent(self, self._done + len(self._stream))

    def seconds(self, work: Callable[[], None]) -> float:
        work()
        self.finish()
        return 0.0

    def enqueued(self, programs: Programs) -> Programs:
        """``programs`` whose kernels are enqueued here."""
        return lambda source, defines: _EnqueuedProgram(self, programs(source, defines))

    def finish(self, upto: float = float("inf")) -> None:
        """Let the stream run."""
        while self._stream and self._done < upto:
            self._stream.popleft()()
            self._done += 1

    def has_passed(self, position: int) -> bool:
        return self._done >= position

    def launch(self, work: Callable[[], Any]) -> None:
        """Enqueue a kernel."""
        if self.refuses_launches:
            raise CUDARuntimeError(LAUNCH_OUT_OF_RESOURCES)
        self._enqueue(work)

    def _enqueue(self, work: Callable[[], Any]) -> None:
        self.faults.check()
        self._stream.append(work)


class HostEvent:
    def __init__(self, driver: HostDriver, position: int) -> None:
        self._driver, self._position = driver, position

    @property
    def done(self) -> bool:
        self._driver.faults.check()
        return self._driver.has_passed(self._position)

    def synchronize(self) -> None:
        self._driver.waits += 1
        self._driver.faults.check()
        self._driver.finish(self._position)


class _EnqueuedProgram:
    def __init__(self, driver: HostDriver, program: Program) -> None:
        self._driver, self._program = driver, program

    def kernel(self, name: str, threads: int, shared_bytes: int = 0) -> Kernel:
        kernel = self._program.kernel(name, threads, shared_bytes)

        def launch(grid: Grid, arguments: Sequence[Argument]) -> None:
            self._driver.calls.append(("kernel", int(arguments[3])))
            self._driver.launch(lambda: kernel(grid, arguments))

        return launch
