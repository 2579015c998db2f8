from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.gpu.host_faults import NOT_READY
from support.simulated_streams import SimulatedClock, SimulatedStream

from headwise.cache_controller.layout import BlockLayout, Role
from headwise.errors import LayerSwapTimeoutError
from headwise.kernels.block_copy import ReferenceBlockCopy
from headwise.transfer.base import ALL
from headwise.transfer.cpu_stream import CpuStream
from headwise.transfer.cuda_stream import CudaStream
from headwise.transfer.host_memory import (
    HostArena,
    check_host_memory,
    memory_limits,
    numa_node_of_gpu,
)
from headwise.transfer.transfer_manager import TransferManager

LAYERS, BLOCKS = 3, 8
LAYOUT = BlockLayout(block_size=4, slots=3, roles=(Role("key", (), "int32"),), alignment=16)
SLOT = LAYOUT.slot_bytes
# Group 0 has a member in every layer, group 1 in layer 1 alone.
RANGES = np.array(
    [[[0, SLOT], [0, 0]], [[SLOT, 2 * SLOT], [0, SLOT]], [[2 * SLOT, 3 * SLOT], [SLOT, SLOT]]], dtype=np.int64
)
WAIT_S = 60.0
"""For what must happen: never reached unless the test fails."""


def int32(*rows: tuple[int, ...] | int) -> np.ndarray:
    return np.array(rows, dtype=np.int32)


class Copies:
    """Two arenas, the host's full of what its blocks are numbered, the device's of zeros; one manager between them."""

    def __init__(self, input_stream, output_stream, *, copy=None, load_timeout_s: float = WAIT_S, **options) -> None:
        self.device = np.zeros(BLOCKS * LAYOUT.block_bytes, np.uint8)
        self.host = np.repeat(np.arange(1, BLOCKS + 1, dtype=np.uint8), LAYOUT.block_bytes)
        self.manager = TransferManager(
            LAYOUT,
            RANGES,
            self.device,
            self.host,
            copy=copy or ReferenceBlockCopy(),
            input_stream=input_stream,
            output_stream=output_stream,
            load_timeout_s=load_timeout_s,
            **options,
        )

    def layers_on_device(self, device_block: int, host_block: int) -> list[bool]:
        """Per layer, whether group 0's bytes of the host block are in the device block."""
        block = self.device.reshape(BLOCKS, LAYERS, SLOT)[device_block]
        return [bool((layer == host_block + 1).all()) for layer in block]


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def slow(clock) -> Copies:
    """Every piece of work takes a second."""
    streams = [SimulatedStream(clock, delay_s=lambda: 1.0) for _ in range(2)]
    return Copies(*streams, clock=clock)


class Gate:
    """A block copy that stops before the calls it is told to, until it is let go on."""

    def __init__(self, *stops: int) -> None:
        self.calls = 0
        self.stops = {stop: threading.Event() for stop in stops}
        self.reached = {stop: threading.Event() for stop in stops}

    def __call__(self, *arguments) -> None:
        call, self.calls = self.calls, self.calls + 1
        if call in self.stops:
            self.reached[call].set()
            assert self.stops[call].wait(WAIT_S)
        ReferenceBlockCopy()(*arguments)


@pytest.fixture
def threads():
    streams = [CpuStream("in"), CpuStream("out")]
    yield streams
    for stream in streams:
        stream.close()


# ---- the device arena ----


def test_another_device_arena_may_take_the_place_of_the_first(clock) -> None:
    copies = Copies(SimulatedStream(clock), SimulatedStream(clock))
    old, copies.device = copies.device, np.zeros_like(copies.device)
    copies.manager.attach_device(None)
    copies.manager.attach_device(copies.device)
    copies.manager.load(int32((0, 2, 5)))
    copies.manager.wait_layer(LAYERS - 1)
    assert copies.layers_on_device(5, 2) == [True] * LAYERS
    assert not old.any()


def test_an_arena_is_not_exchanged_under_copies_nor_for_one_of_another_size(slow: Copies) -> None:
    with pytest.raises(ValueError, match="multiple of a block"):
        slow.manager.attach_device(np.zeros(LAYOUT.block_bytes + 1, np.uint8))
    slow.manager.store(int32((0, 1)))
    with pytest.raises(ValueError, match="copies are under way"):
        slow.manager.attach_device(None)
    slow.manager.drain(WAIT_S)
    slow.manager.finished_stores()
    slow.manager.load(int32((0, 2, 5)))
    with pytest.raises(ValueError, match="copies are under way"):
        slow.manager.attach_device(None)


# ---- streams ----


def test_a_closed_stream_has_finished_its_work_and_takes_no_more():
    stream, done = CpuStream("in"), []
    stream.submit(lambda: done.append(1))
    stream.close()
    stream.close()
    assert done == [1]
    with pytest.raises(RuntimeError, match="'in' is closed"):
        stream.submit(lambda: None)


def test_a_cpu_stream_measures_what_it_did_and_what_was_waited():
    ticks = iter(range(100))
    lock = threading.Lock()

    def clock() -> float:
        with lock:
            return float(next(ticks))

    stream, go = CpuStream("in", clock), threading.Event()
    event = stream.submit(lambda: go.wait(WAIT_S))
    threading.Timer(0.01, go.set).start()
    stream.wait_for(event, WAIT_S)
    assert event.busy_s > 0
    waited = stream.waited_s
    assert waited > 0
    stream.wait_for(event, WAIT_S)
    assert stream.waited_s == waited, "nothing is waited for that is done"
    stream.close()


# ---- loads ----


def test_a_layer_that_was_waited_for_is_there_with_all_before_it_and_none_after(slow):
    slow.manager.load(int32((0, 5, 2)))
    seen = []
    for layer in range(LAYERS):
        slow.manager.wait_layer(layer)
        seen.append(slow.layers_on_device(2, 5))
    assert seen == [[True, False, False], [True, True, False], [True, True, True]]
    assert slow.manager.finish_loads().tolist() == []


def test_a_layer_waits_for_every_load_submitted_before(slow):
    slow.manager.load(int32((0, 5, 2)))
    slow.manager.load(int32((0, 6, 3)))
    slow.manager.wait_layer(0)
    assert slow.layers_on_device(2, 5)[0]
    assert slow.layers_on_device(3, 6) == [True, False, False]


def test_groups_bring_their_own_bytes_of_a_layer_and_no_work_where_they_have_none(slow, clock):
    slow.manager.load(int32((1, 5, 2)))
    slow.manager.wait_layer(0)
    assert clock.now == 0, "group 1 has no member in layer 0"
    slow.manager.wait_layer(2)
    assert clock.now == 1
    block = slow.device.reshape(BLOCKS, LAYERS, SLOT)[2]
    assert [layer.tolist() for layer in block] == [[6] * SLOT, [0] * SLOT, [0] * SLOT]
    assert slow.manager.finish_loads().tolist() == []
    assert slow.manager.load_stats().bytes == SLOT


def test_a_layer_that_was_passed_over_is_complete_with_the_next(slow):
    slow.manager.load(int32((0, 5, 2)))
    slow.manager.wait_layer(2)
    assert slow.layers_on_device(2, 5) == [True, True, True]


def test_layers_that_are_loaded_together_are_there_from_the_first_of_them_on(clock):
    layout = BlockLayout(block_size=4, slots=8, roles=LAYOUT.roles, alignment=16)
    ends = np.arange(1, 9)[:, None] * layout.slot_bytes
    ranges = np.stack([ends - layout.slot_bytes, ends], axis=2)
    device = np.zeros(layout.block_bytes, np.uint8)
    host = np.repeat(np.arange(1, 9, dtype=np.uint8), layout.slot_bytes)  # of one block
    input_stream = SimulatedStream(clock, delay_s=lambda: 1.0, lookahead=1)
    manager = TransferManager(
        layout, ranges, device, host, copy=ReferenceBlockCopy(), input_stream=input_stream,
        output_stream=SimulatedStream(clock), load_timeout_s=WAIT_S, clock=clock, piece_bytes=1 << 20,
    )  # fmt: skip
    manager.load(int32((0, 0, 0)))
    seen = []
    for layer in range(8):
        manager.wait_layer(layer)
        seen.append((clock.now, int(device[:: layout.slot_bytes].astype(bool).sum())))
    # One layer, one, and then two at a time.
    assert seen == [(1, 1), (2, 2), (3, 4), (3, 4), (4, 6), (4, 6), (5, 8), (5, 8)]
    assert manager.finish_loads().tolist() == []
    np.testing.assert_array_equal(device, host)
    assert manager.load_stats().bytes == layout.block_bytes


def test_finish_loads_waits_for_loads_that_no_layer_waited_for(slow):
    slow.manager.load(int32((0, 5, 2)))
    assert slow.manager.finish_loads().tolist() == []
    assert slow.layers_on_device(2, 5) == [True, True, True]


def test_many_loads_under_way_each_have_events_of_their_own(slow):
    for block in range(BLOCKS):  # the simulated stream refuses an event that is in use
        slow.manager.load(int32((0, block, block)))
    assert slow.manager.finish_loads().tolist() == []
    assert all(all(slow.layers_on_device(block, block)) for block in range(BLOCKS))


def test_a_failed_load_is_told_once_by_its_device_blocks_and_the_forward_goes_on(clock):
    failures = iter([None, OSError("no such page")])
    copies = Copies(SimulatedStream(clock, failure=lambda: next(failures, None)), SimulatedStream(clock), clock=clock)
    copies.manager.load(int32((0, 5, 4), (0, 6, 2)))
    copies.manager.load(int32((0, 7, 1)))
    for layer in range(LAYERS):
        copies.manager.wait_layer(layer)
    assert copies.manager.finish_loads().tolist() == [2, 4]
    assert copies.manager.finish_loads().tolist() == []
    assert copies.layers_on_device(1, 7) == [True, True, True]
    stats = copies.manager.load_stats()
    assert (stats.blocks, stats.failed_blocks, stats.queued_blocks) == (1, 2, 0)


def test_a_failure_in_a_layer_that_was_passed_over_is_told_all_the_same(clock):
    failures = iter([OSError("no such page")])
    copies = Copies(SimulatedStream(clock, failure=lambda: next(failures, None)), SimulatedStream(clock), clock=clock)
    copies.manager.load(int32((0, 5, 4)))
    copies.manager.wait_layer(LAYERS - 1)
    assert copies.manager.finish_loads().tolist() == [4]


def test_a_late_load_names_layer_and_seconds_once_and_is_given_up(clock):
    delays = iter([1.0, 20.0, 1.0])
    copies = Copies(
        SimulatedStream(clock, delay_s=lambda: next(delays)), SimulatedStream(clock), load_timeout_s=15.0, clock=clock
    )
    copies.manager.load(int32((0, 5, 4), (0, 6, 2)))
    copies.manager.wait_layer(0)
    with pytest.raises(LayerSwapTimeoutError, match=r"layer 1 of 2 blocks .* 15 s"):
        copies.manager.wait_layer(1)
    copies.manager.wait_layer(2)
    assert copies.manager.finish_loads().tolist() == [2, 4]
    clock.advance(100.0)
    assert copies.layers_on_device(4, 5) == [True, False, False], "nothing is written after it was given up"


def test_loads_behind_a_late_one_get_no_time_of_their_own(clock):
    delays = iter([20.0] + [0.0] * 5)
    copies = Copies(
        SimulatedStream(clock, delay_s=lambda: next(delays)), SimulatedStream(clock), load_timeout_s=15.0, clock=clock
    )
    copies.manager.load(int32((0, 5, 4)))
    copies.manager.load(int32((0, 6, 2)))
    with pytest.raises(LayerSwapTimeoutError, match="2 blocks"):
        copies.manager.wait_layer(0)
    assert clock.now == 15.0
    assert copies.manager.finish_loads().tolist() == [2, 4]


def test_a_load_given_up_while_it_copies_is_over_when_its_blocks_are_told(threads):
    gate = Gate(1)
    copies = Copies(*threads, copy=gate, load_timeout_s=0.02)
    copies.manager.load(int32((0, 5, 2)))
    assert gate.reached[1].wait(WAIT_S)
    with pytest.raises(LayerSwapTimeoutError, match="layer 1"):
        copies.manager.wait_layer(1)
    with pytest.raises(LayerSwapTimeoutError, match="cannot be used again"):
        copies.manager.finish_loads()  # the copy still runs: its block may be nobody else's yet
    gate.stops[1].set()
    assert copies.manager.drain(WAIT_S)
    assert copies.manager.finish_loads().tolist() == [2]
    copies.device[:] = 77  # the block has another owner now
    threads[0].submit(lambda: None).wait(WAIT_S)
    assert (copies.device == 77).all()
    assert gate.calls == 2, "layer 2 was not copied any more"


def test_a_group_without_layer_ranges_is_refused(slow):
    with pytest.raises(ValueError, match=r"group 2 .* 2 groups"):
        slow.manager.load(int32((2, 0, 0)))


# ---- stores ----


def test_stores_are_told_in_order_of_completion_and_failed_ones_apart(clock):
    failures = iter([None, OSError("full"), None])
    copies = Copies(
        SimulatedStream(clock),
        SimulatedStream(clock, delay_s=lambda: 1.0, failure=lambda: next(failures)),
        clock=clock,
    )
    copies.device[:] = np.repeat(np.arange(100, 100 + BLOCKS, dtype=np.uint8), LAYOUT.block_bytes)
    for pairs in (int32((3, 0), (1, 1)), int32((4, 5)), int32((2, 2))):
        copies.manager.store(pairs)
    assert copies.manager.store_stats().queued_blocks == 4
    assert copies.manager.finished_stores().complete.tolist() == []
    clock.advance(1.0)
    assert copies.manager.finished_stores().complete.tolist() == [[3, 0], [1, 1]]
    clock.advance(2.0)
    finished = copies.manager.finished_stores()
    assert (finished.complete.tolist(), finished.failed.tolist()) == ([[2, 2]], [[4, 5]])
    assert copies.host.reshape(BLOCKS, -1)[:, 0].tolist() == [103, 101, 102, 4, 5, 6, 7, 8]
    assert copies.manager.store_stats().failed_blocks == 1


def test_neighbours_are_handed_to_the_copy_side_by_side(clock):
    calls = []
    copies = Copies(
        SimulatedStream(clock), SimulatedStream(clock), copy=lambda *a: calls.append(a[2].tolist()), clock=clock
    )
    copies.manager.store(int32((5, 1), (3, 7), (4, 0)))
    copies.manager.load(int32((0, 2, 6), (1, 4, 4), (0, 1, 5)))
    copies.manager.drain(0)
    assert calls[0] == [[0, 1, 5], [0, 2, 6], [1, 4, 4]]
    assert calls[-1] == [[0, 3, 7], [0, 4, 0], [0, 5, 1]]


# ---- both ----


def test_a_store_runs_while_a_load_stands_still_and_the_other_way_round(threads):
    gate = Gate(0)
    copies = Copies(*threads, copy=gate)
    copies.manager.load(int32((0, 5, 2)))
    assert gate.reached[0].wait(WAIT_S)
    copies.manager.store(int32((1, 0)))
    while not len(copies.manager.finished_stores().complete):
        threads[1].submit(lambda: None).wait(WAIT_S)
    gate.stops[0].set()
    assert copies.manager.finish_loads().tolist() == []

    gate = Gate(0)
    copies = Copies(*threads, copy=gate)
    copies.manager.store(int32((1, 0)))
    assert gate.reached[0].wait(WAIT_S)
    copies.manager.load(int32((0, 5, 2)))
    copies.manager.wait_layer(LAYERS - 1)
    assert copies.manager.finished_stores().complete.tolist() == []
    gate.stops[0].set()
    assert copies.manager.drain(WAIT_S)
    assert copies.manager.finished_stores().complete.tolist() == [[1, 0]]


def test_a_mark_is_told_once_all_that_was_stored_before_is_over(slow, clock):
    slow.manager.store(int32((3, 4)))
    slow.manager.mark(7)
    slow.manager.mark(9)
    seen = []
    for _ in range(4):
        seen.append(slow.manager.settled())
        clock.advance(1.0)
    assert seen == [0, 0, 7, 9]
    assert slow.manager.drain(WAIT_S)


def test_drain_says_whether_all_is_over(slow):
    slow.manager.load(int32((0, 5, 2)))
    slow.manager.store(int32((1, 0)))
    slow.manager.store(int32((3, 3)))
    assert not slow.manager.drain(2.5)
    assert slow.manager.drain(2.5)
    assert slow.manager.finish_loads().tolist() == []
    assert slow.manager.finished_stores().complete.tolist() == [[1, 0], [3, 3]]


def test_drain_outlives_failures_and_leaves_them_to_be_told(clock):
    def failing() -> SimulatedStream:
        return SimulatedStream(clock, failure=lambda: OSError("gone"))

    copies = Copies(failing(), failing(), clock=clock)
    copies.manager.load(int32((0, 5, 2)))
    copies.manager.store(int32((1, 0)))
    assert copies.manager.drain(1.0)
    assert copies.manager.finish_loads().tolist() == [2]
    assert copies.manager.finished_stores().failed.tolist() == [[1, 0]]


def test_statistics_tell_what_was_hidden_behind_the_forward_pass(slow, clock):
    slow.manager.load(int32((0, 5, 2), (0, 6, 3)))
    assert slow.manager.load_stats().queued_blocks == 2
    clock.advance(1.75)  # the forward computes before it comes to layer 1
    for layer in range(LAYERS):
        slow.manager.wait_layer(layer)
    slow.manager.finish_loads()
    stats = slow.manager.load_stats()
    assert (stats.blocks, stats.bytes, stats.queued_blocks) == (2, 2 * LAYOUT.block_bytes, 0)
    assert (stats.busy_s, stats.waited_s, stats.hidden_s) == (3.0, 1.25, 1.75)
    assert stats.bytes_per_s == stats.bytes / 3.0
    slow.manager.store(int32((2, 0)))
    slow.manager.drain(5.0)
    slow.manager.finished_stores()
    stores = slow.manager.store_stats()
    assert (stores.blocks, stores.bytes, stores.busy_s, stores.waited_s) == (1, LAYOUT.block_bytes, 1.0, 0.0)


def test_nothing_to_copy_is_no_work(slow):
    slow.manager.load(np.empty((0, 3), np.int32))
    slow.manager.store(np.empty((0, 2), np.int32))
    slow.manager.wait_layer(0)
    assert slow.manager.finish_loads().tolist() == []
    assert slow.manager.drain(0)
    assert slow.manager.load_stats().queued_blocks == slow.manager.store_stats().queued_blocks == 0


def test_ranges_and_arenas_that_do_not_fit_the_layout_are_refused(clock):
    arena, streams = np.zeros(LAYOUT.block_bytes, np.uint8), [SimulatedStream(clock)] * 2
    options = {"copy": ReferenceBlockCopy(), "input_stream": streams[0], "output_stream": streams[1]}
    with pytest.raises(ValueError, match=r"\[layers, groups, 2\]"):
        TransferManager(LAYOUT, RANGES[0], arena, arena, **options)
    with pytest.raises(ValueError, match=rf"\[0, {LAYOUT.block_bytes + 1}\] at \[1, 0\]"):
        TransferManager(LAYOUT, np.array([[[0, 0]], [[0, LAYOUT.block_bytes + 1]]]), arena, arena, **options)
    with pytest.raises(ValueError, match="host arena has 7 bytes"):
        TransferManager(LAYOUT, RANGES, arena, arena[:7], **options)


class TransferMachine(RuleBasedStateMachine):
    """Random loads, stores, layers, delays and failures; what is told must be what the arenas say."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = SimulatedClock()
        self.delay_s, self.fails = 0.0, 0

    @initialize(lookahead=st.sampled_from([1, 2, ALL]))
    def open(self, lookahead) -> None:
        streams = [SimulatedStream(self.clock, lambda: self.delay_s, self.failure, lookahead) for _ in range(2)]
        self.copies = Copies(*streams, load_timeout_s=10.0, clock=self.clock)
        self.manager = self.copies.manager
        self.loading: dict[int, int] = {}  # host block by device block
        self.storing: dict[int, int] = {}  # device block by host block
        self.layer = 0
        self.settled = self.copies.device.copy()
        self.is_late = False

    def failure(self) -> Exception | None:
        self.fails -= 1
        return OSError("injected") if self.fails == 0 else None

    @rule(delay_s=st.sampled_from([0.0, 0.5, 4.0, 30.0]))
    def let_copies_take(self, delay_s) -> None:
        self.delay_s = delay_s

    @rule(fails=st.integers(1, 6))
    def let_a_piece_fail(self, fails) -> None:
        self.fails = fails

    @rule(seconds=st.sampled_from([0.25, 5.0]))
    def pass_time(self, seconds) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: self.layer == 0)
    @rule(blocks=st.lists(st.integers(0, BLOCKS - 1), unique=True, max_size=3), host=st.integers(0, BLOCKS - 1))
    def load(self, blocks, host) -> None:
        pairs = [(0, host, block) for block in blocks if block not in self.loading | self.storing_blocks()]
        if host in self.storing or not pairs:
            return
        self.manager.load(int32(*pairs))
        self.loading |= {block: host for _, host, block in pairs}

    def storing_blocks(self) -> dict[int, int]:
        return {device: host for host, device in self.storing.items()}

    @rule(device=st.integers(0, BLOCKS - 1), host=st.integers(0, BLOCKS - 1))
    def store(self, device, host) -> None:
        if device in self.loading or host in self.storing or host in self.loading.values():
            return
        self.manager.store(int32((device, host)))
        self.storing[host] = device

    @precondition(lambda self: self.layer < LAYERS)
    @rule()
    def compute_a_layer(self) -> None:
        try:
            self.manager.wait_layer(self.layer)
        except LayerSwapTimeoutError:
            self.is_late = True
        self.layer += 1

    @rule()
    def end_step(self) -> None:
        try:
            failed = self.manager.finish_loads().tolist()
        except LayerSwapTimeoutError:
            return  # a copy still runs: nothing was told, and its blocks stay what they are
        assert set(failed) <= set(self.loading)
        blocks = self.copies.device.reshape(BLOCKS, -1)
        for device, host in self.loading.items():
            if device not in failed:
                assert (blocks[device] == self.copies.host.reshape(BLOCKS, -1)[host]).all()
        assert not self.is_late or failed
        self.loading, self.layer, self.is_late = {}, 0, False
        self.settled = self.copies.device.copy()

    @rule()
    def hear_of_stores(self) -> None:
        finished = self.manager.finished_stores()
        blocks = self.copies.device.reshape(BLOCKS, -1)
        for device, host in finished.complete.tolist():
            assert self.storing.pop(host) == device
            assert (self.copies.host.reshape(BLOCKS, -1)[host] == blocks[device]).all()
        for device, host in finished.failed.tolist():
            assert self.storing.pop(host) == device

    @invariant()
    def only_blocks_that_are_loading_change(self) -> None:
        still = [block for block in range(BLOCKS) if block not in self.loading]
        now, then = self.copies.device.reshape(BLOCKS, -1), self.settled.reshape(BLOCKS, -1)
        assert np.array_equal(now[still], then[still])

    @invariant()
    def what_is_queued_is_what_is_not_told_yet(self) -> None:
        assert self.manager.load_stats().queued_blocks == len(self.loading)
        assert self.manager.store_stats().queued_blocks == len(self.storing)


TestTransferMachine = TransferMachine.TestCase


# ---- CUDA, by what it asks of CuPy ----


class FakeCuda(SimpleNamespace):
    """Writes down what is enqueued on which stream."""

    def __init__(self) -> None:
        log, current = [], ["compute"]

        class Device:
            def __init__(self, number: int) -> None:
                self.number = number

            def __enter__(self) -> None:
                log.append(("device", self.number))

            def __exit__(self, *error) -> None:
                pass

        class Event:
            count = 0

            def __init__(self, **options) -> None:
                Event.count += 1
                self.name = f"event {Event.count}"
                self.ptr, self.code = self, NOT_READY

            def record(self, stream) -> None:
                log.append(("record", self.name, stream.name))

        class Stream:
            def __init__(self, name: str = "copies", non_blocking: bool = False, priority: int = 0) -> None:
                self.name, self.non_blocking, self.priority = name, non_blocking, priority

            def wait_event(self, event) -> None:
                log.append(("wait", event.name, self.name))

            def __enter__(self) -> None:
                current.append(self.name)

            def __exit__(self, *error) -> None:
                current.pop()

        runtime = SimpleNamespace(eventQuery=lambda event: event.code)
        super().__init__(Device=Device, Event=Event, Stream=Stream, runtime=runtime)
        self.get_current_stream = lambda: Stream(current[-1])
        self.log, self.current = log, current


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    cuda = FakeCuda()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    return cuda


def test_a_cuda_stream_copies_behind_the_compute_stream_which_waits_for_it_on_the_device(cuda):
    stream = CudaStream(device=1)
    event = stream.submit(lambda: cuda.log.append(("copy", cuda.current[-1])))
    assert stream.wait_for(event, timeout_s=0.0), "the host does not wait"
    submitted, begin, end, before, after = (f"event {number}" for number in range(1, 6))
    assert [entry for entry in cuda.log if entry[0] != "device"] == [
        ("record", submitted, "compute"),
        ("wait", submitted, "copies"),
        ("record", begin, "copies"),
        ("copy", "copies"),
        ("record", end, "copies"),
        ("record", before, "compute"),
        ("wait", end, "compute"),
        ("record", after, "compute"),
    ]
    assert {entry for entry in cuda.log if entry[0] == "device"} == {("device", 1)}


def test_what_follows_a_cuda_copy_does_not_wait_for_the_compute_stream(cuda):
    stream = CudaStream(device=0)
    stream.submit(lambda: None)
    cuda.log.clear()
    stream.submit(lambda: cuda.log.append(("copy", cuda.current[-1])), follows=True)
    assert [entry for entry in cuda.log if entry[1] == "compute" or entry[-1] == "compute"] == []
    assert [entry[0] for entry in cuda.log if entry[0] != "device"] == ["record", "copy", "record"]


def test_layers_are_submitted_a_few_ahead_of_the_one_that_is_waited_for(clock):
    stream = SimulatedStream(clock, delay_s=lambda: 1.0, lookahead=1)
    copies = Copies(stream, SimulatedStream(clock))
    copies.manager.load(int32((0, 5, 2)))
    for layer in range(LAYERS):
        assert len(stream) == min(1, LAYERS - layer)
        copies.manager.wait_layer(layer)
        assert copies.layers_on_device(2, 5)[: layer + 1] == [True] * (layer + 1)
    assert copies.manager.finish_loads().tolist() == []
    copies.manager.load(int32((0, 6, 3)))
    assert copies.manager.finish_loads().tolist() == [], "nobody waited for any layer"
    assert copies.layers_on_device(3, 6) == [True] * LAYERS


def test_a_cuda_copy_that_cannot_be_enqueued_is_told_once_what_was_enqueued_is_over(cuda):
    stream = CudaStream(device=0)

    def fail() -> None:
        raise OSError("no such kernel")

    event = stream.submit(fail)
    with pytest.raises(OSError, match="no such kernel"):
        stream.wait_for(event, timeout_s=1.0)
    assert not event.wait(0)
    event.end.code = 0
    with pytest.raises(OSError, match="no such kernel"):
        event.wait(0)


# ---- host memory ----


def write(path, text) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_tightest_cgroup_above_the_process_decides(tmp_path):
    write(tmp_path / "proc/meminfo", "MemTotal:  9000000 kB\nMemAvailable:   8000 kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/pod/container\n")
    group = tmp_path / "sys/fs/cgroup/pod"
    write(group / "container/memory.max", "max\n")
    write(group / "container/memory.current", "10\n")
    write(group / "memory.max", "1000000\n")
    write(group / "memory.current", "600000\n")
    write(group / "memory.stat", "anon 500\ninactive_file 100000\n")
    assert sorted(limit.bytes for limit in memory_limits(tmp_path)) == [500_000, 8_192_000]
    check_host_memory(475_000, tmp_path)
    with pytest.raises(ValueError, match=r"475001 bytes .*pod/memory\.max leaves 500000 .* choose a smaller"):
        check_host_memory(475_001, tmp_path)


def test_a_version_1_cgroup_counts(tmp_path):
    write(tmp_path / "proc/self/cgroup", "5:cpu:/a\n4:hugetlb,memory:/job\n")
    group = tmp_path / "sys/fs/cgroup/memory/job"
    write(group / "memory.limit_in_bytes", "5000\n")
    write(group / "memory.usage_in_bytes", "1000\n")
    assert [limit.bytes for limit in memory_limits(tmp_path)] == [4000]


def test_a_machine_that_tells_nothing_refuses_nothing(tmp_path):
    check_host_memory(1 << 60, tmp_path)


def test_more_than_this_machine_has_is_refused():
    with pytest.raises(ValueError, match=r"host cache of 1152921504606846976 bytes does not fit"):
        check_host_memory(1 << 60)


def test_making_an_arena_resident_overwrites_nothing():
    arena = HostArena(48 << 20)
    written = arena.array[:: 1 << 16]
    written[:] = 7  # at once, while the thread is at work
    assert arena.wait_ready(WAIT_S)
    assert (written == 7).all()
    assert int(np.count_nonzero(arena.array)) == len(written)
    arena.close()
    assert arena.array.size == 48 << 20
    assert (written == 7).all(), "the memory outlives the thread"


def test_an_arena_that_is_shared_is_as_good_and_takes_no_room_in_dev_shm():
    free = os.statvfs("/dev/shm").f_bavail if os.path.exists("/dev/shm") else 0
    arena = HostArena(8 << 20, numa_node=0, is_shared=True)
    assert arena.wait_ready(WAIT_S)
    shared = arena.shared
    assert shared is not None
    assert os.readlink(f"/proc/{shared.pid}/fd/{shared.fd}").startswith(f"/memfd:{shared.name} ")
    with open(f"/proc/self/fd/{shared.fd}", "rb", buffering=0) as file:
        arena.array[:] = 7
        assert file.read(3) == b"\x07\x07\x07"
    assert not free or abs(os.statvfs("/dev/shm").f_bavail - free) * os.statvfs("/dev/shm").f_frsize < 8 << 20
    arena.close()
    assert arena.shared is None
    assert (arena.array == 7).all(), "the memory outlives its name"
    arena.close()


def test_where_memory_cannot_be_shared_it_is_private_and_that_is_said(monkeypatch, caplog):
    def refuse(name, flags):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    arena = HostArena(1 << 20, is_shared=True)
    assert arena.shared is None
    assert "other processes cannot map the host arena" in caplog.text
    arena.array[:] = 1
    arena.close()


def test_an_arena_without_a_gpu_or_on_an_unknown_numa_node_works_and_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    arena = HostArena(1 << 20, numa_node=1023, pin=True)
    assert arena.wait_ready(WAIT_S)
    assert (arena.numa_node, arena.is_pinned) == (None, False)
    arena.array[:] = 1
    arena.close()


def test_a_pinned_arena_is_registered_once_and_unregistered_when_closed(monkeypatch):
    calls = []
    runtime = SimpleNamespace(
        hostRegister=lambda address, size, flags: calls.append(("register", address, size)),
        hostUnregister=lambda address: calls.append(("unregister", address)),
        deviceGetPCIBusId=lambda device: "0000:3B:00.0",
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    arena = HostArena(1 << 20, pin=True)
    assert arena.wait_ready(WAIT_S)
    assert arena.is_pinned
    arena.close()
    arena.close()
    address = arena.array.ctypes.data
    assert calls == [("register", address, 1 << 20), ("unregister", address)]


def test_the_numa_node_of_a_gpu_is_that_of_its_bus_address(monkeypatch, tmp_path):
    runtime = SimpleNamespace(deviceGetPCIBusId=lambda device: "0000:3B:00.0")
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    assert numa_node_of_gpu(0, tmp_path) is None
    write(tmp_path / "sys/bus/pci/devices/0000:3b:00.0/numa_node", "1\n")
    assert numa_node_of_gpu(0, tmp_path) == 1


def test_a_gpu_that_has_no_bus_address_has_no_numa_node(monkeypatch):
    def no_room(device: int) -> str:
        raise RuntimeError("cudaErrorInvalidValue: invalid argument")

    runtime = SimpleNamespace(deviceGetPCIBusId=no_room)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    assert numa_node_of_gpu(0) is None
