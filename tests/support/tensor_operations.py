"""Computations in the operations of `TensorOps`, each the same whatever implements them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

draw = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return draw.standard_normal(shape, dtype=np.float32)


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def linear(ops: Any) -> Any:
    return ops.linear(ops.tensor(X), ops.linear_weight(WEIGHT), ops.linear_bias(BIAS))


def linear_of_a_slice(ops: Any) -> Any:
    return ops.linear(ops.tensor(X)[:, 4:], ops.linear_weight(WEIGHT[:, 4:]))


def embedding(ops: Any) -> Any:
    return ops.embedding(ops.embedding_table(X), ops.upload(int32(3, 3, 0)))


def scaled_embedding(ops: Any) -> Any:
    return ops.embedding(ops.embedding_table(X), ops.upload(int32(3, 3, 0)), 1.7)


def rms_norm(ops: Any) -> Any:
    return ops.rms_norm(ops.tensor(X), ops.norm_weight(WEIGHT[0]), 1e-5)


def rms_norm_of_heads(ops: Any) -> Any:
    return ops.rms_norm(ops.tensor(HEADS)[:, 1:4], ops.norm_weight(WEIGHT[0, :8]), 1e-5)


def rms_norm_of_heads_of_their_own(ops: Any) -> Any:
    return ops.rms_norm(ops.tensor(HEADS)[:, 1:4], ops.norm_weight(WEIGHT[1:4, :8]), 1e-5)


def rope(ops: Any) -> Any:
    angles = ops.rotation(ops.upload(int32(0, 1, 500, 99999)), ops.upload(FREQUENCIES))
    return ops.rope(ops.tensor(HEADS)[:, 2:], *angles)


def scaled_rope(ops: Any) -> Any:
    scale = np.array([1.5, 1.5, 1.0, 1.0], np.float32)
    angles = ops.rotation(ops.upload(int32(0, 1, 500, 99999)), ops.upload(FREQUENCIES), ops.upload(scale))
    return ops.rope(ops.tensor(HEADS)[:, 2:], *angles)


def rope_by_three_positions(ops: Any) -> Any:
    """Pairs 0 and 3 turn by the first one, 1 by the second, 2 by the third."""
    places = np.array([[0, 0, 0], [1, 2, 3], [500, 501, 99999], [7, 0, 12345]], np.int32)
    turned = np.array([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0]], np.float32) * FREQUENCIES
    return ops.rope(ops.tensor(HEADS)[:, 2:], *ops.rotation(ops.upload(places), ops.upload(turned)))


def silu_mul(ops: Any) -> Any:
    return ops.silu_mul(ops.tensor(X))


def gelu_tanh_mul(ops: Any) -> Any:
    return ops.gelu_tanh_mul(ops.tensor(X))


def clamped_mul(ops: Any) -> Any:
    return ops.clamped_mul(ops.tensor(4 * X))


def limited_silu_mul(ops: Any) -> Any:
    return ops.limited_silu_mul(ops.tensor(4 * X))


def clipped_silu_mul(ops: Any) -> Any:
    return ops.clipped_silu_mul(ops.tensor(4 * X))


def squared_relu(ops: Any) -> Any:
    return ops.squared_relu(ops.tensor(X))


def sigmoid_mul(ops: Any) -> Any:
    return ops.sigmoid_mul(ops.tensor(X), ops.tensor(4 * X[::-1]))


def sigmoid_mul_of_rows(ops: Any) -> Any:
    return ops.sigmoid_mul(ops.tensor(X), ops.tensor(X[:, :1]))


def take_rows(ops: Any) -> Any:
    return ops.take_rows(ops.tensor(X), np.array([3, 0]))


def put_rows(ops: Any) -> Any:
    rows = embedding(ops)
    ops.put_rows(rows, np.array([2, 0], np.int32), X[:2])
    return rows


def scatter_add_rows(ops: Any) -> Any:
    target = ops.linear(ops.tensor(X), ops.linear_weight(np.eye(16, dtype=np.float32)))
    ops.scatter_add_rows(target, np.array([2, 0]), ops.tensor(X[:2]), np.array([0.5, -2.0], np.float32))
    return target


def residual(ops: Any) -> Any:
    return ops.tensor(X) + ops.tensor(X).reshape([4, -1])


def normed_sum(ops: Any) -> Any:
    total, normed = ops.add_rms_norm(ops.tensor(X), residual(ops), ops.norm_weight(WEIGHT[0]), 1e-5)
    return total * normed


X, WEIGHT, BIAS, HEADS = normal(4, 16), normal(10, 16), normal(10), normal(4, 5, 8)
FREQUENCIES = (10000.0 ** -(np.arange(4) / 4)).astype(np.float32)
NARROW: list[Callable[[Any], Any]] = [
    embedding,
    scaled_embedding,
    rms_norm,
    rms_norm_of_heads,
    rms_norm_of_heads_of_their_own,
    rope,
    scaled_rope,
    rope_by_three_positions,
    gelu_tanh_mul,
    take_rows,
]
"""What Paddle computes on a CPU in float16 and bfloat16, too."""

EVERY = [
    *(*NARROW, linear, linear_of_a_slice, silu_mul, clamped_mul, limited_silu_mul, clipped_silu_mul, squared_relu),
    *(sigmoid_mul, sigmoid_mul_of_rows, put_rows, scatter_add_rows, residual, normed_sum),
]
