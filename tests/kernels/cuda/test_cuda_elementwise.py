"""What lies between matrix products, in CUDA C++: executed on a CPU by `cuda_shim`, compiled for GPUs by NVRTC."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.emulated_gpu import EmulatedOps
from support.gpu.machine_code import SERVED, machine_code, spilled

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.errors import ConfigError
from headwise.kernels.cuda.elementwise import CudaElementwise, variant_of
from headwise.runtime.ops.array_ops import ArrayOps
from headwise.runtime.ops.numpy_ops import NumpyOps
from headwise.runtime.ops.unfused import UnfusedOps

DTYPES = ("float16", "bfloat16", "float32")
SEEDS = st.integers(0, 2**16)
examples = settings(max_examples=12, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def shim() -> ShimPrograms:
    return ShimPrograms()


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def rounded_once(result: np.ndarray, exact: np.ndarray, slack: np.ndarray | float = 0.0) -> None:
    """``result`` is ``exact`` (float32, with a few errors of its own, and ``slack``) rounded to its dtype."""
    import ml_dtypes

    numbers = ml_dtypes.finfo(result.dtype)
    allowed = np.abs(exact) * (float(numbers.eps) / 2 + 1e-6) + float(numbers.smallest_subnormal) / 2 + slack
    error = np.abs(wide(result) - exact)
    assert result.shape == exact.shape
    np.testing.assert_array_equal(np.isnan(error), np.isnan(exact))
    assert not (error > allowed).any(), float(np.nanmax(error / allowed))


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Rows of very different size, some zero, one maybe of NaN."""
    rows = rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 4, (*shape[:-1], 1))
    rows *= rng.random((*shape[:-1], 1)) > 0.1
    rows[rng.random(rows.shape[:-1]) < 0.05] = np.nan
    return rows.astype(numpy_dtype(dtype))


class Guarded:
    """An ``array`` of NaN in the middle of a larger one, to see what is written beside it."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        size, self._edge = int(np.prod(shape)), 64
        self._all = np.full(size + 2 * self._edge, np.nan, dtype)
        self.array = self._all[self._edge : self._edge + size].reshape(shape)

    def checked(self) -> np.ndarray:
        edges = np.concatenate([self._all[: self._edge], self._all[-self._edge :]])
        assert np.isnan(wide(edges)).all(), "something beside the output was written"
        return self.array


def vector(dtype: str) -> int:
    """Elements in 16 bytes."""
    return 16 // numpy_dtype(dtype).itemsize


@pytest.mark.parametrize("dtype", DTYPES)
@examples
@given(data=st.data(), seed=SEEDS, backwards=st.booleans())
def test_rows_are_normed(shim: ShimPrograms, dtype: str, data: st.DataObject, seed: int, backwards: bool) -> None:
    rng, shim.backwards = np.random.default_rng(seed), backwards
    width = vector(dtype) * data.draw(st.integers(1, 40) | st.sampled_from([128, 129, 300, 1025, 2048]))
    tokens, gap = data.draw(st.integers(1, 5)), vector(dtype) * data.draw(st.integers(0, 2))
    x = numbers(rng, (tokens, width + gap), dtype)[:, gap:]
    weight, out = rng.standard_normal(width, dtype=np.float32), Guarded(x.shape, x.dtype)
    assert CudaElementwise(shim).rms_norm(x, weight, 1e-5, out.array)
    rounded_once(out.checked(), NumpyOps().rms_norm(wide(x), weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@examples
@given(data=st.data(), seed=SEEDS, backwards=st.booleans(), in_place=st.booleans(), with_bias=st.booleans())
def test_sums_are_rounded_and_then_normed(
    shim: ShimPrograms, dtype: str, data: st.DataObject, seed: int, backwards: bool, in_place: bool, with_bias: bool
) -> None:
    rng, shim.backwards = np.random.default_rng(seed), backwards
    width = vector(dtype) * data.draw(st.integers(1, 40) | st.sampled_from([128, 129, 300, 1025, 2048]))
    tokens = data.draw(st.integers(1, 5))
    x, addend = (numbers(rng, (tokens, width), dtype) for _ in range(2))
    weight, total, out = rng.standard_normal(width, dtype=np.float32), *(Guarded(x.shape, x.dtype) for _ in range(2))
    bias = numbers(rng, (width,), dtype) if with_bias else None
    expected = x + (addend if bias is None else addend + bias)
    if in_place:
        total.array[:] = x
    assert CudaElementwise(shim).add_rms_norm(
        total.array if in_place else x, addend, weight, 1e-5, total.array, out.array, bias
    )
    np.testing.assert_array_equal(wide(total.checked()), wide(expected))
    rounded_once(out.checked(), NumpyOps().rms_norm(wide(expected), weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@examples
@given(data=st.data(), seed=SEEDS, backwards=st.booleans())
def test_heads_of_a_fused_projection_are_normed(
    shim: ShimPrograms, dtype: str, data: st.DataObject, seed: int, backwards: bool
) -> None:
    rng, shim.backwards = np.random.default_rng(seed), backwards
    dim = 2 * vector(dtype) * data.draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16, 20]))
    tokens, heads, first, rest = (data.draw(st.integers(low, high)) for low, high in ((1, 6), (1, 5), (0, 3), (0, 2)))
    x = numbers(rng, (tokens, first + heads + rest, dim), dtype)[:, first : first + heads]
    for weight_shape in ((dim,), (heads, dim)):
        out, weight = Guarded(x.shape, x.dtype), rng.standard_normal(weight_shape, dtype=np.float32)
        assert CudaElementwise(shim).rms_norm(x, weight, 1e-6, out.array)
        rounded_once(out.checked(), NumpyOps().rms_norm(wide(x), weight, 1e-6))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped", "limited_silu", "clipped_silu"])
@pytest.mark.parametrize("dtype", DTYPES)
@examples
@given(data=st.data(), seed=SEEDS, backwards=st.booleans(), with_bias=st.booleans())
def test_activations_are_gated(
    shim: ShimPrograms,
    activation: str,
    dtype: str,
    data: st.DataObject,
    seed: int,
    backwards: bool,
    with_bias: bool,
) -> None:
    rng, shim.backwards = np.random.default_rng(seed), backwards
    tokens, vectors, gap = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 70)), data.draw(st.integers(0, 2))
    both = numbers(rng, (tokens, (2 * vectors + gap) * vector(dtype)), dtype)[:, gap * vector(dtype) :]
    both[:, ::7] *= numpy_dtype(dtype).type(8)  # to where the sigmoid is 0 or 1
    out = Guarded((tokens, both.shape[1] // 2), both.dtype)
    if with_bias:
        bias = numbers(rng, (both.shape[1],), dtype)
        assert CudaElementwise(shim).activated(both, out.array, activation, bias)
        both = (wide(both) + wide(bias)).astype(both.dtype)
    else:
        assert CudaElementwise(shim).activated(both, out.array, activation)
    # NumPy's 1 + tanh has lost its digits where the sigmoid is small.
    slack = 2e-7 * np.prod(np.abs(np.split(wide(both), 2, axis=1)), axis=0) if activation == "gelu_tanh" else 0.0
    rounded_once(out.checked(), getattr(NumpyOps(), f"{activation}_mul")(wide(both)), slack)


@pytest.mark.parametrize("dtype", DTYPES)
@examples
@given(data=st.data(), seed=SEEDS, backwards=st.booleans(), with_bias=st.booleans())
def test_activations_without_a_gate(
    shim: ShimPrograms, dtype: str, data: st.DataObject, seed: int, backwards: bool, with_bias: bool
) -> None:
    rng, shim.backwards = np.random.default_rng(seed), backwards
    tokens, vectors, gap = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 70)), data.draw(st.integers(0, 2))
    x = numbers(rng, (tokens, (vectors + gap) * vector(dtype)), dtype)[:, gap * vector(dtype) :]
    x[0, 0] = np.nan
    out = Guarded(x.shape, x.dtype)
    bias = numbers(rng, (x.shape[1],), dtype) if with_bias else None
    assert CudaElementwise(shim).activated(x, out.array, "relu2", bias)
    if bias is not None:
        x = (wide(x) + wide(bias)).astype(x.dtype)
    rounded_once(out.checked(), NumpyOps().squared_relu(wide(x)))
    assert not CudaElementwise(shim).activated(x, np.empty((tokens, x.shape[1] // 2), x.dtype), "relu2")


@pytest.mark.parametrize("dtype", DTYPES)
@examples
@given(data=st.data(), seed=SEEDS, backwards=st.booleans())
def test_rows_are_gathered_and_scaled(
    shim: ShimPrograms, dtype: str, data: st.DataObject, seed: int, backwards: bool
) -> None:
    rng, shim.backwards = np.random.default_rng(seed), backwards
    width, gap = (vector(dtype) * data.draw(st.integers(low, high)) for low, high in ((1, 50), (0, 2)))
    table = numbers(rng, (9, width + gap), dtype)[:, gap:]
    ids = rng.integers(0, 9, data.draw(st.integers(1, 20)), dtype=np.int32)
    scale = data.draw(st.sampled_from([1.0, 25.298221281347036]))
    out = Guarded((len(ids), width), table.dtype)
    assert CudaElementwise(shim).gather_rows(table, ids, out.array, float(table.dtype.type(scale)))
    np.testing.assert_array_equal(wide(out.checked()), wide(NumpyOps(dtype).embedding(table, ids, scale)))


def test_rows_without_gaps_may_be_normed_in_place(shim: ShimPrograms) -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((3, 2, 64), dtype=np.float32), rng.standard_normal(64, dtype=np.float32)
    normed = NumpyOps().rms_norm(x, weight, 1e-6)
    assert CudaElementwise(shim).rms_norm(x, weight, 1e-6, x)
    np.testing.assert_allclose(x, normed, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@examples
@given(seed=SEEDS, tokens=st.integers(0, 4), size=st.integers(1, 40), first=st.integers(0, 9))
def test_any_shape_is_computed_fused_or_not(
    shim: ShimPrograms, dtype: str, seed: int, tokens: int, size: int, first: int
) -> None:
    rng, ops, truth = np.random.default_rng(seed), EmulatedOps(dtype, shim), NumpyOps()
    flat = numbers(rng, (tokens, first + 2 * size), dtype)[:, first:]
    weight = rng.standard_normal(2 * size + 1, dtype=np.float32)[first % 2 :][: 2 * size]
    rounded_once(ops.rms_norm(flat, weight, 1e-5), truth.rms_norm(wide(flat), weight, 1e-5))
    total, normed = ops.add_rms_norm(flat, flat[::-1], weight, 1e-5)
    np.testing.assert_array_equal(wide(total), wide(flat + flat[::-1]))
    rounded_once(normed, truth.rms_norm(wide(total), weight, 1e-5))
    bias = numbers(rng, (2 * size,), dtype)
    total, normed = ops.add_rms_norm(flat, flat[::-1], weight, 1e-5, bias)
    np.testing.assert_array_equal(wide(total), wide(flat + (flat[::-1] + bias)))
    rounded_once(normed, truth.rms_norm(wide(total), weight, 1e-5))
    rounded_once(ops.silu_mul(flat), truth.silu_mul(wide(flat)))
    rounded_once(ops.gelu_tanh_mul(flat), truth.gelu_tanh_mul(wide(flat)), slack=1e-5)
    rounded_once(ops.clamped_mul(flat), truth.clamped_mul(wide(flat)))
    whole = np.ascontiguousarray(flat)
    for gate in (flat[::-1], flat[:, :1]):
        rounded_once(ops.sigmoid_mul(whole, gate), truth.sigmoid_mul(wide(whole), wide(gate)))
    heads = numbers(rng, (tokens, 3 + first % 2, 2 * size), dtype)[:, first % 2 :]
    weights = np.stack([weight, weight[::-1], -weight])
    rounded_once(ops.rms_norm(heads, weights, 1e-5), truth.rms_norm(wide(heads), weights, 1e-5))
    angles = rng.standard_normal((tokens, 1, size), dtype=np.float32)
    turn = np.cos(angles), np.sin(angles)
    rounded_once(ops.rope(heads, *turn), truth.rope(wide(heads), *turn))
    ids = rng.integers(0, max(tokens, 1), 5 * min(tokens, 1), dtype=np.int32)
    scaled = NumpyOps(dtype).embedding(flat, ids, 3.3)
    np.testing.assert_array_equal(wide(ops.embedding(flat, ids, 3.3)), wide(scaled))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("hidden", "heads", "head_dim", "mlp"),
    [(2048, 32, 64, 8192), (640, 4, 256, 2048), (576, 9, 64, 1536), (2560, 20, 128, 12288), (5120, 8, 96, 1024)],
)
def test_models_shapes_are_fused(
    shim: ShimPrograms, monkeypatch: pytest.MonkeyPatch, dtype: str, hidden: int, heads: int, head_dim: int, mlp: int
) -> None:
    for name in ("embedding", "rms_norm", "silu_mul", "gelu_tanh_mul", "clamped_mul", "sigmoid_mul"):
        monkeypatch.delattr(ArrayOps, name)
    monkeypatch.delattr(UnfusedOps, "add_rms_norm")
    ops, number = EmulatedOps(dtype, shim), numpy_dtype(dtype)
    x = ops.embedding(np.ones((3, hidden), number), np.array([2], np.int32))
    assert ops.rms_norm(x, np.ones(hidden, np.float32), 1e-5).shape == (1, hidden)
    assert ops.add_rms_norm(x, x, np.ones(hidden, np.float32), 1e-5)[1].shape == (1, hidden)
    query = np.ones((1, heads + 2, head_dim), number)[:, :heads]
    assert ops.rms_norm(query, np.ones(head_dim, np.float32), 1e-5).shape == query.shape
    for activation in (ops.silu_mul, ops.gelu_tanh_mul, ops.clamped_mul):
        assert activation(np.ones((1, 2 * mlp), number)).shape == (1, mlp)
    for gates in (hidden, 1):
        assert ops.sigmoid_mul(x, np.ones((1, gates), number)).shape == (1, hidden)


def test_what_is_not_in_vectors_is_left_to_others(shim: ShimPrograms) -> None:
    fused, half = CudaElementwise(shim), np.dtype(np.float16)
    x, out, weight = np.ones((2, 3, 16), half), np.zeros((2, 3, 16), half), np.ones(16, np.float32)
    shifted = np.ones(2 * 3 * 16 + 1, half)[1:].reshape(x.shape)
    many = np.ones((1, 8 * 2049), half)
    table, ids = np.ones((4, 16), half), np.zeros(2, np.int32)

    assert not fused.rms_norm(shifted, weight, 1e-5, out)
    assert not fused.rms_norm(x.transpose(2, 1, 0), np.ones(2, np.float32), 1e-5, np.zeros((16, 3, 2), half))
    assert not fused.rms_norm(np.ones((2, 3, 20), half)[..., :16], weight, 1e-5, out)
    assert not fused.rms_norm(x, weight.astype(half), 1e-5, out)
    assert not fused.rms_norm(x, weight[:8], 1e-5, out)
    assert not fused.rms_norm(x, np.ones((2, 16), np.float32), 1e-5, out)
    assert not fused.rms_norm(x[:, 0].copy(), np.ones((2, 16), np.float32), 1e-5, out[:, 0].copy())
    assert not fused.rms_norm(x, weight, 1e-5, np.zeros((2, 3, 32), half)[..., :16])
    assert not fused.rms_norm(x, weight, 1e-5, out[:1])
    assert not fused.rms_norm(x, weight, 1e-5, out.astype(np.float32))
    assert not fused.rms_norm(x.astype(np.float64), weight, 1e-5, out.astype(np.float64))
    assert not fused.rms_norm(many, np.ones(many.shape[1], np.float32), 1e-5, np.zeros_like(many))
    flat = x[:, 0].copy()
    assert not fused.add_rms_norm(x[:, 0], flat, weight, 1e-5, flat.copy(), flat.copy())
    assert not fused.add_rms_norm(flat, flat[:1], weight, 1e-5, flat.copy(), flat.copy())
    assert not fused.add_rms_norm(flat, flat, weight, 1e-5, flat.astype(np.float32), flat.copy())
    assert not fused.add_rms_norm(flat, flat, weight, 1e-5, flat.copy(), flat.copy(), flat[0, :8])
    assert not fused.add_rms_norm(flat, flat, weight, 1e-5, flat.copy(), flat.copy(), weight)
    assert not fused.activated(x[:, 0], out[:, 0, :8], "silu")
    assert not fused.activated(x[:, 0, :8], np.zeros((2, 4), half), "silu")
    assert not fused.activated(x[:, 0], np.zeros((2, 16), half), "silu")
    assert not fused.gather_rows(table[:, :12], ids, np.zeros((2, 12), half))
    assert not fused.gather_rows(table, ids.astype(np.int64), np.zeros((2, 16), half))
    assert not fused.gather_rows(table, np.zeros(4, np.int32)[::2], np.zeros((2, 16), half))
    assert not fused.gather_rows(table, ids, np.zeros((3, 16), half))
    assert not out.any()


def test_nothing_is_compiled_or_loaded_by_a_call_once_prepared(shim: ShimPrograms) -> None:
    asked: list[Any] = []

    def programs(source: str, defines: Any) -> Any:
        asked.append(defines)
        return shim(source, defines)

    fused = CudaElementwise(programs)
    fused.prepare(np.dtype(np.float32))
    assert len(asked) == 1
    for width in (64, 512, 1024, 2048):
        x = np.ones((1, width), np.float32)
        assert fused.rms_norm(x, x[0], 1e-5, np.empty_like(x))
        assert fused.activated(x, np.empty((1, width // 2), np.float32), "gelu_tanh")
    assert len(asked) == 1


def test_a_dtype_without_kernels_is_refused(shim: ShimPrograms) -> None:
    with pytest.raises(ConfigError, match="does not compute in float64: choose float16, bfloat16, float32"):
        EmulatedOps("float64", shim)


def mapped(path: Path, values: np.ndarray) -> np.ndarray:
    values.tofile(path)
    return np.memmap(path, np.float32, "r").view(np.ndarray).reshape(values.shape)


def test_what_may_change_or_be_freed_is_uploaded_each_time(shim: ShimPrograms, tmp_path: Path) -> None:
    ops = EmulatedOps("float32", shim)
    own = np.zeros((8, 8), np.float32)
    zeros = ops.tensor(own)
    own[:] = 1
    np.testing.assert_array_equal(ops.tensor(own), 1)
    own.flags.writeable = False
    frozen = ops.tensor(own)
    assert not np.shares_memory(ops.tensor(own), frozen)
    np.testing.assert_array_equal(zeros, 0)

    tensors = []
    for number in range(4):  # the next file is most often mapped where the last one was
        rows = mapped(tmp_path / f"weights-{number}", np.full((64, 64), number, np.float32))
        tensors.append(ops.tensor(rows))
        del rows
    assert [tensor[0, 0] for tensor in tensors] == [0, 1, 2, 3]


@pytest.mark.parametrize("sm", SERVED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_machine_code_has_no_spills_and_reads_and_writes_whole_vectors(dtype: str, sm: int) -> None:
    compiled = machine_code("elementwise.cu", variant_of(numpy_dtype(dtype)), sm)
    assert spilled(compiled) == []
    accesses = {}
    for entry in compiled.ptx.split(".entry")[1:]:
        kinds = [re.findall(rf"\b{kind}\.global[.\w]*", entry) for kind in ("ld", "st")]
        accesses[entry.split("(")[0].strip()] = kinds
    floats = vector(dtype) // 4  # vectors of float32 beside one of `dtype`
    expected = {
        "rms_norm": (4 + 4 * floats, 4),
        "add_rms_norm": (12 + 4 * floats, 8),
        "silu_mul": (4, 1),
        "gelu_tanh_mul": (4, 1),
        "clamped_mul": (4, 1),
        "limited_silu_mul": (4, 1),
        "clipped_silu_mul": (4, 1),
        "relu2": (2, 1),
        "sigmoid_mul": (2, 1),
        "sigmoid_mul_rows": (1, 1),
        "gather_rows": (1, 1),
    }
    assert accesses.keys() == expected.keys()
    scalars = accesses["gather_rows"][0]
    scalars.remove("ld.global.s32" if "ld.global.s32" in scalars else "ld.global.u32")  # a token id
    gates = accesses["sigmoid_mul_rows"][0]
    gates.remove(next(load for load in gates if ".v4" not in load))  # one for a row
    for kernel, (loads, stores) in accesses.items():
        assert (len(loads), len(stores)) == expected[kernel], kernel
        assert all(".v4" in access for access in loads + stores), kernel
