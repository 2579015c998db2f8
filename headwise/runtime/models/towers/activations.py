"""What towers compute besides products, which the tensor operations of decoders lack. Of kernel arrays, in float32."""

from __future__ import annotations

import numpy as np

from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps

_LOGISTIC = {"silu": 1.0, "quick_gelu": 1.702}
"""``x / (1 + exp(-factor * x))``, by these factors."""


def activated(ops: TensorOps, x: Tensor, name: str) -> Tensor:
    """Each element's SiLU (``silu``), or its GELU by the error function (``gelu``), by a tangent
    (``gelu_pytorch_tanh``) or by a logistic function (``quick_gelu``)."""
    given = ops.kernel_array(x)
    wide = given.astype(np.float32)
    if name in _LOGISTIC:
        with np.errstate(over="ignore"):  # exp(-x) may be inf: the quotient is then 0, which is right
            found = wide / (1 + np.exp(np.float32(-_LOGISTIC[name]) * wide))
            return ops.from_kernel_array(found.astype(given.dtype, copy=False))
    if name == "gelu_pytorch_tanh":
        return ops.from_kernel_array(_gelu_by_tangent(wide).astype(given.dtype, copy=False))
    return ops.from_kernel_array(_gelu(wide).astype(given.dtype, copy=False))


def _gelu(x: KernelArray) -> KernelArray:
    """``x`` times the normal distribution's share below it: Abramowitz and Stegun 7.1.26, to 1.5e-7."""
    z = abs(x) * np.float32(0.5**0.5)
    t = 1 / (1 + np.float32(0.3275911) * z)
    series = t * np.float32(1.061405429)
    for factor in (-1.453152027, 1.421413741, -0.284496736):
        series = (series + np.float32(factor)) * t
    tail = np.float32(0.5) * (series + np.float32(0.254829592)) * t * np.exp(-z * z)
    return x * np.where(x < 0, tail, 1 - tail)


def _gelu_by_tangent(x: KernelArray) -> KernelArray:
    """``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`` (arXiv 1606.08415), by a logistic function."""
    with np.errstate(over="ignore"):  # as SiLU's
        return x / (1 + np.exp(np.float32(-2 * (2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x * x * x)))


def layer_norm(ops: TensorOps, x: Tensor, weight: KernelArray, bias: KernelArray, eps: float) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last axis of ``x [T, N]``; both are float32."""
    given = ops.kernel_array(x)
    wide = given.astype(np.float32)
    wide = wide - wide.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + np.float32(eps))
    return ops.from_kernel_array((wide / deviation * weight + bias).astype(given.dtype, copy=False))
