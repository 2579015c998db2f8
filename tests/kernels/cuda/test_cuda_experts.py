"""Mixtures of experts on a GPU: routed in the host shim, multiplied in Triton's interpreter, in poisoned memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.machine_code import TARGETS, machine_code, spilled, variant_code

pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.errors import ConfigError
from headwise.kernels.cuda import experts as cuda_experts
from headwise.kernels.cuda.cubins import Target
from headwise.kernels.cuda.experts import CudaExperts, ExpertShape, StackedExperts, defines_of, most_tiles, variants_of
from headwise.kernels.cuda.interpreter import InterpreterLauncher
from headwise.kernels.cuda.launch import Variant
from headwise.kernels.cuda.tiles import SHARED_BYTES, SHARED_BYTES_FROM_90, ProductTile
from headwise.kernels.experts import Mixture, Routing, route
from headwise.kernels.fused import Activation, is_gated
from headwise.runtime.ops.numpy_ops import NumpyOps
from headwise.runtime.ops.stacked_experts import can_be_cut, stack_experts

ERNIE = Routing(experts=8, per_token=3, norm_min=1e-12)
V2 = Routing(8, 2, None, groups=4, groups_per_token=2, scale=16.0)
V3 = Routing(64, 6, 1e-20, scored_by="sigmoid", groups=8, groups_per_token=4, best_of_group=2, scale=2.5)
V4 = Routing(256, 6, 1e-20, scored_by="sqrtsoftplus", scale=1.5)
PLAIN = Routing(384, 8, 1e-20, scored_by="sigmoid")
HIDDEN, INNER = 32, 48
SMALL = (ProductTile(16, 16, 16, 32, 4, 2), ProductTile(32, 32, 16, 16, 4, 2, least_rows=6))
"""Of which a few tokens fill several."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_experts, "expert_tiles", lambda dtype, sm: SMALL)


@dataclass(frozen=True)
class Dense:
    weight: np.ndarray
    bias: np.ndarray | None = None


@dataclass(frozen=True)
class Mlp:
    into: Dense
    down: Dense


def draw(rng: np.random.Generator, ops: NumpyOps, inner: int, has_bias: bool = False, gated: bool = True) -> Mlp:
    def dense(rows: int, columns: int) -> Dense:
        weight = ops.linear_weight(rng.standard_normal((rows, columns), np.float32) * columns**-0.5)
        return Dense(weight, ops.linear_bias(rng.standard_normal(rows, np.float32)) if has_bias else None)

    return Mlp(dense(2 * inner if gated else inner, HIDDEN), dense(HIDDEN, inner))


def poisoned(shape: Any, dtype: Any) -> np.ndarray:
    """Floats are NaN, and so large integers that what reads by them ends the process."""
    dtype = np.dtype(dtype)
    made = np.empty(shape, dtype)
    made.reshape(-1).view(np.uint8)[:] = 0xFF if dtype.kind != "i" else 0x7F
    return made


def device(backwards: bool = False) -> CudaExperts:
    shim = ShimPrograms()
    shim.backwards = backwards
    return CudaExperts(InterpreterLauncher(), shim, poisoned)


@dataclass
class Scene:
    """Experts, and what they make of tokens, by the reference and on the device."""

    mixture: Mixture
    shared: int = 0
    has_bias: bool = False
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng, self.ops = np.random.default_rng(self.seed), NumpyOps(self.dtype)
        count, gated = self.mixture.routing.experts, is_gated(self.mixture.activation)
        self.routed = [draw(self.rng, self.ops, INNER, self.has_bias, gated) for _ in range(count)]
        self.beside = draw(self.rng, self.ops, INNER * self.shared, gated=gated) if self.shared else None
        self.stacked: StackedExperts = stack_experts(np, np.array, self.mixture, self.dtype, self.routed, self.beside)

    def tokens(self, count: int) -> np.ndarray:
        return self.ops.tensor(self.rng.standard_normal((count, HIDDEN), np.float32))

    def logits(self, count: int) -> np.ndarray:
        return self.ops.tensor(self.rng.standard_normal((count, self.mixture.routing.experts), np.float32) * 2)

    def expected(self, x: np.ndarray, logits: np.ndarray) -> np.ndarray:
        exact = NumpyOps()
        widened = [exact_of(mlp) for mlp in self.routed]
        experts = exact.experts(self.mixture, widened, None if self.beside is None else exact_of(self.beside))
        return exact.mix_experts(x.astype(np.float32), logits.astype(np.float32), experts)

    def found(self, x: np.ndarray, logits: np.ndarray, live: int | None = None, backwards: bool = False) -> np.ndarray:
        experts = device(backwards)
        experts.prepare(self.stacked.shape)
        tokens = np.array([len(x) if live is None else live], np.int32)
        return experts.mix(x, logits, self.stacked, tokens).astype(np.float32)

    def assert_right(self, x: np.ndarray, logits: np.ndarray, **changes: Any) -> None:
        close = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2}[self.dtype] * self.mixture.routing.scale
        np.testing.assert_allclose(self.found(x, logits, **changes), self.expected(x, logits), rtol=0, atol=close)


def exact_of(mlp: Mlp) -> Mlp:
    def wide(dense: Dense) -> Dense:
        bias = None if dense.bias is None else dense.bias.astype(np.float32)
        return Dense(dense.weight.astype(np.float32), bias)

    return Mlp(wide(mlp.into), wide(mlp.down))


def scenes() -> Iterator[Any]:
    correction = np.random.default_rng(3).standard_normal(8, np.float32) * 0.3
    yield pytest.param(Scene(Mixture(ERNIE, "silu", correction), shared=2), id="ernie")
    biased = Mixture(Routing(8, 4, 1e-20), "clamped", logit_bias=4 * correction)
    yield pytest.param(Scene(biased, has_bias=True), id="gpt-oss")
    sigmoids = Mixture(Routing(8, 2, None, scored_by="sigmoid"), "silu", logit_bias=4 * correction)
    yield pytest.param(Scene(sigmoids), id="sigmoids of biased logits")
    yield pytest.param(Scene(Mixture(V2, "silu"), shared=1), id="deepseek-v2")
    yield pytest.param(Scene(Mixture(V3, "silu", np.tile(correction, 8)), shared=1), id="deepseek-v3")
    rooted = Mixture(replace(V4, experts=64), "limited_silu", np.tile(correction, 8))
    yield pytest.param(Scene(rooted, shared=1), id="deepseek-v4")
    yield pytest.param(
        Scene(Mixture(replace(V3, groups=1), "clipped_silu", np.tile(correction, 8)), shared=1), id="step"
    )
    scales = np.linspace(0.5, 2, 8, dtype=np.float32)
    yield pytest.param(Scene(Mixture(Routing(8, 2, 1e-20), "gelu_tanh", scales=scales)), id="gemma-4")
    weighed = Mixture(Routing(8, 2, None, scored_by="sigmoid"), "silu", weighs_input=True)
    yield pytest.param(Scene(weighed, shared=1), id="llama-4")
    yield pytest.param(Scene(replace(weighed, activation="clamped"), has_bias=True, dtype="bfloat16"), id="weighed")
    yield pytest.param(Scene(Mixture(ERNIE, "silu"), shared=2, dtype="bfloat16"), id="bfloat16")
    ungated = Mixture(replace(ERNIE, scored_by="sigmoid", scale=2.5), "relu2", correction)
    yield pytest.param(Scene(ungated, shared=2), id="without gates")
    yield pytest.param(Scene(ungated, has_bias=True, dtype="bfloat16"), id="without gates, bfloat16 and biases")
    squared = replace(weighed, activation="relu2")
    yield pytest.param(Scene(squared, has_bias=True), id="without gates, weighed")
    yield pytest.param(Scene(squared, dtype="float16"), id="without gates, float16")
    yield pytest.param(Scene(Mixture(ERNIE, "silu"), dtype="float16"), id="float16")


@pytest.mark.parametrize("scene", list(scenes()))
@pytest.mark.parametrize("count", [1, 5, 40])
def test_experts_make_of_tokens_what_the_reference_does(scene: Scene, count: int) -> None:
    scene.assert_right(scene.tokens(count), scene.logits(count))


@pytest.mark.parametrize("backwards", [False, True])
def test_all_tokens_may_go_to_the_same_experts_and_others_have_none(backwards: bool) -> None:
    scene = Scene(Mixture(ERNIE, "silu"), shared=2)
    logits = np.tile(np.array([0, 9, 0, 0, 8, 0, 7, 0], np.float32), (70, 1))
    scene.assert_right(scene.tokens(70), logits, backwards=backwards)


def test_padding_asks_nothing_of_any_expert_whatever_it_holds() -> None:
    scene = Scene(Mixture(ERNIE, "silu"), shared=2)
    x, logits = scene.tokens(8), scene.logits(8)
    x[5:], logits[5:] = np.nan, np.nan
    found = scene.found(x, logits, live=5)
    np.testing.assert_allclose(found[:5], scene.expected(x[:5], logits[:5]), rtol=0, atol=2e-5)
    assert (found[5:] == 0).all()
    assert (scene.found(x, logits, live=0) == 0).all()
    assert scene.found(x[:0], logits[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("routing", [ERNIE, V3])
def test_a_token_without_numbers_spoils_no_other(routing: Routing) -> None:
    scene = Scene(Mixture(routing, "silu"))
    x, logits = scene.tokens(4), scene.logits(4)
    x[1], logits[2] = np.nan, np.nan
    found, expected = scene.found(x, logits), scene.expected(x[[0, 3]], logits[[0, 3]])
    np.testing.assert_allclose(found[[0, 3]], expected, rtol=0, atol=5e-5)
    assert np.isnan(found[[1, 2]]).all(), "so that sampling tells of them"


@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_of_experts_add_up(ranks: int, activation: Activation) -> None:
    scene = Scene(Mixture(ERNIE, activation), shared=2)
    x, logits, part = scene.tokens(20), scene.logits(20), INNER // ranks

    def shard(mlp: Mlp, rank: int) -> Mlp:
        inner = mlp.down.weight.shape[0]
        mine = np.arange(rank * inner // ranks, (rank + 1) * inner // ranks)
        rows = np.concatenate([mine, inner + mine]) if is_gated(activation) else mine
        return Mlp(Dense(mlp.into.weight[:, rows]), Dense(mlp.down.weight[mine]))

    total = np.zeros_like(x)
    for rank in range(ranks):
        mine = [shard(mlp, rank) for mlp in scene.routed]
        assert scene.beside is not None
        own = stack_experts(np, np.array, scene.mixture, "float32", mine, shard(scene.beside, rank))
        assert own.shape == replace(scene.stacked.shape, inner=part)
        experts = device()
        experts.prepare(own.shape)
        total += experts.mix(x, logits, own, np.array([20], np.int32))
    np.testing.assert_allclose(total, scene.expected(x, logits), rtol=0, atol=2e-5)


@pytest.mark.parametrize("routing", [ERNIE, V2, V3, V4, PLAIN, Routing(1, 1, None)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backwards", [False, True])
def test_the_chosen_are_those_of_the_rule(routing: Routing, dtype: str, backwards: bool) -> None:
    rng, count = np.random.default_rng(1), 60
    logits = (rng.standard_normal((count, routing.experts + 8)) * 2).astype(numpy_dtype(dtype))[:, : routing.experts]
    logits[0] = 0  # of equal scores the lower index counts as the higher
    logits[1] += 40  # whose sigmoids round to 1
    correction = None if routing is PLAIN else (rng.standard_normal(routing.experts) * 0.3).astype(np.float32)
    shape = ExpertShape(routing, 1, HIDDEN, INNER, "silu", dtype)
    experts = device(backwards)
    experts.prepare(shape)
    weights = StackedExperts(shape, None, None, None, None, correction, None)
    chosen, shares = experts._choose(experts._kernels[shape], logits, weights, np.array([count - 1], np.int32))
    added = np.float32(0) if correction is None else correction
    expected, wanted = route(logits[:-1].astype(np.float32), added, routing)
    np.testing.assert_array_equal(chosen[:-1, :-1], expected)
    np.testing.assert_allclose(shares[:-1, :-1], wanted, rtol=2e-5)
    assert (chosen[:-1, -1] == routing.experts).all()
    assert (shares[:-1, -1] == 1).all()
    assert (chosen[-1] == -1).all()


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(("assignments", "used"), [(0, 8), (1, 8), (300, 8), (300, 1), (64, 4)])
def test_every_assignment_is_in_a_tile_of_its_expert_once(assignments: int, used: int, backwards: bool) -> None:
    rng, rows, experts = np.random.default_rng(assignments), 16, 9
    chosen = rng.integers(-1, used, assignments).astype(np.int32)
    shim = ShimPrograms()
    shim.backwards = backwards
    defines = defines_of(ExpertShape(ERNIE, 1, HIDDEN, INNER, "silu", "float32"))
    tiles = most_tiles(assignments, experts, rows)
    order, tile_expert = poisoned((tiles, rows), np.int32), poisoned((tiles,), np.int32)
    shim("experts.cu", defines).kernel("sort_by_expert", 1024)(
        (1, 1, 1),
        (
            *(np.uint64(array.ctypes.data) for array in (chosen, order, tile_expert)),
            np.int32(assignments), np.int32(tiles), np.int32(rows),
        ),
    )  # fmt: skip
    assert sorted(order[order >= 0]) == list(np.flatnonzero(chosen >= 0))
    for expert, tile in zip(tile_expert, order, strict=True):
        assert (chosen[tile[tile >= 0]] == expert).all()
        assert (tile >= 0).any() == (expert >= 0)
    held = np.bincount(chosen[chosen >= 0], minlength=experts)
    np.testing.assert_array_equal(np.bincount(tile_expert[tile_expert >= 0], minlength=experts), -(-held // rows))


def test_no_distribution_of_tokens_takes_more_tiles_than_there_are() -> None:
    for assignments in (0, 1, 7, 64, 1000):
        for experts in (1, 8, 66):
            spread = np.bincount(np.arange(assignments) % experts, minlength=experts)
            spread[1:], spread[0] = np.minimum(spread[1:], 1), assignments - np.minimum(spread[1:], 1).sum()
            assert -(-spread // 16).sum() <= most_tiles(assignments, experts, 16)


def test_what_is_not_served_is_refused_with_the_remedy() -> None:
    shape = ExpertShape(ERNIE, 0, HIDDEN, INNER, "silu", "bfloat16")
    for wrong, message in (
        (replace(shape, shared=30), "33 of 8 experts.*at most 32 of 1024.*device cpu"),
        (replace(shape, hidden=36), "hidden size 36 of bfloat16.*16 bytes.*device cpu"),
    ):
        with pytest.raises(ConfigError, match=message):
            device().prepare(wrong)
    scene = Scene(Mixture(ERNIE, "silu"))
    with pytest.raises(ValueError, match="size 50 is no whole number of experts of size 48"):
        stack_experts(np, np.array, scene.mixture, "float32", scene.routed, draw(scene.rng, scene.ops, 50))


def test_a_shared_expert_is_cut_where_it_is_made_of_others_and_stays_whole_elsewhere() -> None:
    scene = Scene(Mixture(replace(ERNIE, per_token=8), "relu2"))
    first, sizes = scene.routed[0], {INNER * 2: True, 50: False, INNER // 2: False, INNER * 24: True, INNER * 25: False}
    for size, expected in sizes.items():
        assert can_be_cut(np, scene.mixture, first, draw(scene.rng, scene.ops, size, gated=False)) is expected
    with_bias = draw(scene.rng, scene.ops, INNER, has_bias=True, gated=False)
    assert not can_be_cut(np, scene.mixture, first, with_bias)


# ---- machine code ----

ERNIE_21B = ExpertShape(Routing(64, 6, 1e-12), 2, 2560, 1536, "silu", "bfloat16")


DEEPSEEK_V3 = Routing(256, 8, 1e-20, "sigmoid", 8, 4, 2, 2.5)
NEMOTRON_3 = ExpertShape(Routing(128, 6, 1e-20, "sigmoid", scale=2.5), 2, 2688, 1856, "relu2", "bfloat16")
"""Nano: without gates."""


@pytest.mark.parametrize(("sm", "routing"), [*((sm, ERNIE_21B.routing) for sm in TARGETS), (90, DEEPSEEK_V3)], ids=repr)
def test_choosing_and_sorting_keep_all_in_registers(sm: int, routing: Routing) -> None:
    assert not spilled(machine_code("experts.cu", defines_of(replace(ERNIE_21B, routing=routing)), sm))


def every_product() -> Iterator[Any]:
    """Of ERNIE-4.5-21B-A3B, as ``(sm, variant)``: each takes seconds to compile."""
    ungated = (variant for variant in variants_of(NEMOTRON_3, 90) if dict(variant.constants)["ACTIVATION"])
    for sm, variants in (*((sm, variants_of(ERNIE_21B, sm)) for sm in TARGETS), (90, ungated)):
        for variant in variants:
            sizes = dict(variant.constants)
            is_telling = sm == 90 and sizes["ACTIVATION"] and sizes["BLOCK_M"] != 64
            name = f"sm{sm}-{sizes['BLOCK_M']}-{sizes['ACTIVATION'] or 'down'}"
            yield pytest.param(sm, variant, id=name, marks=() if is_telling else pytest.mark.soak)


@pytest.mark.parametrize(("sm", "variant"), list(every_product()))
def test_products_overlap_their_loads_and_spill_nothing(sm: int, variant: Variant) -> None:
    compiled = variant_code(variant, Target(sm, 12))
    assert compiled.ptx.count("cp.async.cg.shared.global") >= 4, "16 bytes at once"
    assert compiled.spilled_bytes == 0
    assert compiled.shared_bytes <= SHARED_BYTES.get(sm, SHARED_BYTES_FROM_90)
