"""All experts of a layer in one call: what each token gets is what its experts give one by one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headwise.kernels.cpu import experts as experts_module
from headwise.kernels.cpu import matmul
from headwise.kernels.cpu.experts import Packed, PackedExperts
from headwise.kernels.cpu.matmul import PackedWeight
from headwise.runtime.models.moe import tokens_by_expert
from headwise.runtime.ops.numpy_ops import NumpyOps

INPUTS, SIZE, EXPERTS, EACH = 96, 40, 12, 3
"""The size is no whole number of panels, nor of what narrow weights are padded to."""


def quantised(bits: int) -> Callable[[np.ndarray, bool], PackedWeight]:
    def pack(weight: np.ndarray, gated: bool) -> PackedWeight:
        groups = weight.reshape(len(weight), -1, 8 if weight.shape[1] % 16 else 16)
        most = 2 ** (bits - 1) - 1
        scale = np.abs(groups).max(axis=2) / most
        codes = np.rint(groups / scale[..., None]).astype(np.int8).reshape(weight.shape)
        return matmul.pack_quantised(codes, scale.astype(np.float32), None, bits, gated)

    return pack


KINDS: dict[str, Callable[[np.ndarray, bool], PackedWeight]] = {
    "float32": lambda weight, gated: matmul.pack_float(weight, "float32", gated),
    "bfloat16": lambda weight, gated: matmul.pack_float(weight, "bfloat16", gated),
    "int8": quantised(8),
    "int4": quantised(4),
}


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def packed(kind: str, has_bias: bool = False, size: int = SIZE) -> list[tuple[Packed, Packed]]:
    found = []
    for expert in range(EXPERTS):
        gate, down = 0.2 * random(expert, 2 * size, INPUTS), 0.2 * random(99 + expert, INPUTS, size)
        biases = matmul.pack_bias(random(expert, 2 * size), gated=True), matmul.pack_bias(random(expert, INPUTS))
        gate_bias, down_bias = biases if has_bias else (None, None)
        found.append(((KINDS[kind](gate, True), gate_bias), (KINDS[kind](down, False), down_bias)))
    return found


def routing(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Half of all tokens have one expert in common, and some experts have none."""
    draw = np.random.default_rng(tokens)
    chosen = np.stack([draw.permutation(EXPERTS - 2)[:EACH] for _ in range(tokens)]).astype(np.int64)
    chosen[::2, 0] = EXPERTS - 1
    return chosen, draw.random((tokens, EACH)).astype(np.float32)


def one_by_one(
    experts: list[tuple[Packed, Packed]],
    x: np.ndarray,
    routed: tuple[np.ndarray, np.ndarray],
    activation: str,
    total: np.ndarray,
) -> np.ndarray:
    """As models compute them where they are not grouped."""
    total = total.copy()
    for expert, tokens, shares in tokens_by_expert(*routed):
        (gate, gate_bias), (down, down_bias) = experts[expert]
        middle = matmul.matmul(x[tokens], gate, 1, gate_bias, activation)
        NumpyOps().scatter_add_rows(total, tokens, matmul.matmul(middle, down, 1, down_bias), shares)
    return total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_each_token_gets_to_the_bit_what_its_experts_give_one_by_one(kind: str, tokens: int, monkeypatch) -> None:
    monkeypatch.setattr(experts_module, "MOST_ROWS", 16)  # so that the expert that many have is shared out
    size = 64 if kind.startswith("int") else SIZE
    experts, x, (chosen, shares) = packed(kind, size=size), random(7, tokens, INPUTS), routing(tokens)
    grouped, out = PackedExperts.of(experts, "silu"), random(8, tokens, INPUTS)
    expected = one_by_one(experts, x, (chosen, shares), "silu", out)
    assert grouped is not None
    assert grouped.add(x, chosen, shares, out, threads=2)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_biases_and_other_activations(kind: str) -> None:
    experts, x, (chosen, shares) = packed(kind, has_bias=True), random(7, 9, INPUTS), routing(9)
    grouped, out = PackedExperts.of(experts, "clamped"), np.zeros((9, INPUTS), np.float32)
    assert grouped is not None
    assert grouped.add(x, chosen, shares, out, threads=1)
    np.testing.assert_array_equal(out, one_by_one(experts, x, (chosen, shares), "clamped", 0 * out))


def test_a_token_gets_the_same_in_any_company_on_any_number_of_threads() -> None:
    grouped, x, (chosen, shares) = PackedExperts.of(packed("bfloat16"), "silu"), random(7, 300, INPUTS), routing(300)
    assert grouped is not None
    results = []
    for rows, threads in ((slice(300), 1), (slice(300), 2), (slice(40, 90), 2)):
        out = np.zeros(x[rows].shape, np.float32)
        assert grouped.add(x[rows], chosen[rows], shares[rows], out, threads)
        results.append(out)
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0][40:90])


def test_too_few_parts_and_experts_that_are_not_alike_are_left_to_others() -> None:
    experts = packed("float32")
    grouped, out = PackedExperts.of(experts, "silu"), np.zeros((1, INPUTS), np.float32)
    assert grouped is not None
    assert not grouped.add(random(1, 1, INPUTS), *routing(1), out, threads=EACH + 1)
    assert not out.any()
    experts[3] = packed("bfloat16")[3]
    assert PackedExperts.of(experts, "silu") is None
    with pytest.raises(ValueError, match="do not fit"):
        grouped.add(random(1, 1, INPUTS + 1), *routing(1), out, threads=1)
