"""What adapters add to a product on a CPU: each row has its own, whatever rows beside it have."""

from __future__ import annotations

import numpy as np
import pytest
from support.other_cpus import OTHER_CPUS, assert_passes
from support.thread_pools import NoCoreForOthers

from headwise.kernels.bfloat16 import to_bits, to_float32
from headwise.kernels.cpu import low_rank as module
from headwise.kernels.cpu.low_rank import PackedLowRank, Pair, RowGroups, pack_low_rank
from headwise.kernels.cpu.low_rank_jit import MOST_ROWS
from headwise.runtime.models.low_rank import AdaptedRows

DRAW = np.random.default_rng(0)
RANKS = (1, 4, 16, 17, 64)
ROWS = np.array([0, 1, 1, 1, 1, 1, 1, 1, 2, 0, 0, 0, 0, 0, 0, 3, 5, 4, 4, 1, 0], np.int16)


def drawn(rank: int, inputs: int, outputs: int) -> Pair:
    return DRAW.standard_normal((rank, inputs), np.float32), DRAW.standard_normal((outputs, rank), np.float32)


def pairs_of(inputs: int, outputs: int) -> list[Pair | None]:
    """The third adapter changes something else."""
    return [None if place == 2 else drawn(rank, inputs, outputs) for place, rank in enumerate(RANKS)]


def added(packed: PackedLowRank, y: np.ndarray, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return packed.add(y.copy(), x, AdaptedRows(rows))


def expected(pairs: list[Pair | None], y: np.ndarray, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    found = y.astype(np.float64)
    for row, place in enumerate(rows):
        if place and pairs[place - 1] is not None:
            down, up = (matrix.astype(np.float64) for matrix in pairs[place - 1])
            found[row] += up @ (down @ x[row])
    return found


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(24, 10), (7, 64), (64, 200), (576, 960), (1, 2)])
def test_each_row_has_its_own(inputs: int, outputs: int, gated: bool) -> None:
    pairs = pairs_of(inputs, outputs)
    packed = pack_low_rank(pairs, "float32", 2, gated)
    x, y = (DRAW.standard_normal((len(ROWS), size), np.float32) for size in (inputs, outputs))
    wanted = expected(pairs, y, x, ROWS)
    np.testing.assert_allclose(added(packed, y, x, ROWS), wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("gated", [False, True])
def test_matrices_kept_in_bfloat16_are_rounded_and_nothing_else_is(gated: bool) -> None:
    pairs = pairs_of(48, 96)
    rounded = [None if pair is None else tuple(to_float32(to_bits(matrix)) for matrix in pair) for pair in pairs]
    narrow, wide = pack_low_rank(pairs, "bfloat16", 2, gated), pack_low_rank(rounded, "float32", 2, gated)
    x, y = (DRAW.standard_normal((len(ROWS), size), np.float32) for size in (48, 96))
    np.testing.assert_array_equal(added(narrow, y, x, ROWS), added(wide, y, x, ROWS))


def test_neither_threads_nor_other_rows_change_a_row_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = pairs_of(100, 300)
    x, y = (DRAW.standard_normal((len(ROWS), size), np.float32) for size in (100, 300))
    one = added(pack_low_rank(pairs, "float32", 1), y, x, ROWS)
    for row in range(len(ROWS)):
        alone = slice(row, row + 1)
        found = added(pack_low_rank(pairs, "float32", 1), y[alone], x[alone], ROWS[alone])
        np.testing.assert_array_equal(found, one[alone])
    monkeypatch.setattr(module, "THREAD_FLOPS", 1)
    np.testing.assert_array_equal(added(pack_low_rank(pairs, "float32", 2), y, x, ROWS), one)
    monkeypatch.setattr(module, "pool_of_this_process", NoCoreForOthers)
    np.testing.assert_array_equal(added(pack_low_rank(pairs, "float32", 2), y, x, ROWS), one)


def test_ranks_that_outputs_have_nothing_of_are_not_multiplied_with() -> None:
    """As of queries, keys and values, whose adapters lie along a diagonal."""
    down, up = drawn(12, 32, 128)
    up[:32, 4:] = up[32:64] = 0
    up[64:, :4] = 0
    packed = pack_low_rank([(down, up)], "float32", 1)
    x, y, rows = DRAW.standard_normal((3, 32), np.float32), np.zeros((3, 128), np.float32), np.ones(3, np.int16)
    found = added(packed, y, x, rows)
    np.testing.assert_allclose(found, x @ down.T @ up.T, rtol=0, atol=1e-4)
    ups = packed.arrays[2]
    assert ups["ranks"].tolist() == [4, 0, 8, 8]
    assert ups["first_rank"].tolist() == [0, 0, 4, 4]


def test_what_overflows_is_the_row_s_own() -> None:
    pairs: list[Pair | None] = [drawn(4, 16, 40), (np.full((4, 16), 3e38, np.float32), np.ones((40, 4), np.float32))]
    x = np.full((4, 16), 2, np.float32)
    x[3] = np.inf
    found = added(
        pack_low_rank(pairs, "float32", 1), np.zeros((4, 40), np.float32), x, np.array([1, 2, 0, 1], np.int16)
    )
    assert np.isfinite(found[[0, 2]]).all()
    assert np.isinf(found[1]).all()
    assert not np.isfinite(found[3]).any()
    assert not found[2].any()


def test_adapters_that_change_nothing_of_a_projection_are_nothing() -> None:
    assert pack_low_rank([], "float32", 1) is None
    assert pack_low_rank([None, None], "bfloat16", 1) is None
    packed = pack_low_rank([None, drawn(2, 8, 8)], "float32", 1)
    y = DRAW.standard_normal((2, 8), np.float32)
    assert np.array_equal(added(packed, y, y, np.array([0, 1], np.int16)), y)


def test_groups_are_of_neighbours_with_one_adapter() -> None:
    groups = RowGroups.of(ROWS)
    found = np.zeros_like(ROWS) - 1
    for adapter, first, count in groups.table:
        assert 1 <= count <= MOST_ROWS
        assert (found[first : first + count] == -1).all(), "each row is of one group"
        found[first : first + count] = adapter + 1
    assert found.tolist() == ROWS.tolist()
    adapters = groups.table[:, 0]
    assert (adapters[: groups.adapted] >= 0).all()
    assert (adapters[groups.adapted :] == -1).all()
    assert (np.diff(adapters[: groups.adapted]) >= 0).all(), "matrices are read once"
    assert RowGroups.of(np.zeros(5, np.int16)).adapted == 0


@pytest.mark.soak
@pytest.mark.parametrize("cpu", OTHER_CPUS)
def test_rows_compiled_for_other_cpus_pass_all_tests(cpu: str) -> None:
    assert_passes(__file__, cpu)
