"""The block copy of a GPU, all of it but the driver: its kernel runs on the CPU, by `cuda_shim`."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.block_copies import SOURCE_BLOCKS, TARGET_BLOCKS, copies, some_bytes
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.host_driver import HostDriver
from support.gpu.host_faults import CUDARuntimeError

from headwise.kernels.block_copy import ReferenceBlockCopy
from headwise.kernels.cuda import block_copy, copy_driver
from headwise.kernels.cuda.block_copy import (
    BATCH_PIECES,
    CANDIDATES,
    CROSSOVER_BYTES,
    FEW,
    CudaBlockCopy,
    measure_crossover,
)
from headwise.kernels.cuda.copy_driver import BatchCopy
from headwise.kernels.cuda.copy_plan import plan_pieces, split_pieces


@pytest.fixture(scope="module")
def shim() -> ShimPrograms:
    return ShimPrograms()


@pytest.fixture
def make(shim: ShimPrograms) -> Callable[[HostDriver, int], CudaBlockCopy]:
    return lambda driver, crossover_bytes: CudaBlockCopy(driver, driver.enqueued(shim), crossover_bytes)


def scattered(blocks: int) -> np.ndarray:
    """Pairs of group 0 without neighbours: every other block, backwards."""
    targets = np.arange(0, blocks, 2)
    return np.stack([targets * 0, targets[::-1], targets], axis=1).astype(np.int32)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    what=copies(),
    offsets=st.sampled_from([(0, 0), (0, 0), (16, 48), (3, 0), (8, 8)]),
    crossover_bytes=st.sampled_from([0, 300, 5000, 1 << 20]),
    few=st.sampled_from([0, FEW]),
    has_batch=st.booleans(),
    pinned=st.sampled_from([True, True, True, False]),
    backwards=st.booleans(),
)
def test_copies_what_the_reference_copies_and_nothing_else(
    make, shim, what, offsets, crossover_bytes, few, has_batch, pinned, backwards
):
    block_bytes, ranges, pairs = what
    source = some_bytes(SOURCE_BLOCKS * block_bytes, seed=1, offset=offsets[0])
    target = some_bytes(TARGET_BLOCKS * block_bytes, seed=2, offset=offsets[1])
    expected = target.copy()
    ReferenceBlockCopy()(source, expected, pairs, ranges, block_bytes)
    driver = HostDriver(pinned=pinned, has_batch=has_batch)
    shim.backwards = backwards
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_copy, "FEW", few)
        make(driver, crossover_bytes)(source, target, pairs, ranges, block_bytes)
    driver.finish()
    np.testing.assert_array_equal(target, expected)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.sampled_from([1, 15, 16, 17, 512, 2047, 2048, 2049, 5000, 6160]), min_size=1, max_size=40),
    apart=st.sampled_from([(0, 0), (16, 32), (5, 0), (8, 8)]),
)
def test_the_kernel_copies_pieces_of_any_size_and_alignment_and_nothing_else(make, sizes, apart):
    """Pieces of 8 KiB strides, ``apart`` bytes into them."""
    driver, stride = HostDriver(), 8192
    source, target = some_bytes(stride * len(sizes), seed=1), some_bytes(stride * len(sizes), seed=2)
    expected, begins = target.copy(), np.arange(len(sizes)) * stride
    for begin, size in zip(begins, sizes, strict=True):
        expected[begin + apart[1] :][:size] = source[begin + apart[0] :][:size]
    pieces = np.stack([begins + source.ctypes.data + apart[0], begins + target.ctypes.data + apart[1], sizes])
    make(driver, 0).copy_by_kernel(pieces)
    driver.finish()
    np.testing.assert_array_equal(target, expected)


def test_the_copy_engines_begin_before_all_is_enqueued(make):
    source, target, driver = some_bytes(600 * 64, seed=1), some_bytes(600 * 64, seed=2), HostDriver()
    make(driver, 0)(source, target, scattered(600), np.array([[0, 64]]), 64)
    assert driver.calls == [("batch", BATCH_PIECES), ("batch", BATCH_PIECES), ("batch", 300 - 2 * BATCH_PIECES)]
    driver.finish()
    np.testing.assert_array_equal(target.reshape(-1, 64)[::2], source.reshape(-1, 64)[:600:2][::-1])


def test_each_piece_goes_the_way_of_its_size(make):
    block_bytes, driver = 4096, HostDriver()
    ranges = np.array([[0, 4096], [0, 512]])
    pairs = scattered(20)
    pairs[::2, 0] = 1
    copy = make(driver, 1024)
    source, target = some_bytes(20 * block_bytes), np.zeros(20 * block_bytes, np.uint8)
    copy(source, target, pairs, ranges, block_bytes)
    assert driver.calls == [("copy", 1), ("kernel", 5), ("batch", 5)]  # the kernel's table is copied first


def test_neighbours_are_one_piece_and_few_pieces_are_copied_by_calls(make):
    driver = HostDriver()
    runs = np.array([(0, at + shift, at) for start, shift in ((0, 3), (8, 2)) for at in range(start, start + 6)])
    copy = make(driver, CROSSOVER_BYTES)
    copy(some_bytes(20 * 4096), np.zeros(20 * 4096, np.uint8), runs.astype(np.int32), np.array([[0, 4096]]), 4096)
    assert driver.calls == [("copy", 1)] * 2


def test_neighbours_across_groups_and_after_empty_ranges_are_one_piece():
    pairs = np.array([(0, 0, 4), (2, 9, 9), (1, 1, 5)], dtype=np.int32)
    ranges = np.array([[32, 64], [0, 16], [7, 7]])
    assert plan_pieces(pairs, ranges, 64, 640, 640).tolist() == [[32], [288], [48]]


def test_the_plan_of_many_pairs_keeps_their_order_and_bytes():
    rng = np.random.default_rng(0)
    pairs = np.stack([rng.integers(0, 4, 10_000), *(rng.permutation(10_000) for _ in range(2))], 1).astype(np.int32)
    ranges = np.array([[0, 64], [8, 40], [16, 16], [0, 1]])
    pieces = plan_pieces(pairs, ranges, 64, 640_000, 640_000)
    assert pieces[2].sum() == np.bincount(pairs[:, 0], minlength=4) @ (ranges[:, 1] - ranges[:, 0])
    split = split_pieces(pieces, 32, FEW)
    assert split.batch.shape[1] + split.kernel.shape[1] == pieces.shape[1]
    assert split.batch[2].min() >= 32 > split.kernel[2].max()
    assert split.single.shape[1] == 0


def test_a_pair_that_leads_outside_is_refused_before_anything_is_enqueued(make):
    driver = HostDriver()
    pairs = np.array([(0, 0, 0), (0, 3, 0)], dtype=np.int32)
    with pytest.raises(ValueError, match="source block 3"):
        make(driver, 0)(np.ones(24, np.uint8), np.zeros(16, np.uint8), pairs, np.array([[0, 8]]), 8)
    assert not driver.calls


def test_tables_are_reused_only_when_the_kernels_that_read_them_are_done(make, monkeypatch):
    """The ring holds a few tables; the stream runs only when the copy waits for it."""
    monkeypatch.setattr(block_copy, "RING_BYTES", 2048)
    driver, block_bytes, blocks = HostDriver(), 64, 64
    copy = make(driver, 1 << 20)
    source, whole = some_bytes(blocks * block_bytes), np.array([[0, block_bytes]])
    targets = [np.zeros_like(source) for _ in range(9)]
    pairs = [np.roll(scattered(blocks), number, axis=0)[: 32 - number] for number in range(len(targets))]
    for target, some in zip(targets, pairs, strict=True):
        copy(source, target, some, whole, block_bytes)
    assert driver.waits > 0
    driver.finish()
    for target, some in zip(targets, pairs, strict=True):
        expected = np.zeros_like(source)
        ReferenceBlockCopy()(source, expected, some, whole, block_bytes)
        np.testing.assert_array_equal(target, expected)


def test_the_table_of_a_launch_that_failed_is_in_use_until_its_copy_is_over(make, monkeypatch):
    """Another stream's table at its place would be overwritten by that copy."""
    monkeypatch.setattr(block_copy, "RING_BYTES", 4 * 32 * 24)  # four tables
    driver, whole = HostDriver(), np.array([[0, 64]])
    copy, pairs = make(driver, 1 << 20), scattered(64)
    source, target = some_bytes(64 * 64), np.zeros(64 * 64, np.uint8)
    driver.refuses_launches = True
    with pytest.raises(CUDARuntimeError):
        copy(source, target, pairs, whole, 64)
    driver.refuses_launches = False
    for _ in range(3):
        copy(source, target, pairs, whole, 64)
    assert driver.waits == 0
    copy(source, target, pairs, whole, 64)
    assert driver.waits == 1
    driver.finish()
    expected = np.zeros_like(source)
    ReferenceBlockCopy()(source, expected, pairs, whole, 64)
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("fails_in", ["launch", "wait"])
def test_tables_that_a_failed_gpu_may_read_are_never_written_again(make, monkeypatch, fails_in):
    monkeypatch.setattr(block_copy, "RING_BYTES", 4 * 32 * 24)  # four tables
    driver, whole, kept = HostDriver(), np.array([[0, 64]]), []
    allocate = driver.allocate
    monkeypatch.setattr(driver, "allocate", lambda num_bytes: kept.append(allocate(num_bytes)) or kept[-1])
    copy, pairs = make(driver, 1 << 20), scattered(64)
    source, target = some_bytes(64 * 64), np.zeros(64 * 64, np.uint8)

    def launch(work):
        driver.faults.fault()
        driver.faults.check()

    for turn in range(4):
        if fails_in == "launch" and turn == 3:
            monkeypatch.setattr(driver, "launch", launch)
            with pytest.raises(CUDARuntimeError):
                copy(source, target, pairs, whole, 64)
        else:
            copy(source, target, pairs, whole, 64)
    driver.faults.fault()
    tables = kept[0].host.copy()
    for _ in range(9):
        with pytest.raises(CUDARuntimeError):
            copy(source, target, np.roll(pairs, 1, axis=0), whole, 64)
    np.testing.assert_array_equal(kept[0].host, tables)


def test_the_host_does_not_wait_while_the_ring_has_room(make):
    driver, blocks = HostDriver(), 64
    source, target, pairs = some_bytes(blocks * 64), np.zeros(blocks * 64, np.uint8), scattered(blocks)
    copy = make(driver, 1 << 20)
    for _ in range(100):
        copy(source, target, pairs, np.array([[0, 64]]), 64)
    assert driver.waits == 0


def test_memory_that_is_not_pinned_is_copied_by_calls_and_that_is_said_once(make, caplog):
    driver = HostDriver(pinned=False)
    copy = make(driver, 1 << 20)
    source, target, pairs = some_bytes(20 * 64), np.zeros(20 * 64, np.uint8), scattered(20)
    for _ in range(2):
        copy(source, target, pairs, np.array([[0, 64]]), 64)
    assert driver.calls == [("copy", 1)] * 20
    assert [record.message for record in caplog.records if "not pinned" in record.message] == [
        "block copy: host memory is not pinned; until it is, blocks are copied one at a time"
    ]
    driver.pinned = True
    copy(source, target, pairs, np.array([[0, 64]]), 64)
    assert driver.calls[-1] == ("kernel", 10)


def test_two_threads_enqueue_at_once_each_their_own(make):
    driver, blocks = HostDriver(), 40
    copy, whole, pairs = make(driver, 1 << 20), np.array([[0, 64]]), scattered(blocks)
    source = some_bytes(blocks * 64)
    expected = np.zeros_like(source)
    ReferenceBlockCopy()(source, expected, pairs, whole, 64)
    targets = [np.zeros_like(source) for _ in range(16)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda target: copy(source, target, pairs, whole, 64), targets))
    driver.finish()
    for target in targets:
        np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize(("host_s", "expected"), [(0.0, CANDIDATES[0]), (20.5e-6, 24 << 10), (1.0, 2 * CANDIDATES[-1])])
def test_the_crossover_is_the_first_size_that_is_enqueued_as_fast_as_the_kernel_copies(make, host_s, expected):
    """The host takes a time per piece for the engines, the kernel a nanosecond per byte."""

    class Timed(HostDriver):
        now, runs = 0.0, 0

        def copy_batch(self, *arrays):
            self.now += host_s / 2  # there, and back
            return super().copy_batch(*arrays)

        def seconds(self, work):
            size = CANDIDATES[self.runs // 8]  # 4 runs of each way at each size
            self.runs += 1
            self.calls.clear()
            work()
            return size * 1e-9 if any(call == "kernel" for call, _ in self.calls) else 0.0

    driver = Timed()
    assert measure_crossover(make(driver, CROSSOVER_BYTES), driver, lambda: driver.now) == expected


# ---- the driver's own entry point ----

FAKE_DRIVER = """
#include <string.h>
#include <stdint.h>
struct attributes { unsigned order; int source[2], target[2]; unsigned flags; };
struct attributes seen;
static int batch(uint64_t *to, uint64_t *from, size_t *sizes, size_t count, struct attributes *attributes,
                 size_t *first, size_t kinds, size_t *failed, void *stream) {
    if (kinds != 1 || first[0] != 0 || stream != (void *)0x77) return 1;
    seen = attributes[0];
    for (size_t i = 0; i < count; i++) {
        if (!sizes[i]) { *failed = i; return 1; }
        memcpy((void *)to[i], (void *)from[i], sizes[i]);
    }
    return 0;
}
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    int known = !strcmp(name, "cuMemcpyBatchAsync") && version == 12080 && flags == 0 && !OLD;
    *function = known ? (void *)batch : 0;
    *status = known ? 0 : 1;
    return known ? 0 : 500;
}
"""


def fake_driver(directory: Path, *, old: bool) -> str:
    compiler = shutil.which("gcc") or pytest.skip("no gcc to compile a stand-in for the driver")
    source, library = directory / "driver.c", directory / "driver.so"
    source.write_text(FAKE_DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", f"-DOLD={int(old)}", "-o", str(library), str(source)], check=True)
    return str(library)


def test_the_batch_copy_is_called_as_cuda_12_8_has_it_with_sources_read_in_stream_order(tmp_path, caplog):
    library = fake_driver(tmp_path, old=False)
    copy = BatchCopy(library)
    source, target = some_bytes(1000), np.zeros(1000, np.uint8)
    begins, sizes = np.array([0, 500, 900], np.uint64), np.array([10, 300, 100], np.uint64)
    at_target, at_source = target.ctypes.data + begins, source.ctypes.data + begins
    assert copy(at_target, at_source, sizes, stream=0x77)
    expected = np.zeros(1000, np.uint8)
    for begin, size in ((0, 10), (500, 300), (900, 100)):
        expected[begin : begin + size] = source[begin : begin + size]
    np.testing.assert_array_equal(target, expected)
    seen = (ctypes.c_uint * 6).in_dll(ctypes.CDLL(library), "seen")
    assert list(seen) == [1, 0, 0, 0, 0, 1]  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, ..., PREFER_OVERLAP_WITH_COMPUTE
    refused = np.array([10, 0, 100], np.uint64)
    assert not copy(at_target, at_source, refused, stream=0x77)
    assert "3 pieces failed with CUresult 1 at piece 1" in caplog.text
    assert not copy(at_target, at_source, sizes, stream=0x77)  # it is not asked again


def test_without_a_driver_or_with_one_before_cuda_12_8_there_is_no_batch_copy(tmp_path):
    one = np.zeros(1, np.uint64)
    assert not BatchCopy(fake_driver(tmp_path, old=True))(one, one, one, stream=0x77)
    assert not BatchCopy("no-such-driver.so")(one, one, one, stream=0x77)


def test_the_attributes_of_a_batch_lie_as_the_driver_reads_them():
    """CUmemcpyAttributes of cuda.h, the same in CUDA 12.8 to 13."""
    struct = copy_driver._Attributes
    assert ctypes.sizeof(struct) == 24
    assert [getattr(struct, name).offset for name, _ in struct._fields_] == [0, 4, 12, 20]
