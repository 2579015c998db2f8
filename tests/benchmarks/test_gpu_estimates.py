"""The models of time in docs/gpu.md are what `benchmarks/gpu/estimates.py` computes."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu.estimates import (
    AT_BEST,
    CALL_S,
    CALLS,
    H200,
    HOST_S,
    MS,
    PRODUCTS,
    asked_experts,
    moe_bytes,
    tables,
)
from gpu.sizes import FULL

from headwise.kernels.cuda.cards import PRODUCTS as PRODUCTS_OF_SM
from headwise.runtime.worker.prefill_graphs import ENQUEUED_S, SHARE

DOCUMENT = Path(__file__).parents[2] / "docs" / "gpu.md"


def test_the_document_has_every_table_as_it_is_computed() -> None:
    text = DOCUMENT.read_text()
    for table in tables():
        assert str(table) in text, "run benchmarks/gpu/estimates.py"


def test_what_workers_choose_by_is_what_the_document_says_of_the_host_and_the_card() -> None:
    assert pytest.approx(HOST_S + CALLS * CALL_S) == ENQUEUED_S
    assert AT_BEST == SHARE
    assert H200.sms * PRODUCTS_OF_SM[H200.sm] * 1.83e9 == pytest.approx(PRODUCTS / 2, rel=2e-3)


def test_a_step_of_experts_reads_all_of_them_once_it_is_large() -> None:
    assert asked_experts(64, 6, 1) == pytest.approx(6)
    assert asked_experts(64, 6, 64) == pytest.approx(64, abs=0.2)
    whole = FULL.moe | {"num_hidden_layers": 28}
    parameters = 21.8e9  # the published number
    assert moe_bytes(whole, 64, 0) == pytest.approx(2 * parameters, rel=0.02)
    cached = moe_bytes(whole, 64, 1024) - moe_bytes(whole, 64, 0)
    assert cached == 64 * 1024 * 2 * 2 * FULL.moe["num_key_value_heads"] * FULL.moe["head_dim"] * 28
    assert moe_bytes(whole, 64, 0) / H200.bandwidth == pytest.approx(10.3 * MS, rel=0.02)
