"""Experts whose weights are codes, on a GPU: products in Triton's interpreter, in poisoned memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.machine_code import TARGETS, machine_code, spilled, variant_code

pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")

from headwise.errors import ConfigError
from headwise.kernels.cuda import experts as cuda_experts
from headwise.kernels.cuda.cubins import Target
from headwise.kernels.cuda.experts import (
    PACKED_SOURCE,
    CudaExperts,
    ExpertShape,
    StackedExperts,
    programs_of,
    variants_of,
)
from headwise.kernels.cuda.interpreter import InterpreterLauncher
from headwise.kernels.cuda.launch import Variant
from headwise.kernels.cuda.packed import CudaPacked, PackedMatrix, form_of, pack
from headwise.kernels.cuda.packed_parts import columns_of
from headwise.kernels.cuda.programs import Defines
from headwise.kernels.cuda.tiles import SHARED_BYTES, SHARED_BYTES_FROM_90, ProductTile
from headwise.kernels.experts import Mixture, Routing
from headwise.kernels.fused import is_gated
from headwise.runtime.ops.numpy_ops import NumpyOps
from headwise.runtime.ops.quantised import GroupQuantised
from headwise.runtime.ops.stacked_experts import can_be_cut, stack_experts

HIDDEN, INNER, EXPERTS = 128, 64, 4
ROUTING = Routing(EXPERTS, 2, 1e-12)
MANY = ProductTile(32, 64, 64, 64, 4, 2, least_rows=6)
SMALL = (ProductTile(16, 64, 64, 64, 4, 2), MANY)
"""The first one scales sums, but of float32, the other one weights."""


@dataclass(frozen=True)
class Kind:
    """Codes of experts. group: 0: of a whole row; minima: which experts have them"""

    dtype: type
    low: int
    high: int
    bits: int
    group: int
    minima: tuple[int, ...] = ()
    is_float: bool = False

    def draw(self, rng: np.random.Generator, width: int, depth: int, expert: int) -> GroupQuantised:
        group = self.group or depth
        codes = rng.integers(self.low, self.high, (width, depth)).astype(self.dtype)
        if self.is_float:
            codes[codes & 127 == 127] = 3
        unit = np.abs(codes.astype(np.float32)).max() if not self.is_float else 448.0
        scale = (rng.uniform(0.5, 2, (width, depth // group)) / unit / 8).astype(np.float32)
        minimum = rng.standard_normal(scale.shape).astype(np.float32) / 16 if expert in self.minima else None
        return GroupQuantised(codes, scale, minimum, group, self.bits, self.is_float)


KINDS = {
    "awq": Kind(np.uint8, 0, 16, 4, 32, (0, 1, 2, 3, 4)),
    "int4": Kind(np.int8, -8, 8, 4, 32),
    "odd halves": Kind(np.uint8, 0, 16, 4, 48, (0, 1, 2, 3, 4)),
    "gptq 8": Kind(np.int8, -128, 128, 8, 32, (2,)),
    "int8 by row": Kind(np.int8, -127, 128, 8, 0),
    "fp8": Kind(np.uint8, 0, 256, 8, 32, is_float=True),
    "fp8 by row": Kind(np.uint8, 0, 256, 8, 0, is_float=True),
}


@dataclass(frozen=True)
class Linear:
    weight: Any
    bias: Any = None


@dataclass(frozen=True)
class Mlp:
    into: Linear
    down: Linear


def poisoned(shape: Any, dtype: Any) -> np.ndarray:
    made = np.empty(shape, dtype)
    made.reshape(-1).view(np.uint8)[:] = 0xFF if made.dtype.kind != "i" else 0x7F
    return made


def packed(matrix: GroupQuantised, dtype: str) -> PackedMatrix:
    return pack(matrix, dtype, np.array)


def mlps(
    kind: Kind, dtype: str, shared: int, sizes: tuple[int, int] = (HIDDEN, INNER), gated: bool = True
) -> tuple[list[Mlp], list[Mlp]]:
    """Experts as codes, and as the numbers that these mean; the shared one comes last."""
    rng, exact, (hidden, size) = np.random.default_rng(7), NumpyOps(), sizes
    coded, wide = [], []
    for expert, inner in enumerate([size] * EXPERTS + [size * shared] * bool(shared)):
        pair = kind.draw(rng, 2 * inner if gated else inner, hidden, expert), kind.draw(rng, hidden, inner, expert)
        coded.append(Mlp(*(Linear(packed(one, dtype)) for one in pair)))
        wide.append(Mlp(*(Linear(exact.linear_weight(one)) for one in pair)))
    return coded, wide


def stack(mixture: Mixture, dtype: str, every: list[Mlp], shared: int) -> StackedExperts:
    return stack_experts(np, np.array, mixture, dtype, every[:EXPERTS], every[-1] if shared else None)


@pytest.mark.parametrize("count", [3, 14])
@pytest.mark.parametrize(
    ("kind", "dtype", "shared"),
    [
        ("awq", "float32", 2), ("awq", "bfloat16", 0), ("int4", "float16", 0), ("odd halves", "float32", 2),
        ("gptq 8", "float32", 2), ("gptq 8", "bfloat16", 0), ("int8 by row", "float16", 0), ("fp8", "float32", 2),
        ("fp8", "bfloat16", 0), ("fp8 by row", "float16", 0), ("fp8 by row", "float32", 1),
    ],
)  # fmt: skip
def test_experts_of_codes_make_of_tokens_what_their_numbers_do(
    kind: str, dtype: str, shared: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_experts, "expert_tiles", lambda dtype, sm: SMALL)
    assert_computed(kind, dtype, shared, count, Mixture(ROUTING, "silu"))


@pytest.mark.parametrize("count", [3, 14])
@pytest.mark.parametrize("weighs_input", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype", "shared"),
    [("awq", "float32", 2), ("int4", "bfloat16", 2), ("gptq 8", "float16", 0), ("fp8", "bfloat16", 2)],
)
def test_so_do_those_without_gates(
    kind: str, dtype: str, shared: int, weighs_input: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_experts, "expert_tiles", lambda dtype, sm: SMALL)
    assert_computed(kind, dtype, shared, count, Mixture(ROUTING, "relu2", weighs_input=weighs_input))


def assert_computed(kind: str, dtype: str, shared: int, count: int, mixture: Mixture) -> None:
    hidden, inner = (144, 48) if kind == "odd halves" else (HIDDEN, INNER)
    coded, wide = mlps(KINDS[kind], dtype, shared, (hidden, inner), is_gated(mixture.activation))
    experts = stack(mixture, dtype, coded, shared)
    assert isinstance(experts.into, PackedMatrix)
    assert experts.shape.shared == shared
    if shared:
        assert can_be_cut(np, mixture, coded[0], coded[-1])
    rng, ops = np.random.default_rng(count), NumpyOps(dtype)
    x = ops.tensor(rng.standard_normal((count, hidden), np.float32))
    logits = ops.tensor(rng.standard_normal((count, EXPERTS), np.float32))
    exact = NumpyOps()
    known = exact.experts(mixture, wide[:EXPERTS], wide[-1] if shared else None)
    expected = exact.mix_experts(x.astype(np.float32), logits.astype(np.float32), known)
    device = CudaExperts(InterpreterLauncher(), ShimPrograms(), poisoned)
    device.prepare(experts.shape)
    found = device.mix(x, logits, experts, np.array([count], np.int32))
    close = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype] * np.abs(expected).max()
    np.testing.assert_allclose(found.astype(np.float32), expected, rtol=0, atol=close)


def test_experts_that_are_not_alike_are_refused_by_their_number() -> None:
    mixture = Mixture(ROUTING, "silu")
    coded, wide = mlps(KINDS["int4"], "float32", 0)
    others, _ = mlps(KINDS["gptq 8"], "float32", 0)
    for unlike in (others[2], wide[2]):
        with pytest.raises(ConfigError, match=r"expert 2 of a layer is not quantised as .*: choose weights_dtype auto"):
            stack(mixture, "float32", [*coded[:2], unlike, coded[3]], 0)


def test_a_shared_expert_of_other_codes_or_of_none_is_not_cut() -> None:
    coded, wide = mlps(KINDS["int4"], "float32", 2)
    others, _ = mlps(KINDS["gptq 8"], "float32", 2)
    assert can_be_cut(np, Mixture(ROUTING, "silu"), coded[0], coded[-1])
    for unlike in (others[-1], wide[-1], replace(coded[-1], down=wide[-1].down)):
        assert not can_be_cut(np, Mixture(ROUTING, "silu"), coded[0], unlike)
    wider = replace(KINDS["int4"], group=128).draw(np.random.default_rng(0), HIDDEN, 2 * INNER, 0)
    cut_through = replace(coded[-1], down=Linear(packed(wider, "float32")))
    assert not can_be_cut(np, Mixture(ROUTING, "silu"), coded[0], cut_through)


@pytest.mark.parametrize("name", ["awq", "fp8", "int8 by row"])
def test_columns_that_cut_through_groups_have_smaller_ones(name: str) -> None:
    matrix = replace(KINDS[name], group=KINDS[name].group * 2).draw(np.random.default_rng(0), 8, 128, 0)
    kernels = CudaPacked(InterpreterLauncher(), ShimPrograms(), poisoned)
    for start, stop in ((0, 96), (32, 64), (64, 128)):
        part = columns_of(np, packed(matrix, "float32"), start, stop)
        assert part.form.group == (32 if name != "int8 by row" and stop - start == 96 else 0)
        found = kernels.expand(part, np.dtype(np.float32))
        np.testing.assert_allclose(found, matrix.dequantised()[:, start:stop], rtol=1e-6, atol=1e-6)


# ---- machine code ----

SIZES = ExpertShape(Routing(128, 8, None), 0, 2048, 768, "silu", "bfloat16")
"""Of Qwen3-30B-A3B."""


def with_codes(bits: int, group: int, has_minimum: bool = False, is_float: bool = False) -> ExpertShape:
    up, down = (form_of("bfloat16", bits, group, has_minimum, depth, is_float) for depth in (SIZES.hidden, SIZES.inner))
    return replace(SIZES, up_codes=up, down_codes=down)


SERVED = {
    "awq": with_codes(4, 128, has_minimum=True),
    "gptq": with_codes(4, 128),
    "int8": with_codes(8, 32),
    "fp8": with_codes(8, 128, is_float=True),
    "gptq without gates": replace(with_codes(4, 128), activation="relu2"),
}


def every_product() -> Iterator[Any]:
    """As ``(sm, variant)``: each takes seconds to compile."""
    for name, shape in SERVED.items():
        for sm in TARGETS:
            for variant in variants_of(shape, sm):
                sizes = dict(variant.constants)
                is_telling = sm == 90 and sizes["ACTIVATION"] and name == "awq" and sizes["BLOCK_M"] == 64
                case = f"{name}-sm{sm}-{sizes['BLOCK_M']}-{sizes['ACTIVATION'] or 'down'}"
                yield pytest.param(sm, variant, id=case, marks=() if is_telling else pytest.mark.soak)


@pytest.mark.parametrize(("sm", "variant"), list(every_product()))
def test_products_read_16_bytes_at_a_time_and_spill_nothing(sm: int, variant: Variant) -> None:
    compiled = variant_code(variant, Target(sm, 12))
    assert compiled.ptx.count("cp.async.cg.shared.global") >= 4, "loads overlap products"
    assert compiled.spilled_bytes == 0
    assert not compiled.is_serialised
    assert compiled.shared_bytes <= SHARED_BYTES.get(sm, SHARED_BYTES_FROM_90)


def every_program() -> Iterator[Any]:
    for name, shape in SERVED.items():
        for sm in TARGETS:
            for source, defines in programs_of(shape):
                if source == PACKED_SOURCE:
                    is_telling = name == "awq" or defines["ACTIVATION"] == "Relu2"
                    marks = () if sm == 90 and is_telling else pytest.mark.soak
                    yield pytest.param(sm, defines, id=f"{name}-sm{sm}-{defines['ACTIVATION']}", marks=marks)


@pytest.mark.parametrize(("sm", "defines"), list(every_program()))
def test_products_of_few_rows_use_tensor_cores_and_spill_nothing(sm: int, defines: Defines) -> None:
    compiled = machine_code(PACKED_SOURCE, defines, sm)
    assert spilled(compiled) == []
    assert compiled.ptx.count("mma.sync") >= 8
