"""The models of time in docs/gpu.md are what `benchmarks/gpu/estimates.py` computes, of what the compiler makes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="tiles and instructions are those of its kernels")

from gpu.estimates import (
    AT_BEST,
    CALL_S,
    CALLS,
    COUNTED,
    H200,
    HOST_S,
    MS,
    PRODUCTS,
    Sampling,
    asked_experts,
    moe_bytes,
    tables,
)
from gpu.machine_code import loops_of, sass_of
from gpu.sizes import FULL

from headwise.kernels.cuda.attention import AttentionShape, variants_of
from headwise.kernels.cuda.cards import PRODUCTS as PRODUCTS_OF_SM
from headwise.kernels.cuda.cubins import Target, compile_variant
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


def test_more_rows_take_longer_to_sample_but_not_less_than_their_launches() -> None:
    few, many = (Sampling(H200, rows, 128_256).ways() for rows in (1, 64))
    for way, (launches, seconds) in many.items():
        assert seconds > few[way][1] > launches * 2e-6


@pytest.mark.soak
@pytest.mark.parametrize("kv_dtype", COUNTED)
def test_instructions_of_a_tile_are_those_that_the_assembler_makes(kv_dtype: str) -> None:
    decode = variants_of(AttentionShape(4, 128, 64, "bfloat16", kv_dtype), 90)[1]
    (loop,) = loops_of(sass_of(compile_variant(decode, Target(90, 12))))
    assert loop.instructions == COUNTED[kv_dtype]
