"""A step's numbers on their way to a GPU and back, whose copies happen as late as they may."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.gpu.host_faults import NOT_READY, CUDARuntimeError, HostFaults

from headwise.errors import GpuFailedError

STREAM = 0x5000
OURS = ("headwise.runtime.ops.step_upload", "headwise.runtime.ops.pinned_fetch")
"""They import CuPy."""


class LateCopies:
    """A stream, whose copies run when somebody waits for an event behind them. seen: each copy's target, after it."""

    def __init__(self) -> None:
        self._copies: list[Callable[[], None]] = []
        self._done = self.events = 0
        self.faults = HostFaults()
        self.seen: list[list[int]] = []

    def enqueue(self, target: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        assert stream == STREAM
        assert kind in (1, 2)

        def copy() -> None:
            ctypes.memmove(target, source, num_bytes)
            self.seen.append(np.ctypeslib.as_array((ctypes.c_int32 * (num_bytes // 4)).from_address(target)).tolist())

        self._copies.append(copy)

    def make_event(self, disable_timing: bool) -> LateEvent:
        assert disable_timing
        self.events += 1
        return LateEvent(self)

    @property
    def enqueued(self) -> int:
        return len(self._copies)

    def is_done(self, upto: int) -> bool:
        return self._done >= upto

    def query(self, event: LateEvent) -> int:
        return self.faults.code or (0 if self.is_done(event.upto) else NOT_READY)

    def finish(self, upto: int) -> None:
        self.faults.check()
        while self._done < upto:
            self._copies[self._done]()
            self._done += 1

    def finish_all(self) -> None:
        self.finish(len(self._copies))


class LateEvent:
    def __init__(self, copies: LateCopies) -> None:
        self._copies, self.upto = copies, 0

    @property
    def ptr(self) -> LateEvent:
        return self

    def record(self, stream: Any) -> None:
        self.upto = self._copies.enqueued

    def synchronize(self) -> None:
        self._copies.finish(self.upto)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateCopies]:
    copies = LateCopies()
    cupy, cupyx = ModuleType("cupy"), ModuleType("cupyx")
    cupyx.empty_pinned = np.empty
    cupy.cuda = SimpleNamespace(
        Event=copies.make_event,
        get_current_stream=lambda: SimpleNamespace(ptr=STREAM),
        runtime=SimpleNamespace(
            memcpyAsync=copies.enqueue,
            memcpyHostToDevice=1,
            memcpyDeviceToHost=2,
            eventQuery=copies.query,
            CUDARuntimeError=CUDARuntimeError,
        ),
    )
    for name, module in (("cupy", cupy), ("cupyx", cupyx)):
        monkeypatch.setitem(sys.modules, name, module)
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield copies
    for name in OURS:
        sys.modules.pop(name, None)


class DeviceArray(np.ndarray):
    """NumPy's, that tells its address as CuPy's does."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


@pytest.fixture
def upload(copies: LateCopies) -> Any:
    return import_module("headwise.runtime.ops.step_upload").PinnedUpload(
        buffers=lambda size: np.zeros(size, np.int32).view(DeviceArray)
    )


def test_a_steps_numbers_are_not_overwritten_before_they_are_copied(upload: Any, copies: LateCopies) -> None:
    for step in range(11):
        arrays = upload(np.full(3, step, np.int32), np.full((2, 2), -step, np.int32))
        assert [array.shape for array in arrays] == [(3,), (2, 2)]
    copies.finish_all()
    assert [copy[:3] + copy[64:68] for copy in copies.seen] == [[step] * 3 + [-step] * 4 for step in range(11)]


def test_arrays_of_the_same_shapes_stay_where_they_are(upload: Any, copies: LateCopies) -> None:
    small, large = np.arange(5, dtype=np.int32), np.arange(1000, dtype=np.int32)
    (first,), (again,) = upload(small), upload(small + 1)
    assert again is first
    (other,) = upload(large)
    copies.finish_all()
    np.testing.assert_array_equal(other, large)
    (last,) = upload(small + 2)
    copies.finish_all()
    np.testing.assert_array_equal(last, small + 2)


def test_equal_shapes_have_equal_places_as_long_as_the_capacity_suffices(copies: LateCopies) -> None:
    made: list[int] = []

    def buffers(size: int) -> Any:
        made.append(size)
        return np.zeros(size, np.int32).view(DeviceArray)

    upload = import_module("headwise.runtime.ops.step_upload").PinnedUpload(1000, buffers)
    one, other = [np.ones(1, np.int32)] * 5, [np.zeros(199, np.int32)] * 5
    places = [array.ctypes.data for array in upload(*one)]
    upload(*other)
    assert [array.ctypes.data for array in upload(*one)] == places
    assert len(made) == 1


def test_what_is_fetched_comes_when_it_is_waited_for_and_stays(copies: LateCopies) -> None:
    fetch_of = import_module("headwise.runtime.ops.pinned_fetch").PinnedFetches()
    first, second = (np.arange(3, dtype=np.int32).view(DeviceArray) + at for at in (0, 10))
    fetches = [fetch_of(array) for array in (first, second)]
    assert [fetch.is_done for fetch in fetches] == [False, False]
    assert fetches[0].get().tolist() == [0, 1, 2]
    assert [fetch.is_done for fetch in fetches] == [True, False]
    kept = fetches[1].get()
    del fetches
    assert kept.tolist() == [10, 11, 12]


def test_memory_and_event_of_what_was_taken_serve_the_next_array_of_its_shape(copies: LateCopies) -> None:
    fetch_of = import_module("headwise.runtime.ops.pinned_fetch").PinnedFetches()
    arrays = [np.full(3, at, np.int32).view(DeviceArray) for at in range(4)]
    first, second = fetch_of(arrays[0]), fetch_of(arrays[1])
    taken = first.get()
    third, fourth = fetch_of(arrays[2]), fetch_of(arrays[3])
    assert first.is_done
    assert not third.is_done
    assert [each.get().tolist() for each in (fourth, first, third, second)] == [[3] * 3, [0] * 3, [2] * 3, [1] * 3]
    assert first.get() is taken
    assert copies.events == 3, "the third has the first one's; the fourth needs its own"
    other = fetch_of(np.zeros((1, 3), np.int32).view(DeviceArray))
    assert other.get().shape == (1, 3)
    assert copies.events == 4


def test_what_a_failed_gpu_has_not_brought_is_neither_read_nor_waited_for_for_ever(copies: LateCopies) -> None:
    fetch_of = import_module("headwise.runtime.ops.pinned_fetch").PinnedFetches()
    taken, came, late = (fetch_of(np.arange(3, dtype=np.int32).view(DeviceArray)) for _ in range(3))
    taken.get()
    copies.finish(2)
    assert (came.is_done, late.is_done) == (True, False)
    copies.faults.fault()
    assert taken.get().tolist() == [0, 1, 2]
    for fetch in (late, came):  # of a finished copy, too, the runtime says nothing else
        with pytest.raises(GpuFailedError, match="cudaErrorIllegalAddress"):
            _ = fetch.is_done
        with pytest.raises(GpuFailedError, match="cudaErrorIllegalAddress"):
            fetch.get()
