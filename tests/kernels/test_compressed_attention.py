"""Attention to a window and entries: the reference against sums over tokens, and the CPU's kernels against both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compressed_scene import CompressedCase, CompressedScene

from headwise.errors import ConfigError
from headwise.kernels.compressed import columns_of, ending, entries_layout, rows_layout
from headwise.kernels.compressed_base import PlainCompressedKernels
from headwise.kernels.compressed_reference import ReferenceCompressedKernels
from headwise.kernels.compressed_rows import dequantised, quantised
from headwise.kernels.cpu.compressed_attention import NumbaCompressedKernels
from headwise.kernels.mla import latent_view
from headwise.kernels.select import make_compressed_kernels

CASES = {
    "chosen entries": CompressedCase((5, 1, 16), (61, 40, 16)),
    "all entries": CompressedCase((5, 1, 16), (61, 40, 16), is_indexed=False),
    "entries of more tokens than a block": CompressedCase((9, 1), (70, 33), rate=16, is_indexed=False, block_size=4),
    "entries beside those of other layers": CompressedCase((3, 30), (50, 30), rate=8, is_indexed=False, beside=3),
    "no entry yet": CompressedCase((2, 3), (2, 3)),
    "a decode": CompressedCase((1, 1, 1), (60, 4, 3)),
}


def kernels() -> list[PlainCompressedKernels]:
    return [ReferenceCompressedKernels(), NumbaCompressedKernels(threads=2)]


@pytest.mark.parametrize("each", kernels(), ids=lambda each: each.name)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_query_sees_its_window_and_entries(case: CompressedCase, each: PlainCompressedKernels) -> None:
    scene = CompressedScene(case)
    scene.write(each)
    scene.recycle()
    np.testing.assert_allclose(scene.attend(each), scene.expected(), atol=2e-5, rtol=1e-4)
    np.testing.assert_allclose(scene.attend(each, with_entries=False), scene.expected(False), atol=2e-5, rtol=1e-4)


@st.composite
def cases(draw: st.DrawFn) -> CompressedCase:
    rate, is_indexed = draw(st.sampled_from([2, 4, 8])), draw(st.booleans())
    block_size = draw(st.sampled_from([2, 4, 8, 16]))
    lengths = draw(st.lists(st.integers(1, 50), min_size=1, max_size=4))
    queries = [draw(st.integers(0 if len(lengths) > 1 else 1, length)) for length in lengths]
    if not any(queries):
        queries[0] = 1
    dtype = draw(st.sampled_from(["float32", "bfloat16", "int8", "float8_e4m3fn"]))
    return CompressedCase(
        tuple(queries),
        tuple(lengths),
        rate,
        is_indexed,
        window=draw(st.integers(1, 20)),
        heads=draw(st.integers(1, 5)),
        top=draw(st.integers(1, 8)) if dtype == "float32" else 50,  # scores of rounded queries may choose others
        block_size=block_size,
        beside=1 if is_indexed else draw(st.integers(1, 3)),
        dtype=dtype,
        chunk=draw(st.integers(1, 20)),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_any_batch_is_as_the_reference_has_it(case: CompressedCase) -> None:
    """On the same arena: entries are chosen by the same rounded numbers."""
    reference, numba = kernels()
    scene = CompressedScene(case)
    scene.write(numba)
    scene.recycle()
    found, expected = scene.attend(numba), scene.attend(reference)
    np.testing.assert_allclose(found, expected, atol=2e-2 if case.dtype == "bfloat16" else 2e-5, rtol=1e-4)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_entries_are_the_same_whatever_steps_made_them(case: CompressedCase) -> None:
    scenes = [CompressedScene(each) for each in (case, replace(case, chunk=max(case.seq_lens)))]
    for scene in scenes:
        scene.write(NumbaCompressedKernels(threads=1))
    views = [latent_view(scene.arena, scene.entries.made.layout.own) for scene in scenes]
    np.testing.assert_array_equal(views[0], views[1])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), min_size=1, max_size=5), st.integers(2, 9))
def test_entries_end_in_the_step_of_their_last_token(steps: list[tuple[int, int]], rate: int) -> None:
    scene = CompressedScene(CompressedCase((1,), (1,)))
    batch = scene.batch([queries for queries, _ in steps], [queries + before for queries, before in steps])
    found = list(zip(*map(np.ndarray.tolist, ending(batch, rate)), strict=True))
    expected = [
        (sequence, number)
        for sequence, (queries, before) in enumerate(steps)
        for number in range(50)
        if before <= number * rate + rate - 1 < before + queries
    ]
    assert found == expected


@pytest.mark.parametrize(("block_size", "rate"), [(16, 4), (4, 16), (8, 8)])
def test_an_entry_lies_in_the_block_of_its_last_token(block_size: int, rate: int) -> None:
    layout = entries_layout(block_size, 1, 32, rate, "float32")
    numbers = np.arange(40)
    columns, places = columns_of(numbers, layout)
    assert columns.tolist() == [(number * rate + rate - 1) // block_size for number in numbers]
    taken = set(zip(columns.tolist(), places.tolist(), strict=True))
    assert len(taken) == len(numbers)
    assert places.max() < layout.own.block_size == max(1, block_size // rate)


@pytest.mark.parametrize(("dtype", "plain", "turned"), [("int8", 0.01, 0.001), ("float8_e4m3fn", 0.03, 0.001)])
def test_numbers_that_turn_keep_more_digits(dtype: str, plain: float, turned: float) -> None:
    """Mean errors, relative to numbers, where those that turn are ten times as large: DeepSeek keeps the ones in E4M3,
    0.02, and the others in bfloat16, 0.001."""
    rows, turns = np.random.default_rng(3).standard_normal((200, 64), np.float32), np.arange(64) % 32 < 4
    rows[:, turns] *= 10
    stored, scales = quantised(rows, 4, dtype)
    assert stored.shape == (200, 64 + 8)
    off = np.abs(dequantised(stored, scales, 64) - rows)
    of_both = [off[:, some].mean() / np.abs(rows[:, some]).mean() for some in (~turns, turns)]
    assert plain / 4 < of_both[0] < plain
    assert turned / 4 < of_both[1] < turned
    broken = np.where(np.arange(64) == 9, np.float32("nan"), rows[:1])
    assert np.isnan(dequantised(*quantised(broken, 4, dtype), 64)).all()


def test_layouts_tell_what_they_cannot_keep() -> None:
    with pytest.raises(ConfigError, match="kv_dtype int4 cannot hold what compressed attention keeps: choose kv_dtype"):
        rows_layout(16, 1, 32, "int4")
    with pytest.raises(ConfigError, match=r"block_size 24 neither divides the 16 tokens .* choose a power of two"):
        entries_layout(24, 1, 32, 16, "float32")
    with pytest.raises(ConfigError, match="unknown kernels 'cuda'"):
        make_compressed_kernels("cuda", 1)


def test_a_layout_of_entries_is_none_of_tokens() -> None:
    tokens, entries = rows_layout(16, 2, 32, "float32"), entries_layout(16, 2, 32, 4, "float32")
    assert entries.slot_bytes * 4 == tokens.slot_bytes
    assert entries.identity != entries.own.identity
    assert entries_layout(16, 2, 32, 4, "float32", least_bytes=4096).slot_bytes == 4096
