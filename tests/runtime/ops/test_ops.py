"""NumPy and Paddle compute the same; NumPy is checked against float64 formulas."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

from headwise.errors import ConfigError
from headwise.runtime.ops.numpy_ops import NumpyOps
from headwise.runtime.ops.select import make_ops

draw = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return draw.standard_normal(shape, dtype=np.float32)


@pytest.fixture(scope="module", params=["numpy", "paddle"])
def ops(request):
    if request.param == "paddle":
        pytest.importorskip("paddle")
    return make_ops(request.param)


def close(ops, tensor, expected) -> None:
    np.testing.assert_allclose(ops.numpy(tensor), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_linear(ops, tokens: int) -> None:
    x, weight, bias = normal(tokens, 24), normal(10, 24), normal(10)
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    prepared = ops.linear_weight(weight)
    close(ops, ops.linear(ops.tensor(x), prepared), expected)
    close(ops, ops.linear(ops.tensor(x), prepared, ops.tensor(bias)), expected + bias)


def test_mapped_weights_are_not_copied_and_let_go_of_with_the_last_tensor(ops) -> None:
    mapped = normal(8, 16)
    mapped.flags.writeable = False
    memory, x = weakref.ref(mapped), normal(3, 16)
    whole, again, rows = ops.tensor(mapped), ops.tensor(mapped), ops.linear_weight(mapped[:5])  # as tied embeddings are
    assert all(np.shares_memory(ops.numpy(tensor), mapped) for tensor in (whole, again, rows))
    expected = x.astype(np.float64) @ mapped[:5].T.astype(np.float64)
    del mapped, whole, again
    assert memory() is not None
    close(ops, ops.linear(ops.tensor(x), rows), expected)
    del rows
    assert memory() is None


def test_a_tied_weight_is_rows_of_the_embedding(ops) -> None:
    table, x = normal(9, 16), normal(4, 16)
    embedding = ops.tensor(table)
    whole, part = ops.tied_weight(embedding, 0, 9), ops.tied_weight(embedding, 2, 7)
    assert np.shares_memory(ops.numpy(whole), ops.numpy(embedding))
    expected = x.astype(np.float64) @ table.T.astype(np.float64)
    close(ops, ops.linear(ops.tensor(x), whole), expected)
    close(ops, ops.linear(ops.tensor(x), part), expected[:, 2:7])


@pytest.mark.parametrize("shape", [(3, 16), (2, 5, 16), (40, 1024), (40, 4, 512)])
def test_rms_norm_is_over_the_last_axis(ops, shape) -> None:
    x, weight = normal(*shape), normal(shape[-1])
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
    close(ops, ops.rms_norm(ops.tensor(x), ops.tensor(weight), 1e-5), expected)


@pytest.mark.parametrize("shape", [(3, 16), (40, 1024)])
def test_a_sum_is_normed_and_leaves_what_it_was_made_of(ops, shape) -> None:
    x, addend, weight = normal(*shape), normal(*shape), normal(shape[-1])
    left, right = ops.tensor(x), ops.tensor(addend)
    total, normed = ops.add_rms_norm(left, right, ops.tensor(weight), 1e-5)
    close(ops, total, x + addend)
    close(ops, normed, ops.numpy(ops.rms_norm(ops.tensor(x + addend), ops.tensor(weight), 1e-5)))
    close(ops, left, x)
    close(ops, right, addend)


def test_rope_rotates_the_pairs_of_the_two_halves(ops) -> None:
    x, angles = normal(5, 3, 8), normal(5, 1, 4)
    pairs = x[..., :4] + 1j * x[..., 4:]
    turned = pairs * np.exp(1j * angles)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    close(ops, ops.rope(ops.tensor(x), np.cos(angles), np.sin(angles)), expected)


def test_rope_takes_a_slice_of_heads(ops) -> None:
    x, angles = normal(5, 6, 8), normal(5, 1, 4)
    cos, sin = np.cos(angles), np.sin(angles)
    whole = ops.numpy(ops.rope(ops.tensor(x), cos, sin))
    close(ops, ops.rope(ops.tensor(x)[:, 2:5], cos, sin), whole[:, 2:5])


def test_gated_activations(ops) -> None:
    gate, up = 40 * normal(6, 12), normal(6, 12)
    both = ops.tensor(np.concatenate([gate, up], axis=1))
    wide = gate.astype(np.float64)
    with np.errstate(over="ignore"):
        close(ops, ops.silu_mul(both), wide / (1 + np.exp(-wide)) * up)
    tanh = np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))
    np.testing.assert_allclose(ops.numpy(ops.gelu_tanh_mul(both)), 0.5 * wide * (1 + tanh) * up, rtol=1e-4, atol=1e-4)


def test_rows_by_index(ops) -> None:
    table = normal(9, 4)
    close(ops, ops.embedding(ops.tensor(table), np.array([3, 3, 8], np.int32)), table[[3, 3, 8]])
    close(ops, ops.take_rows(ops.tensor(table), np.array([0, 5])), table[[0, 5]])


def test_kernel_arrays_share_memory_and_are_contiguous(ops) -> None:
    x = normal(4, 6, 8)
    tensor = ops.tensor(x)
    assert np.shares_memory(ops.kernel_array(tensor), x)
    part = ops.kernel_array(tensor[:, 2:4])
    assert part.flags.c_contiguous
    np.testing.assert_array_equal(part, x[:, 2:4])
    assert np.shares_memory(ops.numpy(ops.from_kernel_array(x)), x)


def test_read_only_weights_are_shared_and_stay_as_they_are(ops) -> None:
    weight = normal(8, 8)
    weight.flags.writeable = False
    tensor = ops.tensor(weight)
    assert np.shares_memory(ops.numpy(tensor), weight)
    close(ops, tensor + tensor, 2 * weight)


def test_tensors_of_arrays_of_tensors_can_die_in_any_order(ops) -> None:
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        chain: list = [ops.tensor(normal(64, 64))]
        chain.append(ops.numpy(chain[0]))
        chain.append(ops.from_kernel_array(chain[1]))
        for index in order:
            chain[index] = None


def test_paddle_leaves_the_cores_to_its_own_threads() -> None:
    pytest.importorskip("paddle")
    openblas = ThreadpoolController().select(internal_api="openblas")
    if not openblas:
        pytest.skip("this NumPy has no OpenBLAS")

    def threads() -> set[int]:
        return {library["num_threads"] for library in openblas.info()}

    make_ops("numpy", 2)
    assert threads() == {2}
    make_ops("paddle", 2)
    assert threads() == {1}


def test_an_unknown_framework_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown tensor_ops 'jax'; choose auto, paddle or numpy"):
        make_ops("jax")
    assert isinstance(make_ops("numpy"), NumpyOps)
