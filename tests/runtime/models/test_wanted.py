"""Attention with a step's wanted queries alone."""

from __future__ import annotations

import numpy as np
import pytest

from headwise.kernels.base import AttentionBatch, HostLengths
from headwise.runtime.models.attention.wanted import ending_at, wanted_rows
from headwise.runtime.ops.select import make_ops


@pytest.mark.parametrize("is_on_host", [True, False])
def test_each_wanted_query_is_a_sequence_that_ends_with_it(is_on_host: bool) -> None:
    """Of three sequences of 5, 1 and 4 queries behind 10, 20 and no tokens, in two head groups."""
    begins, lengths = np.array([0, 5, 6, 10], np.int32), np.array([15, 21, 4], np.int32)
    tables = np.arange(3 * 2 * 4, dtype=np.int32).reshape(6, 4)
    batch = AttentionBatch(begins, lengths, tables, groups=2, max_query_len=5)
    if is_on_host:  # and the device's are not looked at
        batch = AttentionBatch(begins[:0], lengths[:0], tables, 2, 5, HostLengths(begins, lengths))
    found = ending_at(batch, np.array([0, 4, 5, 8]), make_ops("numpy", 1, "float32"))
    assert found.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    assert found.seq_lens.tolist() == [11, 15, 21, 3]
    assert found.block_tables.tolist() == tables[[0, 1, 0, 1, 2, 3, 4, 5]].tolist()
    assert (found.groups, found.max_query_len) == (2, 1)
    assert found.on_host is not None
    assert found.on_host.seq_lens.tolist() == found.seq_lens.tolist()


@pytest.mark.parametrize(
    ("wanted", "shared"),
    [([0, 1, 2, 3, 4, 5], [0, 8, 8, 0, 4, 0]), ([1, 2, 4], [0, 8, 0]), ([0, 2, 3, 4], [0, 8, 0, 4]), ([2, 5], [0, 0])],
)
def test_what_is_left_of_a_group_shares_what_all_of_it_does(wanted: list[int], shared: list[int]) -> None:
    lengths, tables = np.full(6, 20, np.int32), np.zeros((6, 5), np.int32)
    told = np.array([0, 8, 8, 0, 4, 0], np.int32)
    batch = AttentionBatch(np.arange(7, dtype=np.int32), lengths, tables, 1, 1, shared=told)
    found = ending_at(batch, np.array(wanted), make_ops("numpy", 1, "float32"))
    assert found.shared is not None
    assert found.shared.tolist() == shared


def test_rows_are_all_some_or_none() -> None:
    ops, rows = make_ops("numpy"), np.arange(12, dtype=np.float32).reshape(4, 3)
    assert wanted_rows(rows, None, ops) is rows
    assert wanted_rows(rows, np.array([1, 3]), ops).tolist() == rows[[1, 3]].tolist()
    assert wanted_rows(rows, np.zeros(0, np.int64), ops).shape == (0, 3)
