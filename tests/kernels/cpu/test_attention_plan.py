"""Plans of attention on a CPU: what is left of one where few rows are wanted."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from headwise.kernels.base import AttentionBatch
from headwise.kernels.cpu.attention_plan import PART_KEYS, TILE_ROWS, Plan, Planner

SHARE = 3
TILE = TILE_ROWS // SHARE
QUERIES = (4 * TILE - 5, 1, TILE, 1)
LENGTHS = (QUERIES[0], 5 * PART_KEYS, TILE + 9000, 7)
HEADS = 2


def plan() -> Plan:
    """Of a prompt, a decode in parts, a tile in parts, and a decode."""
    windows = np.zeros(HEADS, np.int32)
    begins = np.cumsum([0, *QUERIES], dtype=np.int32)
    batch = AttentionBatch(begins, np.array(LENGTHS, np.int32), np.zeros((len(QUERIES), 1), np.int32), 1)
    return Planner(windows, windows, SHARE, 64).plan(batch)


def spans(plan: Plan) -> list[tuple[int, int, int]]:
    """Head, first row and end of each item."""
    _, head, token, tokens, *_ = plan.items.T
    return list(zip(head.tolist(), token.tolist(), (token + tokens).tolist(), strict=True))


@pytest.mark.parametrize(
    "wanted",
    [[QUERIES[0] - 1], [QUERIES[0]], [0, QUERIES[0] + 1 + TILE - 1], [TILE - 1, TILE, sum(QUERIES) - 1], []],
)
def test_items_with_a_wanted_row_are_left_with_all_of_their_parts(wanted: list[int]) -> None:
    every = plan()
    found = every.of_rows(np.array(wanted, np.int64))
    is_kept = [any(begin <= row < end for row in wanted) for _, begin, end in spans(every)]
    assert spans(found) == [span for span, kept in zip(spans(every), is_kept, strict=True) if kept]
    assert len(spans(found)) == HEADS * len({next(s for s in spans(every) if s[1] <= row < s[2]) for row in wanted})
    numbers = [[*every.items[item].tolist(), part] for item, part in every.parts.tolist() if is_kept[item]]
    assert [[*found.items[item].tolist(), part] for item, part in found.parts.tolist()] == numbers


def test_all_rows_are_the_plan_itself() -> None:
    every = plan()
    found = every.of_rows(np.arange(sum(QUERIES)))
    np.testing.assert_array_equal(found.items, every.items)
    np.testing.assert_array_equal(found.parts, every.parts)
    assert len(every.parts) > len(every.items), "some have several"
