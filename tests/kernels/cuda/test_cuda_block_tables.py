"""Block tables on a GPU: executed on a CPU by `cuda_shim`, compiled for GPUs by NVRTC."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.emulated_gpu import EmulatedOps
from support.gpu.machine_code import TARGETS, machine_code, spilled

from headwise.cache_controller.block_tables import HostBlockTables, TableShape
from headwise.cache_controller.radix_tree import NOWHERE
from headwise.kernels.cuda.block_tables import SOURCE, CudaBlockTables
from headwise.runtime.worker.device_block_tables import DeviceBlockTables

examples = settings(max_examples=30, suppress_health_check=list(HealthCheck))
BEYOND = 77_777


@pytest.fixture(scope="module")
def shim() -> ShimPrograms:
    return ShimPrograms()


class Ops(EmulatedOps):
    """Memory is full of blocks that nobody named, and has a rim of them that nobody may write to."""

    def __init__(self, programs: ShimPrograms) -> None:
        super().__init__("float32", programs)
        self._made: list[np.ndarray] = []

    def empty_bytes(self, num_bytes: int) -> np.ndarray:
        whole = np.full(num_bytes // 4 + 128, BEYOND, np.int32)
        self._made.append(whole)
        return whole[64:-64].view(np.uint8)

    def assert_rims_are_whole(self) -> None:
        for whole in self._made:
            assert (whole[:64] == BEYOND).all()
            assert (whole[-64:] == BEYOND).all()


def updates_of(shape: TableShape, count: int, rng: np.random.Generator) -> np.ndarray:
    """Few cells, so that many updates are of the same."""
    cells = rng.integers(0, shape.cells, (count, 3))
    cells = cells[rng.integers(0, max(1, count // 2), count)] if count else cells
    return np.concatenate([cells, rng.integers(-1, 9999, (count, 1))], axis=1).astype(np.int32)


def assert_gathers_alike(
    device: DeviceBlockTables, host: HostBlockTables, rows: np.ndarray, seq_lens: np.ndarray, columns: int
) -> None:
    """Of what a sequence reaches; the rest is not written."""
    shape = host.shape
    found = device.gather(rows, seq_lens, columns)
    assert (found.dtype, found.shape) == (np.int32, (len(rows) * shape.groups, columns))
    expected = np.full((len(rows), shape.groups, columns), BEYOND, np.int32)
    for to, row, tokens in zip(expected, rows, seq_lens, strict=True):
        used = shape.columns(int(tokens))
        to[:, :used] = host.array[row, :, :used]
    np.testing.assert_array_equal(found, expected.reshape(-1, columns))


@examples
@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 4),
    blocks=st.sampled_from([1, 15, 300, 1100]),
    block_size=st.sampled_from([1, 3, 16]),
    threads=st.sampled_from([32, 64]),
    backwards=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_tables_are_those_of_a_host_whatever_is_opened_updated_and_gathered(
    shim: ShimPrograms,
    rows: int,
    groups: int,
    blocks: int,
    block_size: int,
    threads: int,
    backwards: bool,
    seed: int,
) -> None:
    shape, rng = TableShape(rows, groups, blocks, block_size), np.random.default_rng(seed)
    shim.backwards = backwards
    ops = Ops(shim)
    device, host = DeviceBlockTables(ops, CudaBlockTables(shim, threads), shape), HostBlockTables(shape)
    for count in (0, 1, 300):
        opened = rng.integers(0, rows, rng.integers(0, 3)).tolist()
        updates = updates_of(shape, count, rng)
        for tables in (device, host):
            tables.open_rows(iter(opened))
            if count == 1:
                tables.apply(updates)
            else:
                padding = np.full((5, 4), NOWHERE, np.int32)
                tables.enter(np.concatenate([tables.in_any_order(updates), padding]))
        batch = rng.permutation(rows)[: rng.integers(1, rows + 1)].astype(np.int32)
        seq_lens = rng.integers(0, blocks * block_size + 1, len(batch)).astype(np.int32)
        seq_lens[rng.random(len(batch)) < 0.3] = 0  # padding
        reached = shape.columns(int(seq_lens.max()))
        for columns in (max(reached, 1), reached + 13):
            assert_gathers_alike(device, host, batch, seq_lens, columns)
    np.testing.assert_array_equal(device._tables.reshape(shape.cells), host.array)
    ops.assert_rims_are_whole()


def test_a_sequence_said_to_be_longer_than_a_table_ends_with_it(shim: ShimPrograms) -> None:
    shape = TableShape(max_rows=2, groups=2, max_blocks=5, block_size=4)
    device = DeviceBlockTables(Ops(shim), CudaBlockTables(shim, 32), shape)
    (found,) = device.gather(np.array([1], np.int32), np.array([2**31 - 1], np.int32), 9)[1:]
    assert found.tolist() == [-1] * 5 + [BEYOND] * 4


@pytest.mark.parametrize("cell", [(2, 0, 0), (0, 3, 0), (0, 0, 4), (-1, 0, 0), (0, 0, -1)])
def test_a_cell_that_there_is_not_is_refused_before_anything_is_written(shim: ShimPrograms, cell: tuple) -> None:
    shape = TableShape(max_rows=2, groups=3, max_blocks=4, block_size=4)
    device = DeviceBlockTables(Ops(shim), CudaBlockTables(shim, 32), shape)
    with pytest.raises(ValueError, match="coordinates"):
        device.apply(np.array([(0, 0, 0, 5), (*cell, 5)], np.int32))
    assert (device._tables == -1).all()


@pytest.mark.parametrize("sm", TARGETS)
def test_it_compiles_without_spills(sm: int) -> None:
    assert spilled(machine_code(SOURCE, {}, sm)) == []
