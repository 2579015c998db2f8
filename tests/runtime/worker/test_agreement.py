"""Ranks agree on the least of their numbers, and on what is so on all of them."""

from __future__ import annotations

import pytest
from support.engine.dense_oracle import on_ranks

from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.worker.agreement import Agreement

MOST = 1 << 24


@pytest.mark.parametrize("numbers", [(5, 3, 4), (MOST, MOST - 1, MOST), (0, 0, 7)])
def test_all_ranks_have_the_least_number_exactly(numbers: tuple[int, ...]) -> None:
    found = on_ranks(3, lambda comm: Agreement(comm).least(numbers[comm.rank]))
    assert found == dict.fromkeys(range(3), min(numbers))


@pytest.mark.parametrize("so", [(True, True, True), (True, False, True), (False, False, False)])
def test_it_is_so_where_it_is_on_every_rank(so: tuple[bool, ...]) -> None:
    found = on_ranks(3, lambda comm: Agreement(comm).is_so(so[comm.rank]))
    assert found == dict.fromkeys(range(3), all(so))


def test_one_rank_agrees_with_itself() -> None:
    alone = Agreement(SingleRank())
    assert alone.least(MOST) == MOST
    assert [alone.is_so(so) for so in (True, False)] == [True, False]
