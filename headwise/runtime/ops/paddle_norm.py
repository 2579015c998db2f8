"""RMSNorm in Paddle, on CPUs that its own kernel cannot run on, too."""

from __future__ import annotations

from typing import Any

import llvmlite.binding

from headwise.runtime.ops.paddle_import import paddle

_fused: Any = paddle.incubate.nn.functional
_untyped: Any = paddle

FUSED_ON_CPU: bool = all(
    llvmlite.binding.get_host_cpu_features().get(name, False)
    for name in ("avx512f", "avx512bw", "avx512dq", "avx512vl")
)
"""Paddle 3.3 compiles its fused norm for AVX-512 and asks no CPU: one without ends the process there (SIGILL)."""


def rms_norm(x: paddle.Tensor, weight: paddle.Tensor, eps: float, *, fused: bool = FUSED_ON_CPU) -> paddle.Tensor:
    """``x / sqrt(mean(x * x) + eps) * weight`` over the last axis; both of one dtype.

    weight: ``[N]``, or ``[H, N]`` for an ``x [T, H, N]``
    fused:  by Paddle's kernel, a fifth of the time, where ``x`` is on a CPU; on a GPU it always is
    """
    if fused or not x.place.is_cpu_place():
        if len(weight.shape) == 1:
            return _normed(x, weight, eps)
        # Paddle's kernel has one weight for all rows.
        return _normed(x, paddle.ones(weight.shape[-1:], weight.dtype), eps) * weight
    composed: paddle.Tensor = x * _untyped.rsqrt(_untyped.mean(x * x, axis=-1, keepdim=True) + eps) * weight
    return composed


def _normed(x: paddle.Tensor, weight: paddle.Tensor, eps: float) -> paddle.Tensor:
    normed: paddle.Tensor = _fused.fused_rms_norm(x, weight, None, eps, len(x.shape) - 1)[0]
    return normed
