"""What all streams promise: a thread's, CUDA's on the host, and the simulated one that other tests use."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Protocol

import pytest
from support.gpu.host_streams import HostCuda
from support.simulated_streams import SimulatedClock, SimulatedStream
from support.waiting import PATIENCE_S

from headwise.transfer.base import Event, Stream, Work, ends_by
from headwise.transfer.cpu_stream import CpuStream
from headwise.transfer.cuda_stream import CudaStream


class Device(Protocol):
    """host_waits: whether it is the host that stands still in `Stream.wait_for`"""

    stream: Stream
    host_waits: bool

    def hold(self) -> None:
        """Let no work that is submitted from now on run."""

    def go_on(self) -> None:
        """Let it run."""

    def submit(self, work: Work, event: Event | None = None, *, follows: bool = False) -> Event:
        """Submit what does ``work`` when the stream comes to it."""

    def forward(self, work: Work) -> None:
        """Work of the forward pass."""

    def finish(self) -> None:
        """Return when all of the forward pass is over."""


class Threads:
    host_waits = True

    def __init__(self) -> None:
        self.stream = CpuStream("in")
        self._go = threading.Event()

    def hold(self) -> None:
        self.stream.submit(lambda: self._go.wait(PATIENCE_S))

    def go_on(self) -> None:
        self._go.set()

    def submit(self, work: Work, event: Event | None = None, *, follows: bool = False) -> Event:
        return self.stream.submit(work, event, follows=follows)

    def forward(self, work: Work) -> None:
        work()

    def finish(self) -> None:
        pass


class Simulated(Threads):
    """Work takes no time until it is held."""

    def __init__(self) -> None:
        self._clock, self._delay_s = SimulatedClock(), 0.0
        self.stream = SimulatedStream(self._clock, lambda: self._delay_s)

    def hold(self) -> None:
        self._delay_s = 1.0

    def go_on(self) -> None:
        self._clock.advance(1000.0)


class Cuda:
    host_waits = False

    def __init__(self, cuda: HostCuda) -> None:
        self._cuda = cuda
        self.stream = CudaStream(device=0)

    def hold(self) -> None:
        self._cuda.is_held = True

    def go_on(self) -> None:
        self._cuda.is_held = False

    def submit(self, work: Work, event: Event | None = None, *, follows: bool = False) -> Event:
        return self.stream.submit(lambda: self._cuda.launch(work), event, follows=follows)

    def forward(self, work: Work) -> None:
        self._cuda.launch(work)

    def finish(self) -> None:
        self._cuda.compute.synchronize()


@pytest.fixture(params=["cpu", "simulated", "cuda", "cuda whose copies are late"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    cuda = HostCuda(oldest_first=request.param.endswith("late"))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    make: dict[str, Callable[[], Device]] = {"cpu": Threads, "simulated": Simulated}
    device = make.get(request.param, lambda: Cuda(cuda))()
    yield device
    device.go_on()
    device.stream.close()


def test_work_runs_in_order_beside_the_caller(device: Device) -> None:
    done: list[int] = []
    device.hold()
    last = [device.submit(lambda i=i: done.append(i)) for i in range(20)][-1]
    assert not last.done
    assert done == []
    device.go_on()
    assert last.wait(PATIENCE_S)
    assert last.done
    assert done == list(range(20))
    assert last.busy_s >= 0


def test_what_the_forward_pass_did_before_is_done_before_the_work_begins(device: Device) -> None:
    done: list[str] = []
    for turn in range(3):
        device.forward(lambda: done.append("forward"))
        device.submit(lambda: done.append("copy")).wait(PATIENCE_S)
        assert done == ["forward", "copy"] * (turn + 1)


def test_what_the_forward_pass_does_after_a_wait_comes_after_the_work_and_all_before_it(device: Device) -> None:
    done: list[str] = []
    for turn in range(3):
        device.submit(lambda: done.append("first"))
        event = device.submit(lambda: done.append("second"), follows=True)
        assert device.stream.wait_for(event, PATIENCE_S)
        device.forward(lambda: done.append("forward"))
        device.finish()
        assert done == ["first", "second", "forward"] * (turn + 1)


def test_pieces_that_follow_each_other_run_in_order_though_the_forward_pass_went_on(device: Device) -> None:
    done: list[int] = []
    device.submit(lambda: done.append(0))
    for piece in range(1, 5):
        device.forward(lambda: None)
        last = device.submit(lambda i=piece: done.append(i), follows=True)
    assert last.wait(PATIENCE_S)
    assert done == list(range(5))


def test_what_a_piece_raises_is_raised_to_whoever_waits_and_the_next_one_runs(device: Device) -> None:
    error = OSError("the disk is gone")

    def fail() -> None:
        raise error

    broken, fine = device.stream.submit(fail), device.submit(lambda: None)
    assert fine.wait(PATIENCE_S)
    assert broken.done
    assert ends_by(broken, PATIENCE_S)
    for wait in (broken.wait, lambda: device.stream.wait_for(broken, PATIENCE_S)):
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                wait()


def test_an_event_can_be_used_again_once_its_work_is_over_well_or_not(device: Device) -> None:
    def fail() -> None:
        raise OSError("the disk is gone")

    event, done = device.stream.make_event(), []
    for turn in range(3):
        assert device.submit(lambda turn=turn: done.append(turn), event) is event
        assert event.wait(PATIENCE_S)
        assert done == list(range(turn + 1))
        assert device.stream.submit(fail, event) is event
        assert ends_by(event, PATIENCE_S)


def test_a_wait_that_is_too_short_says_so(device: Device) -> None:
    device.hold()
    event = device.submit(lambda: None)
    assert not event.wait(0)
    assert not ends_by(event, 0)
    if device.host_waits:
        assert not device.stream.wait_for(event, 0)
    else:
        assert device.stream.wait_for(event, 0), "the compute stream waits, not the host"
    device.go_on()
    assert event.wait(PATIENCE_S)


def test_time_that_was_waited_is_counted_once(device: Device) -> None:
    assert device.stream.waited_s == 0
    event = device.submit(lambda: None)
    device.stream.wait_for(event, PATIENCE_S)
    event.wait(PATIENCE_S)
    device.finish()
    waited = device.stream.waited_s
    assert waited >= 0
    device.stream.wait_for(event, PATIENCE_S)
    assert device.stream.waited_s == waited, "nothing is waited for that is done"


def test_a_stream_that_is_closed_has_finished_its_work(device: Device) -> None:
    done: list[int] = []
    for piece in range(10):
        device.submit(lambda i=piece: done.append(i))
    device.stream.close()
    assert done == list(range(10))
