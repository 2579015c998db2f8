"""Each quantised type of GGUF is taken apart into the numbers that its authors' reader gives."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from headwise.runtime.loader.gguf_blocks import FORMATS, take_apart

ROWS, COLUMNS = 9, 768


def random_blocks(kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Random bytes ``[ROWS, bytes]`` but for the scales of blocks, which are small numbers."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(int(kind))
    blocks = draw.integers(0, 256, (ROWS * COLUMNS // size, nbytes), dtype=np.uint8)
    scales = draw.standard_normal((len(blocks), 2)).astype("<f2").view(np.uint8)
    if kind.name == "MXFP4":
        blocks[:, 0] = draw.integers(0, 140, len(blocks))  # exponents, of denormal numbers, too
    elif kind.name == "Q6_K":
        blocks[:, -2:] = scales[:, :2]
    else:
        end = 4 if FORMATS[kind.name].has_minimum else 2
        blocks[:, :end] = scales[:, :end]
    return blocks.reshape(ROWS, -1)


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_are_exactly_the_numbers_that_gguf_reads(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    raw = random_blocks(kind)
    found = take_apart(raw.reshape(-1), name, (ROWS, COLUMNS))
    expected = gguf.dequantize(raw, kind)
    assert np.isfinite(expected).all()
    assert expected.std() > 0.5
    np.testing.assert_array_equal(found.dequantised(), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_have_the_form_that_was_announced(name: str) -> None:
    form = FORMATS[name]
    found = take_apart(random_blocks(gguf.GGMLQuantizationType[name]).reshape(-1), name, (ROWS, COLUMNS))
    assert found.form == ("int8" if form.signed else "uint8", form.bits, form.group, form.has_minimum)
    low = -(1 << form.bits - 1) if form.signed else 0
    high = low + (1 << form.bits) - 1
    assert low <= found.codes.min() <= found.codes.max() <= high
    expected = (min(form.numbers), max(form.numbers)) if form.numbers else (low, high)
    assert (found.codes.min(), found.codes.max()) == expected, "no bit is more than it takes"
