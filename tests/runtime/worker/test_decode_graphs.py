"""Decode steps as graphs: what is padded, when a graph is recorded, and what happens where none can be."""

from __future__ import annotations

import ctypes
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from support.gpu.emulated_gpu import FixedUpload
from support.gpu.host_cublas import HostCublas, aligned

from headwise.cache_controller.block_tables import HostBlockTables, TableShape
from headwise.kernels.base import FOLLOWS, GUESSED, AttentionBatch
from headwise.kernels.cuda import cublas
from headwise.runtime.ops import gpu_ops
from headwise.runtime.worker.decode_graphs import LEAST_CHANGES, DecodeGraphs, Scored, padded_columns, padded_rows
from headwise.runtime.worker.last_sampled import HostLastSampled

GROUPS = 2
SHAPE = TableShape(max_rows=64, groups=GROUPS, max_blocks=500, block_size=4)


class Ops:
    """As much of `TensorOps` as graphs need; counts what was recorded and replayed. Fails after so many, if at all."""

    def __init__(self, error: Exception | None = None, after: int = 0) -> None:
        self.captured = self.replayed = self.uploads = 0
        self._error, self._after = error, after

    def step_upload(self, capacity: int) -> FixedUpload:
        self.uploads += 1
        return FixedUpload(capacity)

    def capture(self, work: Callable[[], Any]) -> Callable[[], Any]:
        if self._error is not None and self.captured == self._after:
            raise self._error
        self.captured += 1

        def replay() -> Any:
            self.replayed += 1
            return work()

        return replay


class Model:
    """A step's scores tell what it was given."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, tokens: np.ndarray, positions: np.ndarray, batch: AttentionBatch) -> Scored:
        assert batch.max_query_len == 1
        assert batch.groups == GROUPS
        self.shapes.append((len(tokens), *batch.block_tables.shape))
        seen = np.stack([tokens, positions, batch.seq_lens, np.diff(batch.cu_seqlens_q)], axis=1)
        return Scored(seen, (tokens.copy(), batch.block_tables.copy()))


class Tables(HostBlockTables):
    """As wide as is wanted; what no sequence reaches says so. A row names blocks 1000 times its number."""

    BEYOND = -7

    def __init__(self) -> None:
        super().__init__(SHAPE)
        self.array[:] = np.arange(SHAPE.max_rows)[:, None, None] * 1000 + np.arange(SHAPE.max_blocks)

    def gather(self, rows: np.ndarray, seq_lens: np.ndarray, columns: int) -> np.ndarray:
        found = np.full((len(rows), GROUPS, columns), self.BEYOND, np.int32)
        for to, row, tokens in zip(found, rows, seq_lens, strict=True):
            used = SHAPE.columns(int(tokens))
            to[:, :used] = self.array[row, :, :used]
        return found.reshape(-1, columns)


def graphs_of(ops: Any, model: Model | None = None, *more: Any) -> DecodeGraphs:
    graphs = DecodeGraphs(ops, model or Model(), Tables(), HostLastSampled(SHAPE.max_rows), *more)
    graphs.record()
    return graphs


def step(
    graphs: DecodeGraphs, batch: int, columns: int, first: int = 10, last_row: int = 63, **more: np.ndarray
) -> Scored:
    """Sequences in rows ``last_row`` and before it, of so many tokens that they reach ``columns``, or one less."""
    tokens = np.arange(first, first + batch, dtype=np.int32)
    seq_lens = np.array([(columns - row % 2) * SHAPE.block_size for row in range(batch)], np.int32)
    rows = np.arange(last_row, last_row - batch, -1, dtype=np.int32)
    return graphs.step(tokens, seq_lens - 1, seq_lens, rows, **more)


@pytest.mark.parametrize(
    ("batch", "rows"),
    [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (17, 24), (64, 64), (65, 80), (129, 160), (225, 256)],
)
def test_batches_are_padded_to_few_sizes(batch: int, rows: int) -> None:
    assert padded_rows(batch) == rows


@pytest.mark.parametrize(("columns", "width"), [(1, 16), (16, 16), (17, 64), (500, 1024)])
def test_tables_are_padded_to_few_widths(columns: int, width: int) -> None:
    assert padded_columns(columns) == width


def test_padding_has_no_queries_no_tokens_and_no_blocks() -> None:
    found = step(graphs_of(Ops()), batch=3, columns=5, last_row=40)
    assert found.scores.tolist() == [[10, 19, 20, 1], [11, 15, 16, 1], [12, 19, 20, 1], [0, 0, 0, 0]]
    tables = found.likeliest[1].reshape(4, GROUPS, 16)
    for at, (row, used) in enumerate(((40, 5), (39, 4), (38, 5))):
        np.testing.assert_array_equal(tables[at, :, :used], [np.arange(used) + 1000 * row] * GROUPS)
        assert (tables[at, :, used:] == Tables.BEYOND).all()
    assert (tables[3] == Tables.BEYOND).all()


def test_graphs_are_told_which_sequences_follow_others_where_they_are_to_know_and_padding_follows_none() -> None:
    told: list[Any] = []

    class Following(Model):
        def __call__(self, tokens: np.ndarray, positions: np.ndarray, batch: AttentionBatch) -> Scored:
            told.append(None if batch.follows_on_device is None else batch.follows_on_device.tolist())
            return super().__call__(tokens, positions, batch)

    follows = np.array([0, FOLLOWS, GUESSED], np.int32)
    for tells in (True, False):
        graphs = graphs_of(Ops(), Following(), lambda is_so: is_so, tells)
        found = step(graphs, batch=3, columns=5, last_row=40, follows=follows)
        assert found.table_rows.tolist() == [40, 39, 38, 0]
        step(graphs, batch=3, columns=5)
    assert told == [[0, FOLLOWS, GUESSED, 0], [0] * 4, None, None]


def test_steps_that_read_together_have_graphs_of_their_own_and_padding_reads_nothing() -> None:
    told: list[Any] = []

    class Joint(Model):
        def __call__(self, tokens: np.ndarray, positions: np.ndarray, batch: AttentionBatch) -> Scored:
            told.append(None if batch.joint is None else batch.joint.tolist())
            return super().__call__(tokens, positions, batch)

    ops, model = Ops(), Joint()
    graphs = graphs_of(ops, model, bool, True, 1, True)
    assert graphs.captured == len(BATCHES) * len(WIDTHS) + len(BATCHES) - 1, "one sequence has nobody to read with"
    joint = np.array([[512, 0, 0], [2, 0, 0], [512, 512, 0]], np.int32)
    found = step(graphs, 3, 5, joint=joint, follows=np.zeros(3, np.int32))
    assert found.scores[:3, 0].tolist() == [10, 11, 12]
    assert model.shapes[-1] == (4, 4 * GROUPS, WIDTHS[-1])
    step(graphs, 3, 5)
    assert told == [[[512, 0, 0, 0], [2, 0, 0, 0], [512, 512, 0, 0]], None]
    assert (ops.replayed, ops.uploads) == (2, 1)


BATCHES, WIDTHS = (1, 2, 4, *range(8, 65, 8)), (16, 64, 256, 500)


def test_all_shapes_are_recorded_at_start_the_largest_first_and_replayed_with_what_is_new() -> None:
    ops, model = Ops(), Model()
    graphs = graphs_of(ops, model)
    assert ops.captured == graphs.captured == len(BATCHES) * len(WIDTHS)
    assert list(graphs._replays) == [(rows, columns, False) for rows in BATCHES[::-1] for columns in WIDTHS[::-1]]
    for first in (10, 20, 30):
        assert step(graphs, 3, 5, first).scores[:3, 0].tolist() == [first, first + 1, first + 2]
    step(graphs, 4, 17)
    step(graphs, 64, 500)
    assert (ops.captured, ops.replayed) == (graphs.captured, 5)
    assert model.shapes[-2:] == [(4, 8, 64), (64, 128, 500)]


def test_all_shapes_share_a_buffer_and_graphs_find_what_is_new_in_it() -> None:
    ops = Ops()
    graphs = graphs_of(ops)
    for first in (10, 20, 30, 40):
        for batch, columns in ((3, 5), (4, 16), (7, 30), (64, 30), (2, 40), (1, 60)):
            found = step(graphs, batch, columns, first, last_row=63 - first % 7 * (batch < 50))
            assert found.scores[0, 0] == first
            assert found.likeliest[1][0, 0] == 1000 * (63 - first % 7 * (batch < 50))
    assert ops.replayed == 24
    assert ops.uploads == 1


def test_graphs_gather_what_the_tables_say_when_they_are_launched() -> None:
    graphs = graphs_of(Ops())
    for block in (5, 6, 7, 8):
        graphs._tables.apply(np.array([[63, 1, 2, block]], np.int32))
        assert step(graphs, 1, 4).likeliest[1][1, 2] == block


@pytest.mark.parametrize("count", [0, 1, LEAST_CHANGES, LEAST_CHANGES + 1, 90])
def test_changes_of_tables_are_a_part_of_the_graph_or_where_they_are_many_made_before(count: int) -> None:
    ops = Ops()
    graphs, rng = graphs_of(ops), np.random.default_rng(count)
    expected = Tables()
    for first in (10, 20, 30):
        updates = np.stack([rng.integers(0, size, count) for size in SHAPE.cells] + [rng.integers(0, 99, count)], 1)
        updates = updates.astype(np.int32)
        expected.apply(updates)
        found = step(graphs, 4, 500, first, last_row=9, updates=updates)
        assert found.scores[:, 0].tolist() == [first, first + 1, first + 2, first + 3]
        assert found.table_rows.tolist() == [9, 8, 7, 6]
        np.testing.assert_array_equal(graphs._tables.array, expected.array)
        np.testing.assert_array_equal(found.likeliest[1][:GROUPS, :500], expected.array[9])
    assert ops.replayed == 3


def test_where_not_all_can_be_recorded_the_other_steps_run_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    for recorded in (0, 5):
        ops = Ops(RuntimeError("out of memory"), recorded)
        with caplog.at_level(logging.WARNING):
            graphs = graphs_of(ops)
        for batch in (1, 64):
            assert step(graphs, batch, 3).scores[0, 0] == 10
        assert (graphs.captured, ops.replayed) == (recorded, int(recorded > 0))
    assert [record.message for record in caplog.records] == [
        "decode steps run without CUDA graphs, but for none: out of memory",
        "decode steps run without CUDA graphs, but for those of 5 shapes: out of memory",
    ]


def test_a_graph_that_another_rank_cannot_record_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    ops, asked = Ops(), []
    with caplog.at_level(logging.WARNING):
        graphs = graphs_of(ops, Model(), lambda is_so: bool(asked.append(is_so)))
    for batch in (1, 1, 1, 2, 64):
        assert step(graphs, batch, 3).scores[0, 0] == 10
    assert asked == [True]
    assert (ops.captured, ops.replayed, graphs.captured) == (1, 0, 0)
    assert [record.message for record in caplog.records] == [
        "decode steps run without CUDA graphs, but for none: they cannot be recorded on another rank"
    ]


# ---- CuPy's side, with a CuPy that only keeps a log ----


class FakeStream:
    ptr = 0x5000

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.captures = False

    def begin_capture(self) -> None:
        self._log.append("begin")
        self.captures = True

    def end_capture(self) -> Any:
        self._log.append("end")
        self.captures = False
        return SimpleNamespace(launch=lambda: self._log.append("launch"))


class FakePool:
    """Like CuPy's, lets go of what is free when it is told to: here, all."""

    def __init__(self, allocator: Callable[[int], Any] | None = None) -> None:
        self._allocator, self._blocks = allocator, []

    def malloc(self, size: int) -> Any:
        self._blocks.append(self._allocator(size))

    def free_all_blocks(self) -> None:
        self._blocks.clear()


class FakeMemory:
    made: ClassVar[weakref.WeakSet[FakeMemory]] = weakref.WeakSet()

    def __init__(self, size: int) -> None:
        self.made.add(self)


SPAN = 64
"""Bytes behind an array's first that the fakes let one read: parts of a larger one end behind their own size."""


class DeviceArray(np.ndarray):
    """NumPy's, that tells its place as CuPy's does."""

    device = SimpleNamespace(id=0)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


@pytest.fixture
def cupy_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    log: list[str] = []
    stream = FakeStream(log)

    @contextmanager
    def using_allocator(allocator: Any) -> Iterator[None]:
        log.append(f"allocate by {allocator.__qualname__}")
        yield
        log.append("allocate as before")

    def asarray(array: np.ndarray) -> np.ndarray:
        log.append(f"upload {array.nbytes}")
        return array.copy()

    def dot(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        if stream.captures:
            raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
        return x @ weight

    def empty(shape: Any, dtype: Any) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return aligned(size).view(dtype).reshape(shape).view(DeviceArray)

    cupy = ModuleType("cupy")
    cupy.empty, cupy.asarray, cupy.dot = empty, asarray, dot
    cupy.ndarray = lambda shape, dtype, at, *strides: np.ndarray(shape, dtype, at.mem, 0, *strides)
    cupy.get_default_memory_pool = FakePool
    cupy.cuda = SimpleNamespace(
        MemoryPool=FakePool,
        Memory=FakeMemory,
        MemoryPointer=lambda memory, offset: SimpleNamespace(mem=memory),
        UnownedMemory=lambda address, size, owner, gpu: (ctypes.c_uint8 * SPAN).from_address(address),
        get_current_stream=lambda: stream,
        using_allocator=using_allocator,
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupyx", ModuleType("cupyx"))
    monkeypatch.setattr(cublas, "_library", HostCublas)
    for name in (
        "headwise.runtime.ops.cupy_ops",
        "headwise.runtime.ops.cuda_graphs",
        "headwise.runtime.ops.step_upload",
    ):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield log
    for name in (
        "headwise.runtime.ops.cupy_ops",
        "headwise.runtime.ops.cuda_graphs",
        "headwise.runtime.ops.step_upload",
    ):
        sys.modules.pop(name, None)


def cupy_ops(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(gpu_ops, "CudaElementwise", lambda programs: SimpleNamespace(prepare=lambda dtype: None))
    monkeypatch.setattr(gpu_ops, "CudaLikeliest", lambda *arguments: None)
    return import_module("headwise.runtime.ops.cupy_ops").CupyOps("float16", programs=None, launcher=None)


def test_a_graph_is_recorded_from_memory_of_its_own_and_launched(
    cupy_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, made = cupy_ops(monkeypatch), [aligned(16).view(np.float16).reshape(2, 4).view(DeviceArray)]
    replay = ops.capture(lambda: cupy_log.append("work") or made)
    assert cupy_log == ["work", "allocate by FakePool.malloc", "begin", "work", "end", "allocate as before"]
    cupy_log.clear()
    made[0][:] = 7
    owner = weakref.ref(made[0])
    for result in (*replay(), *replay()):
        np.testing.assert_array_equal(result, np.full((2, 4), 7, np.float16))
    assert cupy_log == ["launch"] * 2
    made.clear()
    assert owner() is None, "what comes of a graph does not keep its memory from the next one"


def test_work_in_pieces_is_a_graph_for_each_with_what_is_between_them_anew(
    cupy_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, rows = cupy_ops(monkeypatch), [aligned(SPAN).view(np.float16).reshape(2, 16).view(DeviceArray)]

    def work(cut: Callable[[], None]) -> list[np.ndarray]:
        cupy_log.append("first")
        cut()
        cupy_log.append("second")
        cut()
        return rows

    replay = ops.capture_pieces(work)
    assert cupy_log[:2] == ["first", "second"], "as it is, to load what it needs"
    assert cupy_log[3:-1] == ["begin", "first", "end", "begin", "second", "end", "begin", "end"]
    cupy_log.clear()

    def between(number: int, last: int = 1) -> bool:
        cupy_log.append(f"between {number}")
        return number <= last

    (found,) = replay(between)
    assert cupy_log == ["launch", "between 0", "launch", "between 1", "launch"]
    cupy_log.clear()
    replay(lambda number: between(number, last=-1))
    assert cupy_log == ["launch", "between 0"], "no more is wanted"
    rows[0][:] = np.arange(32, dtype=np.float16).reshape(2, 16)
    np.testing.assert_array_equal(found, rows[0])
    np.testing.assert_array_equal(ops.borrowed(rows[0][:, 4:8]), [[4, 5, 6, 7], [20, 21, 22, 23]])


def test_a_recording_that_fails_is_ended(cupy_log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fails = iter([False, True])
    with pytest.raises(ZeroDivisionError):
        cupy_ops(monkeypatch).capture(lambda: 1 // 0 if next(fails) else [])
    assert cupy_log[1:3] == ["begin", "end"]


def test_products_are_recorded_though_cupy_refuses_its_own(
    cupy_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = cupy_ops(monkeypatch)
    x, weight = ops.tensor(np.ones((3, 16), np.float32)), ops.linear_weight(np.ones((8, 16), np.float32))
    products: list[np.ndarray] = []
    ops.capture(lambda: products.append(ops.linear(x, weight)) or products)
    assert products[0].tolist() == [[16.0] * 8] * 3


def test_memory_that_graphs_compute_with_is_kept_where_memory_is_short(
    cupy_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = cupy_ops(monkeypatch)
    ops._graphs._memory.malloc(100)
    ops._graphs._memory.free_all_blocks()
    assert len(FakeMemory.made) == 1
    ops.give_back_memory()
    assert len(FakeMemory.made) == 0


def test_weights_go_to_the_device_in_pieces(cupy_log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ops = cupy_ops(monkeypatch)
    monkeypatch.setattr(import_module("headwise.runtime.ops.cupy_ops"), "PIECE_BYTES", 100)
    for weight, pieces in ((np.arange(70.0), [100, 100, 80]), (np.arange(70.0).reshape(7, 10), [80, 80, 80, 40])):
        cupy_log.clear()
        np.testing.assert_array_equal(ops.tensor(weight.astype(np.float32)), weight.astype(np.float16))
        assert cupy_log == [f"upload {piece}" for piece in pieces]
    assert ops.tensor(np.ones((2, 60), np.float32)).shape == (2, 60), "rows are not divided"
