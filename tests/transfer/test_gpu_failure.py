"""A GPU that fails: whoever asks how work stands is told so, and nothing is taken for finished, or for under way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.gpu.host_streams import HostCuda

from headwise.cache_controller.layout import BlockLayout, Role
from headwise.errors import GpuFailedError
from headwise.kernels.block_copy import ReferenceBlockCopy
from headwise.transfer.base import ends_by
from headwise.transfer.cuda_stream import CudaStream
from headwise.transfer.transfer_manager import TransferManager

CAUSE = "the GPU failed: cudaErrorIllegalAddress: an illegal memory access was encountered"
LAYERS, BLOCKS = 3, 8


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> HostCuda:
    cuda = HostCuda()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    return cuda


def looks_at(stream: CudaStream, event: Any) -> list[Callable[[], object]]:
    return [
        lambda: event.done,
        lambda: event.wait(),
        lambda: event.wait(0),
        lambda: event.wait(60.0),
        lambda: ends_by(event, 60.0),
        lambda: stream.wait_for(event, 60.0),
        stream.close,
    ]


def test_an_event_of_a_failed_gpu_is_neither_done_nor_under_way(cuda: HostCuda) -> None:
    stream = CudaStream(device=0)
    before = stream.submit(lambda: cuda.launch(lambda: None))
    assert before.wait(60.0)
    event = stream.submit(lambda: cuda.launch(cuda.faults.fault))
    assert not event.done, "so far, it is under way"
    for event_of, look in [(event, look) for look in looks_at(stream, event)]:
        with pytest.raises(GpuFailedError, match=CAUSE):
            look()
        assert not event_of.end.done, "what CuPy says of it"
    for look in looks_at(stream, before):
        with pytest.raises(GpuFailedError, match=CAUSE):
            look()


def test_time_that_a_failed_gpu_waited_is_not_counted_as_none(cuda: HostCuda) -> None:
    stream = CudaStream(device=0)
    stream.wait_for(stream.submit(lambda: None), 60.0)
    cuda.launch(cuda.faults.fault)
    cuda.advance()
    with pytest.raises(GpuFailedError, match=CAUSE):
        _ = stream.waited_s


def test_what_is_submitted_to_a_failed_gpu_is_refused(cuda: HostCuda) -> None:
    stream = CudaStream(device=0)
    cuda.faults.fault()
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        stream.submit(lambda: cuda.launch(lambda: None))


class Copies:
    """A transfer manager over arenas of ``BLOCKS`` blocks on either side."""

    def __init__(self, cuda: HostCuda) -> None:
        self._cuda = cuda
        layout = BlockLayout(block_size=4, slots=LAYERS, roles=(Role("key", (), "int32"),), alignment=16)
        slot = layout.slot_bytes
        ranges = np.array([[[layer * slot, (layer + 1) * slot]] for layer in range(LAYERS)], np.int64)
        self.device, self.host = (np.full(BLOCKS * layout.block_bytes, fill, np.uint8) for fill in (1, 2))
        self.manager = TransferManager(
            layout,
            ranges,
            self.device,
            self.host,
            copy=self._enqueue,
            input_stream=CudaStream(device=0),
            output_stream=CudaStream(device=0),
        )

    def _enqueue(self, *arguments: Any) -> None:
        self._cuda.launch(lambda: ReferenceBlockCopy()(*arguments))


@pytest.mark.parametrize("in_copy", [False, True])
def test_blocks_of_a_failed_gpu_are_told_neither_complete_nor_free(cuda: HostCuda, in_copy: bool) -> None:
    copies = Copies(cuda)
    manager = copies.manager
    manager.load(np.array([[0, 1, 2]], np.int32))
    manager.store(np.array([[3, 4]], np.int32))
    manager.mark(7)
    assert len(manager.finished_stores().complete) == 0
    assert manager.settled() == 0
    if in_copy:
        copies._cuda.streams[1].queue.append(cuda.faults.fault)  # behind the loads that were enqueued
    else:
        cuda.streams[0].queue.appendleft(cuda.faults.fault)  # the forward pass fails, before any copy begins
    cuda.advance()
    asked: list[Callable[[], object]] = [
        lambda: manager.wait_layer(0),
        manager.finish_loads,
        manager.finished_stores,
        manager.settled,
        lambda: manager.drain(60.0),
        manager.close,
    ]
    for ask in asked:
        with pytest.raises((GpuFailedError, RuntimeError), match="cudaErrorIllegalAddress"):
            ask()
