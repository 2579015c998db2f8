"""Hyper-connections and looked-up experts on a GPU: their kernels in the host shim, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.gpu.cuda_shim import LIBRARIES, ShimPrograms
from support.gpu.machine_code import SERVED, machine_code, spilled

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.runtime.models.hyper import HyperConfig, HyperConnections, HyperWeights
from headwise.runtime.ops.numpy_ops import NumpyOps

pytest.importorskip("triton", reason="the operations of a GPU have kernels in Triton, too, which is not installed")

from support.gpu.emulated_gpu import EmulatedOps

from headwise.kernels.cuda import named_experts, streams

HIDDEN = 64


def ops_of(dtype: str) -> EmulatedOps:
    return EmulatedOps(dtype, ShimPrograms(LIBRARIES))


def drawn(count: int, joins: bool, seed: int = 0) -> dict[str, np.ndarray]:
    draw, numbers = np.random.default_rng(seed), count if joins else (2 + count) * count
    shapes = {"fn": (numbers, count * HIDDEN), "base": (numbers,), "scale": (1 if joins else 3,)}
    found = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return {**found, "fn": found["fn"] / np.float32(np.sqrt(count * HIDDEN))}


def weights_of(ops: Any, arrays: dict[str, np.ndarray]) -> HyperWeights:
    ones = ops.norm_weight(np.ones(arrays["fn"].shape[1], np.float32))
    return HyperWeights(ops.float_weight(arrays["fn"]), ops.upload(arrays["base"]), ops.upload(arrays["scale"]), ones)


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 2e-5), ("bfloat16", 4e-2), ("float16", 6e-3)])
@pytest.mark.parametrize("count", streams.COUNTS)
def test_streams_are_mixed_as_numpy_mixes_them(count: int, dtype: str, atol: float) -> None:
    config = HyperConfig(count, iterations=5, eps=1e-6, norm_eps=1e-6)
    kept, draw = numpy_dtype(dtype), np.random.default_rng(1)
    given = draw.standard_normal((7, count, HIDDEN)).astype(kept)
    part = draw.standard_normal((7, HIDDEN)).astype(kept)
    found, taken = [], []
    for ops in (ops_of(dtype), NumpyOps()):
        array = given.copy() if isinstance(ops, EmulatedOps) else given.astype(np.float32)
        hyper = HyperConnections(config, ops)
        mixed, mixing = hyper.before(array, weights_of(ops, drawn(count, joins=False)))
        np.testing.assert_allclose(mixing.between.sum(axis=1), 1, rtol=0, atol=1e-3)
        behind = hyper.behind(array, part.astype(array.dtype), mixing)
        joined = hyper.joined(behind, weights_of(ops, drawn(count, joins=True, seed=2)))
        found.append([mixed, mixing.given, mixing.between, behind, joined])
        taken.append(hyper._by_kernels(array) is not None)
    assert taken == [True, False]
    for own, right in zip(*found, strict=True):
        np.testing.assert_allclose(own.astype(np.float32), right, rtol=0, atol=atol)


def test_a_token_s_streams_are_its_own() -> None:
    """Padding may hold anything, and of no token there is nothing to do."""
    config, ops = HyperConfig(4, iterations=3, eps=1e-6, norm_eps=1e-6), ops_of("float32")
    hyper, weights = HyperConnections(config, ops), weights_of(ops, drawn(4, joins=False))
    rows = np.random.default_rng(3).standard_normal((3, 4, HIDDEN)).astype(np.float32)
    padded = np.concatenate([rows, np.full_like(rows, np.nan)])
    (mixed, mixing), (alone, of_alone) = (hyper.before(array.copy(), weights) for array in (padded, rows))
    np.testing.assert_array_equal(mixed[:3], alone)
    np.testing.assert_array_equal(mixing.between[:3], of_alone.between)
    nothing, _ = hyper.before(rows[:0].copy(), weights)
    assert nothing.shape == (0, HIDDEN)


@pytest.mark.parametrize("shape", [(2, 3, HIDDEN), (2, 8, HIDDEN), (2, 4, 63)])
def test_others_are_left_to_numpy(shape: tuple[int, ...]) -> None:
    ops = ops_of("float32")
    assert not ops.takes_streams(np.zeros(shape, np.float32))
    config = HyperConfig(shape[1], iterations=3, eps=1e-6, norm_eps=1e-6)
    assert HyperConnections(config, ops)._by_kernels(np.zeros(shape, np.float32)) is None


def test_what_does_not_fit_is_refused() -> None:
    kernels = streams.CudaStreams(ShimPrograms(LIBRARIES))
    array, part = np.zeros((2, 4, HIDDEN), np.float32), np.zeros((2, HIDDEN), np.float32)
    made, base, scale = np.zeros((2, 24), np.float32), np.zeros(24, np.float32), np.zeros(3, np.float32)
    mixing = np.zeros((2, 4), np.float32), np.zeros((2, 4, 4), np.float32)
    how: dict[str, Any] = {"iterations": 1, "eps": 1e-6, "norm_eps": 1e-6}
    with pytest.raises(ValueError, match="do not fit"):
        kernels.mix(array, made[:, :23], base, scale, part, mixing, **how)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.mix(array, made, base, scale, part, None, **how)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.add(array, part[:1], *mixing)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.add(array[:, :, ::2], part, *mixing)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_of_named_experts_alone_are_kept(dtype: str) -> None:
    draw, kept = np.random.default_rng(4), numpy_dtype(dtype)
    table = np.stack([draw.permutation(20)[:3] for _ in range(9)]).astype(np.int64)
    ids, logits = draw.integers(0, 9, 5).astype(np.int32), draw.standard_normal((5, 24)).astype(kept)[:, :20]
    found = ops_of(dtype).named_logits(logits, table, ids, -1e30)
    named = (table[ids][:, :, None] == np.arange(20)).any(axis=1)
    np.testing.assert_array_equal(found[named], logits[named])
    assert (found[~named].astype(np.float32) < -1e29).all()
    with pytest.raises(ValueError, match="do not fit"):
        ops_of(dtype).named_logits(logits, table.astype(np.int32), ids, -1e30)


@pytest.mark.parametrize("sm", SERVED)
def test_machine_code_keeps_all_in_registers(sm: int) -> None:
    for number in ("BF16", "F32"):
        assert not spilled(machine_code(streams.SOURCE, {"NUMBER": number, "STREAMS": 4}, sm))
        assert not spilled(machine_code(named_experts.SOURCE, {"NUMBER": number}, sm))
