"""Products in AMX's tiles have one order of sums, whatever the number of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from headwise.kernels.bfloat16 import to_bits, to_float32
from headwise.kernels.cpu import amx
from headwise.kernels.cpu.matmul import matmul, pack_float, pack_quantised
from headwise.kernels.cpu.matmul_kinds import PANEL
from headwise.kernels.cpu.simd import ISA

PAIRS = 16
"""Pairs of depth of a block."""


def normal(*shape: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def rounded(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    return to_float32(to_bits(numbers))


def summed_by_blocks(x: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """``x [rows, depth] @ weight [columns, depth].T`` in float32, in the order of `headwise.kernels.cpu.tiles`.

    Products of two bfloat16 are exact in float32, so it does not matter whether they are rounded before they are added.
    """
    total = np.zeros((len(x), len(weight)), np.float32)
    for block in range(0, x.shape[1], 2 * PAIRS):
        halves = np.zeros((2, *total.shape), np.float32)
        for pair in range(min(PAIRS, (x.shape[1] - block) // 2)):
            for half in range(2):
                at = block + 2 * pair + half
                halves[half] += x[:, at, None] * weight[None, :, at]
        total += halves[0] + halves[1]
    return total


def test_a_panel_lies_in_tiles_where_these_multiply_it_else_in_pairs() -> None:
    weight = normal(PANEL, 6 * 2 * PAIRS)
    split = to_bits(weight).reshape(PANEL // PAIRS, PAIRS, -1, PAIRS, 2)  # tiles, columns, blocks, pairs
    expected = split.transpose((2, 0, 3, 1, 4) if ISA.amx else (2, 3, 0, 1, 4))
    np.testing.assert_array_equal(pack_float(weight, "bfloat16").packed.reshape(-1), expected.reshape(-1))


@pytest.mark.skipif(not ISA.amx, reason="this CPU has no AMX, or this process no leave to use it")
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 32, 45, 130, 385])
def test_any_number_of_rows_is_summed_in_that_order_to_the_bit(rows: int) -> None:
    depth, columns = (
        2048 + 96,
        200,
    )  # more than is multiplied at once, and no whole panels; of 385 rows a block has none
    x, weight = normal(rows, depth), normal(columns, depth, seed=2)
    found = matmul(x, pack_float(weight, "bfloat16"), 2)
    np.testing.assert_array_equal(found, summed_by_blocks(rounded(x), rounded(weight)))


def summed_by_parts(x: NDArray[np.float32], codes: NDArray[np.int8], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """``x [rows, depth]`` times codes ``[columns, depth]`` with a scale for each group of inputs, in the order of
    `headwise.kernels.cpu.codes_amx`: products with scales are not rounded before they are added.
    """
    group, most = codes.shape[1] // scale.shape[1], 4 * 2 * PAIRS
    unit = 2 * PAIRS if group % (2 * PAIRS) == 0 else PAIRS
    total, first = np.zeros((len(x), len(codes)), np.float32), 0
    while first < x.shape[1]:
        end = min((first // group + 1) * group, (first // most + 1) * most)
        part = np.zeros_like(total)
        for at in range(first, end, unit):
            part += summed_by_blocks(x[:, at : at + unit], codes[:, at : at + unit].astype(np.float32))
        scaled = part.astype(np.float64) * scale[None, :, first // group]
        total, first = (total + scaled).astype(np.float32), end
    return total


@pytest.mark.skipif(not ISA.amx, reason="this CPU has no AMX, or this process no leave to use it")
@pytest.mark.parametrize("group", [16, 32, 48, 64, 128, 160, 960, 1920])
@pytest.mark.parametrize("rows", [1, 2, 3, 17, 97])
def test_integers_are_summed_by_groups_and_four_blocks_in_any_number_of_rows(group: int, rows: int) -> None:
    depth, columns = 1920, 70
    x, codes = normal(rows, depth), np.random.default_rng(group).integers(-127, 128, (columns, depth), np.int8)
    scale = normal(columns, depth // group, seed=2).astype(np.float16).astype(np.float32)
    found = matmul(x, pack_quantised(codes, scale, None, 8), 2)
    np.testing.assert_array_equal(found, summed_by_parts(rounded(x), codes, scale))


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("group", [16, 48, 128, 160, 960, 1920])
def test_a_row_among_others_is_what_it_is_alone_however_many_inputs_have_a_scale_and_a_minimum(
    bits: int, group: int
) -> None:
    depth, columns = 1920, 70
    x, codes = normal(97, depth), np.random.default_rng(group).integers(0, 1 << bits, (columns, depth), np.uint8)
    scale, minimum = (normal(columns, depth // group, seed=seed) for seed in (2, 3))
    weight = pack_quantised(codes, scale, minimum, bits)
    whole = matmul(x, weight, 2)
    for rows in (1, 2, 3, 16):
        np.testing.assert_array_equal(matmul(x[:rows], weight, 1), whole[:rows])


def test_tiles_are_granted_only_where_the_cpu_has_them() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    has_tiles = cpuinfo.exists() and "amx_tile" in cpuinfo.read_text().split()
    assert has_tiles or not amx.is_granted()
