"""Adapters of a projection that are multiplied as one: each row has its own, whatever the others are."""

from __future__ import annotations

import numpy as np

from headwise.runtime.models.low_rank import STACKED, AdaptedRows, Pair, added_by, stacked
from headwise.runtime.ops.numpy_ops import NumpyOps

INPUTS, OUTPUTS, OPS = 24, 10, NumpyOps()
DRAW = np.random.default_rng(0)
PAIRS: list[Pair | None] = [
    (DRAW.standard_normal((rank, INPUTS), np.float32), DRAW.standard_normal((OUTPUTS, rank), np.float32))
    for rank in range(1, STACKED + 4)
]
PAIRS[2] = PAIRS[5] = None  # they change something else


def adapted(rows: np.ndarray, x: np.ndarray, pairs: list[Pair | None] = PAIRS) -> np.ndarray:
    """What is added to nothing."""
    added = added_by(pairs, OPS)
    return np.asarray(added.add(np.zeros((len(x), OUTPUTS), np.float32), x, AdaptedRows(rows)))


def test_each_row_has_its_own() -> None:
    rows = np.array([*range(len(PAIRS) + 1), 4, 0, 4], np.int16)
    x = DRAW.standard_normal((len(rows), INPUTS), np.float32)
    for row, found in enumerate(adapted(rows, x)):
        pair = PAIRS[rows[row] - 1] if rows[row] else None
        expected = np.zeros(OUTPUTS) if pair is None else pair[1] @ (pair[0] @ x[row])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_those_of_no_row_are_not_multiplied() -> None:
    first, second = stacked(PAIRS, OPS)
    assert {*first.owners} == {*range(1, STACKED + 1)} - {3, 6}
    assert {*second.owners} == {*range(STACKED + 1, len(PAIRS) + 1)}
    rows = AdaptedRows(np.array([0, 2, 0], np.int16))
    assert rows.others(second.owners, OPS) is None
    others = rows.others(first.owners, OPS)
    assert others is rows.others(first.owners, OPS), "made once"
    assert others.sum(axis=1).tolist() == [len(first.owners), len(first.owners) - 2, len(first.owners)]


def test_what_overflows_in_one_adapter_is_no_other_row_s() -> None:
    wild = (np.full((1, INPUTS), 3e38, np.float32), np.ones((OUTPUTS, 1), np.float32))
    x = np.full((2, INPUTS), 2, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        found = adapted(np.array([1, 2], np.int16), x, [wild, PAIRS[0]])
    assert np.isinf(found[0]).all()
    assert np.isfinite(found[1]).all()
