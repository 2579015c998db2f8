"""Random weights in each form that CPU kernels pack, and products with them in float64 on what is stored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.cpu.matmul import PackedWeight, pack_float, pack_quantised
from headwise.kernels.cpu.matmul_kinds import INTEGERS
from headwise.kernels.cpu.matmul_rows import LARGEST

FORMS = (
    "float32", "bfloat16", "int8", "int8 by 16", "int8 with minima", "int4", "int4 by 16", "int4 with minima",
    "int5", "int5 with minima", "int6 by 16", "int6 with minima",
)  # fmt: skip
"""Of weights; fewer bits than 8 without minima are signed codes. Groups are of 32 inputs where nothing else is said."""


def as_bfloat16(x: np.ndarray) -> np.ndarray:
    """``x`` rounded to bfloat16, as float32."""
    return x.astype(numpy_dtype("bfloat16")).astype(np.float32)


@dataclass(frozen=True)
class RandomWeight:
    """values: float64 ``[outputs, inputs]``; sizes: what rounding errors of a product with it are in proportion to"""

    form: str
    packed: PackedWeight
    values: np.ndarray
    sizes: np.ndarray

    def product(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``x @ values.T`` of what is multiplied, and how far a sum in float32 may lie from it.

        Where rows are multiplied as integers, these are half a step at most from the row's own numbers.
        """
        if INTEGERS and self.form.startswith("int"):
            factors = x.astype(np.float64)
            parts = factors.reshape(*x.shape[:-1], -1, 16 if "by 16" in self.form else 32)
            steps = np.abs(parts).max(axis=-1, keepdims=True) / LARGEST + 0 * parts
            rounding = steps.reshape(x.shape) / 2
            return factors @ self.values.T, (rounding + 2e-6 * np.abs(factors)) @ self.sizes.T
        factors = (x if self.form == "float32" else as_bfloat16(x)).astype(np.float64)
        return factors @ self.values.T, 2e-6 * (np.abs(factors) @ self.sizes.T)


def random_weight(form: str, outputs: int, inputs: int, gated: bool = False, seed: int = 0) -> RandomWeight:
    """A weight of one of `FORMS`."""
    draw, dtype = np.random.default_rng(seed), form.split()[0]
    if dtype in ("float32", "bfloat16"):
        weight = draw.standard_normal((outputs, inputs), dtype=np.float32)
        values = (weight if dtype == "float32" else as_bfloat16(weight)).astype(np.float64)
        return RandomWeight(form, pack_float(weight, dtype, gated), values, np.abs(values))
    group, bits = 16 if "by 16" in form else 32, int(dtype[3:])
    scale = _halves(draw.uniform(0.01, 0.1, (outputs, inputs // group)))
    minimum = _halves(draw.standard_normal(scale.shape)) if "minima" in form else None
    low, high = (0, 2**bits) if bits < 8 and minimum is not None else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    codes = draw.integers(low, high, (outputs, inputs)).astype(np.uint8 if low == 0 else np.int8)
    values = codes * np.repeat(scale, group, axis=1).astype(np.float64)
    sizes = np.abs(values)
    if minimum is not None:
        each = np.repeat(minimum, group, axis=1).astype(np.float64)
        values, sizes = values + each, sizes + np.abs(each)
    return RandomWeight(form, pack_quantised(codes, scale, minimum, bits, gated), values, sizes)


def _halves(numbers: np.ndarray) -> np.ndarray:
    """Numbers that float16 holds, as float32."""
    return numbers.astype(np.float16).astype(np.float32)
