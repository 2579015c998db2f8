"""What all tensor operations promise, on a CPU and on a GPU (emulated), by float64 formulas and by NumPy's."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.emulated_gpu import EmulatedOps
from support.gpu.paddle_on_the_host import cupy_on_the_host
from support.tensor_operations import EVERY, NARROW, normal, rope

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.bfloat16 import to_bits, to_float32
from headwise.kernels.experts import Mixture, Routing
from headwise.kernels.fused import Activation, is_gated
from headwise.runtime.models.layers import DenseMlp, Linear
from headwise.runtime.ops.base import TensorOps
from headwise.runtime.ops.numpy_ops import NumpyOps
from headwise.runtime.ops.select import make_ops

Make = Callable[[str], TensorOps]
ON_A_CPU, ON_A_GPU = ("numpy", "numba", "paddle"), ("cupy", "paddle-gpu")


@contextmanager
def implementation(name: str) -> Iterator[Make]:
    """Makes the operations that it names for a dtype; CuPy is NumPy, and its kernels run in a host shim."""
    if name.startswith("paddle"):
        paddle = pytest.importorskip("headwise.runtime.ops.paddle_import").paddle
        paddle.set_device("cpu")
    if name == "paddle-gpu":
        with cupy_on_the_host() as module:
            yield module.PaddleGpuOps
    elif name == "cupy":
        programs = ShimPrograms()
        yield lambda dtype: EmulatedOps(dtype, programs)
    else:
        yield lambda dtype: make_ops(name)


@pytest.fixture(scope="module", params=[*ON_A_CPU, *ON_A_GPU])
def ops(request: pytest.FixtureRequest) -> Iterator[TensorOps]:
    with implementation(request.param) as make:
        yield make("float32")


@pytest.fixture(scope="module", params=ON_A_GPU)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """For what is computed in other dtypes, too."""
    with implementation(request.param) as make:
        yield make


def close(ops, tensor, expected) -> None:
    np.testing.assert_allclose(ops.numpy(tensor), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_linear(ops, tokens: int) -> None:
    x, weight, bias = normal(tokens, 24), normal(10, 24), normal(10)
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    prepared = ops.linear_weight(weight)
    close(ops, ops.linear(ops.tensor(x), prepared), expected)
    close(ops, ops.linear(ops.tensor(x), prepared, ops.linear_bias(bias)), expected + bias)


def test_a_tied_weight_is_rows_of_the_embedding(ops) -> None:
    table, x = normal(9, 16), normal(4, 16)
    embedding = ops.embedding_table(table)
    whole, part = ops.tied_weight(embedding, 0, 9), ops.tied_weight(embedding, 2, 7)
    expected = x.astype(np.float64) @ table.T.astype(np.float64)
    close(ops, ops.linear(ops.tensor(x), whole), expected)
    close(ops, ops.linear(ops.tensor(x), part), expected[:, 2:7])


@pytest.mark.parametrize(
    ("shape", "heads"),
    [((3, 16), ()), ((2, 5, 16), ()), ((40, 1024), ()), ((40, 4, 512), ()), ((2, 5, 16), (5,)), ((40, 4, 512), (4,))],
)
def test_rms_norm_is_over_the_last_axis_with_one_weight_or_one_of_each_head(ops, shape, heads) -> None:
    x, weight = normal(*shape), normal(*heads, shape[-1])
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
    close(ops, ops.rms_norm(ops.tensor(x), ops.norm_weight(weight), 1e-5), expected)


def test_paddle_norms_without_its_kernel_on_cpus_that_cannot_run_it() -> None:
    """Whichever this CPU is: the kernel is compiled for AVX-512, and ends the process of one without."""
    paddle = pytest.importorskip("headwise.runtime.ops.paddle_import").paddle
    paddle.set_device("cpu")
    from headwise.runtime.ops.paddle_norm import FUSED_ON_CPU, rms_norm

    x = normal(40, 4, 512)
    for weight in (normal(512), normal(4, 512)):
        expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * weight
        for fused in {False, FUSED_ON_CPU}:
            normed = rms_norm(paddle.to_tensor(x), paddle.to_tensor(weight), 1e-5, fused=fused).numpy()
            np.testing.assert_allclose(normed, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [(3, 16), (40, 1024)])
def test_a_sum_is_normed_and_leaves_what_it_was_made_of(ops, shape) -> None:
    x, addend, weight = normal(*shape), normal(*shape), normal(shape[-1])
    left, right = ops.tensor(x), ops.tensor(addend)
    total, normed = ops.add_rms_norm(left, right, ops.norm_weight(weight), 1e-5)
    close(ops, total, x + addend)
    close(ops, normed, ops.numpy(ops.rms_norm(ops.tensor(x + addend), ops.norm_weight(weight), 1e-5)))
    close(ops, left, x)
    close(ops, right, addend)


def test_rope_rotates_the_pairs_of_the_two_halves(ops) -> None:
    x, angles = normal(5, 3, 8), normal(5, 1, 4)
    pairs = x[..., :4] + 1j * x[..., 4:]
    turned = pairs * np.exp(1j * angles)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    close(ops, ops.rope(ops.tensor(x), ops.upload(np.cos(angles)), ops.upload(np.sin(angles))), expected)


def test_rope_takes_a_slice_of_heads(ops) -> None:
    x, angles = normal(5, 6, 8), normal(5, 1, 4)
    cos, sin = ops.upload(np.cos(angles)), ops.upload(np.sin(angles))
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
    for gates in (gate, gate[:, :1]):
        with np.errstate(over="ignore"):
            close(ops, ops.sigmoid_mul(ops.tensor(up), ops.tensor(gates)), up / (1 + np.exp(-gates.astype(np.float64))))
    gate, up = 5 * gate, 5 * up  # some beyond the limits
    with np.errstate(over="ignore"):
        close(ops, ops.clamped_mul(ops.tensor(np.concatenate([gate, up], axis=1))), clamped(gate, up))
        close(ops, ops.limited_silu_mul(ops.tensor(np.concatenate([gate, up], axis=1))), limited(gate, up))
        close(ops, ops.clipped_silu_mul(ops.tensor(np.concatenate([gate, up], axis=1))), clipped(gate, up))


def clamped(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """As transformers' gpt-oss has it."""
    gate, up = np.minimum(gate.astype(np.float64), 7), np.clip(up.astype(np.float64), -7, 7)
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate))


def limited(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """As transformers' DeepSeek-V4 has it."""
    gate, up = np.minimum(gate.astype(np.float64), 10), np.clip(up.astype(np.float64), -10, 10)
    return up * gate / (1 + np.exp(-gate))


def clipped(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """As transformers' Step-3.7 has it."""
    gate, up = gate.astype(np.float64), np.clip(up.astype(np.float64), -7, 7)
    return up * np.minimum(gate / (1 + np.exp(-gate)), 7)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped", "limited_silu", "clipped_silu"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_weight_gives_the_activated_gate_times_the_rest(ops, activation: str, has_bias: bool) -> None:
    x, weight, bias = 2 * normal(5, 24), normal(2 * 11, 24), normal(2 * 11) if has_bias else np.zeros(22, np.float32)
    gate, up = np.split(x.astype(np.float64) @ weight.T.astype(np.float64) + bias, 2, axis=1)
    if activation == "clamped":
        expected = clamped(gate, up)
    elif activation == "limited_silu":
        expected = limited(gate, up)
    elif activation == "clipped_silu":
        expected = clipped(gate, up)
    else:
        inner = gate if activation == "silu" else np.sqrt(8 / np.pi) * (gate + 0.044715 * gate**3)
        with np.errstate(over="ignore"):
            expected = gate / (1 + np.exp(-inner)) * up
    prepared = ops.gated_bias(bias) if has_bias else None
    found = ops.numpy(ops.activated_linear(ops.tensor(x), ops.gated_weight(weight), prepared, activation))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("has_bias", [False, True])
def test_without_a_gate_the_positive_outputs_of_a_weight_are_squared(ops, has_bias: bool) -> None:
    x, weight, bias = 2 * normal(5, 24), normal(22, 24), normal(22) if has_bias else np.zeros(22, np.float32)
    product = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    prepared, given = ops.linear_weight(weight), ops.linear_bias(bias) if has_bias else None
    found = ops.activated_linear(ops.tensor(x), prepared, given, "relu2")
    np.testing.assert_allclose(ops.numpy(found), np.maximum(product, 0) ** 2, rtol=1e-4, atol=1e-3)
    before = ops.unactivated_linear(ops.tensor(x), prepared, given)
    np.testing.assert_allclose(ops.numpy(before), product, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(ops.numpy(ops.activated(before, "relu2")), ops.numpy(found), rtol=1e-5, atol=1e-5)


def test_what_is_no_number_stays_so_where_it_is_squared(ops) -> None:
    x = np.array([[np.nan, -np.inf, np.inf, -0.5, 0.5, 3.0, -1e30, 0.0]], np.float32)
    np.testing.assert_array_equal(ops.numpy(ops.squared_relu(ops.tensor(x))), [[np.nan, 0, np.inf, 0, 0.25, 9, 0, 0]])


@pytest.mark.parametrize("size", [64, 32, 40, 16])
@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_experts_and_a_shared_one_of_any_size(ops, activation: Activation, size: int, has_bias: bool) -> None:
    """On a GPU it is cut into experts where it is as large as some, and has no bias; else it is computed by itself."""
    mixture, exact = Mixture(Routing(4, 2, 1e-12, scored_by="sigmoid"), activation), NumpyOps()
    x, logits = normal(9, 32), normal(9, 4)

    def mlps(own: TensorOps) -> list[DenseMlp]:
        rng, each = np.random.default_rng(3), 2 if is_gated(activation) else 1
        prepare = (own.gated_weight, own.gated_bias) if is_gated(activation) else (own.linear_weight, own.linear_bias)

        def linear(outputs: int, inputs: int, weight: Any, bias: Any) -> Linear:
            values = rng.standard_normal((outputs, inputs + 1), np.float32) * np.float32(0.3)
            own_bias = bias(np.ascontiguousarray(values[:, -1])) if has_bias else None
            return Linear(weight(np.ascontiguousarray(values[:, :-1])), own_bias)

        return [
            DenseMlp(linear(each * inner, 32, *prepare), linear(32, inner, own.linear_weight, own.linear_bias))
            for inner in (32, 32, 32, 32, size)
        ]

    found, expected = (
        own.numpy(own.mix_experts(own.tensor(x), own.tensor(logits), own.experts(mixture, iter(every[:4]), every[4])))
        for own in (ops, exact)
        for every in (mlps(own),)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("size", [32, 40])
def test_experts_on_a_gpu_are_given_up_before_the_next_is_taken(size: int) -> None:
    ops, rng, taken = EmulatedOps("float32", ShimPrograms()), np.random.default_rng(0), []

    def mlp(inner: int) -> DenseMlp:
        into, down = (ops.linear_weight(rng.standard_normal(shape, np.float32)) for shape in ((inner, 32), (32, inner)))
        return DenseMlp(Linear(into), Linear(down))

    def routed() -> Iterator[DenseMlp]:
        for _ in range(4):
            assert [reference() is None for reference in taken[:-1]] == [True] * len(taken[:-1])
            made = mlp(32)
            taken.append(weakref.ref(made.into.weight.base))
            yield made
            del made

    ops.experts(Mixture(Routing(4, 2, None), "relu2"), routed(), mlp(size))
    assert len(taken) == 4


def test_rows_by_index(ops) -> None:
    table = normal(9, 4)
    close(ops, ops.embedding(ops.embedding_table(table), ops.upload(np.array([3, 3, 8], np.int32))), table[[3, 3, 8]])
    close(ops, ops.take_rows(ops.tensor(table), np.array([0, 5])), table[[0, 5]])


def test_rows_are_overwritten_also_by_what_is_read_only(ops) -> None:
    table, values = normal(9, 4), normal(2, 4)
    values.flags.writeable = False
    for _ in range(2):  # the second time by the same memory
        target = ops.embedding(ops.embedding_table(table), ops.upload(np.array([3, 4, 8], np.int32)))
        ops.put_rows(target, np.array([0, 2], np.int32), values)
        close(ops, target, [values[0], table[4], values[1]])


def test_the_bits_of_bfloat16_are_numbers(ops) -> None:
    bits = to_bits(normal(3, 4))
    bits.flags.writeable = False
    np.testing.assert_array_equal(ops.numpy(ops.tensor(bits)).astype(np.float32), to_float32(bits))
    target = ops.tensor(normal(3, 4))
    ops.put_rows(target, np.array([1], np.int32), bits[2:])
    np.testing.assert_array_equal(ops.numpy(target)[1].astype(np.float32), to_float32(bits[2]))


def test_rows_are_added_where_they_belong(ops) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    target = ops.linear(ops.tensor(np.ones((4, 1), np.float32)), ops.linear_weight(np.ones((3, 1), np.float32)))
    ops.scatter_add_rows(target, np.array([3, 0]), ops.tensor(x), np.array([2.0, -1.0], np.float32))
    expected = np.ones((4, 3))
    expected[3] += 2 * x[0]
    expected[0] -= x[1]
    np.testing.assert_array_equal(ops.numpy(target), expected)


def test_a_kernel_array_is_the_memory_of_its_tensor_or_a_contiguous_copy_of_a_slice(ops) -> None:
    x = normal(4, 6, 8)
    tensor = ops.tensor(x)
    array = ops.kernel_array(tensor)
    np.testing.assert_array_equal(ops.host(array), x)
    for few, wanted in ((tensor[:, :, :4], x[:, :, :4]), (tensor[:, :1, 2:3], x[:, :1, 2:3]), (tensor[:0], x[:0])):
        gaps = ops.kernel_array(few)
        assert gaps[:1].size == 0 or gaps[0].flags.c_contiguous
        np.testing.assert_array_equal(ops.host(gaps), wanted)
    array[1] = 7
    np.testing.assert_array_equal(ops.numpy(tensor)[1], np.full((6, 8), 7))
    part = ops.kernel_array(tensor[:, 2:4])
    assert part[0].flags.c_contiguous, "on a GPU there may be gaps between the rows of the first axis"
    np.testing.assert_array_equal(ops.host(part)[2:], x[2:, 2:4])
    out = ops.empty_like(array)
    assert (out.shape, out.dtype) == (array.shape, array.dtype)
    out[...] = array
    np.testing.assert_array_equal(ops.numpy(ops.from_kernel_array(out)), ops.numpy(tensor))


def test_a_steps_arrays_are_there_until_the_next_and_equal_shapes_in_equal_places_on_a_gpu(
    ops, request: pytest.FixtureRequest
) -> None:
    upload = ops.step_upload(64)
    first = upload(np.arange(3, dtype=np.int32), np.arange(4, dtype=np.int32).reshape(2, 2))
    places = [array.ctypes.data for array in first]
    for turn in range(6):
        again = upload(np.full(3, turn, np.int32), np.full((2, 2), -turn, np.int32))
        np.testing.assert_array_equal(ops.host(again[0]), np.full(3, turn))
        np.testing.assert_array_equal(ops.host(again[1]), np.full((2, 2), -turn))
        if request.node.callspec.params["ops"] in ON_A_GPU:
            assert [array.ctypes.data for array in again] == places


def test_uploads_keep_their_dtype_and_shape(ops) -> None:
    for dtype in (np.int32, np.int64, np.float32, np.uint8):
        values = np.arange(12, dtype=dtype).reshape(3, 4).T
        array = ops.upload(values)
        assert array.dtype == dtype
        np.testing.assert_array_equal(ops.host(array), values)


def test_no_memory_is_memory_too(ops) -> None:
    for array in (ops.empty_bytes(0), ops.upload(np.empty((0, 4), np.int32))):
        assert array.size == 0
    assert ops.empty_bytes(5).dtype == np.uint8
    ops.give_back_memory()


def test_operations_may_be_called_from_another_thread(ops) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(rope(ops)))
    thread.start()
    thread.join()
    close(ops, found[0], rope(NumpyOps()))


@pytest.mark.parametrize("compute", EVERY, ids=lambda f: f.__name__)
def test_operations_give_what_numpy_gives(ops, compute: Callable[[Any], Any]) -> None:
    found = ops.numpy(compute(ops))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, compute(NumpyOps()), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("compute", EVERY, ids=lambda f: f.__name__)
def test_operations_on_weights_in_bfloat16_give_what_numpy_gives_but_for_that(compute: Callable[[Any], Any]) -> None:
    ops = make_ops("numba", 2, "bfloat16", "bfloat16")
    found, expected = ops.numpy(compute(ops)), compute(NumpyOps())
    assert found.dtype == np.float32
    one_bit = 2.0**-8  # of each factor of a product, which are 16 here
    np.testing.assert_allclose(found, expected, rtol=one_bit, atol=2 * one_bit * np.sqrt(16) * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("compute", NARROW, ids=lambda f: f.__name__)
def test_narrow_numbers_are_rounded_once(make: Make, compute: Callable[[Any], Any], dtype: str) -> None:
    ops = make(dtype)
    tensor = compute(ops)
    assert ops.kernel_array(tensor).dtype == numpy_dtype(dtype)
    found, expected = ops.numpy(tensor), compute(NumpyOps(dtype)).astype(np.float32)
    assert found.dtype == np.float32
    # The same arithmetic in float32 may differ in its last bit, and so fall to the other side when rounded.
    one_bit = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
    np.testing.assert_allclose(found, expected, rtol=one_bit, atol=1e-5)
    assert (found != expected).mean() < 0.05


def test_the_likeliest_token_is_the_first_of_the_largest_or_of_the_not_numbers(ops) -> None:
    assert_likeliest(ops)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_likeliest_token_of_narrow_logits_is_the_same(make: Make, dtype: str) -> None:
    assert_likeliest(make(dtype))


def assert_likeliest(ops: TensorOps) -> None:
    nan, inf = np.nan, np.inf
    rows = [[1, 3, 2, 0], [2, 5, 5, 1], [1, nan, inf, nan], [inf, 1, nan, 2], [-inf] * 4, [-1, -2, -3, -inf]]
    logits = np.array(rows, dtype=np.float32)
    tokens, best = (ops.host(array) for array in ops.greedy(ops.tensor(logits)))
    assert (tokens.dtype, best.dtype) == (np.int32, np.float32)
    expected = logits.argmax(axis=1)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(best, np.take_along_axis(logits, expected[:, None], axis=1)[:, 0])
