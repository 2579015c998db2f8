"""The kernels that `machine_code.py --served` looks at: attention's all, of experts and states what is common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from headwise.kernels.cuda import delta, experts, kda, ssm
from headwise.kernels.cuda.attention import (
    HEAD_DIMS,
    OLDEST_SM_E4M3,
    AttentionShape,
    every_variant_of,
    variant_of_ranks,
    variants_of,
)
from headwise.kernels.cuda.compressed_model import CompressedModel
from headwise.kernels.cuda.delta import DeltaShape
from headwise.kernels.cuda.experts import ExpertShape
from headwise.kernels.cuda.kda import KdaShape
from headwise.kernels.cuda.launch import Variant
from headwise.kernels.cuda.mla import LatentShape, variants_of_ranks
from headwise.kernels.cuda.packed import form_of
from headwise.kernels.cuda.ssm import SsmShape
from headwise.kernels.experts import Routing
from headwise.kernels.state_layout import StateSizes

CARDS = (80, 90, 100)
KERNELS = ("prefill", "decode")
"""Names of `variants_of`."""
TMA = "prefill by TMA"
JOINT = ("prefix of a group", "decode behind it")
"""What `every_variant_of` has besides."""
JOINT_DIMS = (64, 128, 256)

ERNIE_21B = ExpertShape(Routing(64, 6, 1e-12), 2, 2560, 1536, "silu", "bfloat16")
QWEN3_30B = ExpertShape(Routing(128, 8, None), 0, 2048, 768, "silu", "bfloat16")
NEMOTRON_3_NANO = ExpertShape(Routing(128, 6, 1e-20, "sigmoid", scale=2.5), 2, 2688, 1856, "relu2", "bfloat16")
"""Without gates."""
DEEPSEEK_V3 = LatentShape(128, 512, 64, 16, "bfloat16", "bfloat16")
"""Of eight ranks."""
DEEPSEEK_V4 = CompressedModel(
    64, 512, 64, "bfloat16", "bfloat16", 32, (4, 128), indexed=4, index_heads=64, index_dim=128
)
QWEN3_NEXT = DeltaShape(16, StateSizes(128, 128, 2, 4), 64, "bfloat16")
KIMI_LINEAR = KdaShape(32, StateSizes(128, 128, 1, 4), 128, "bfloat16", 32 * 385 + 256)
NEMOTRON_3_NANO_STATES = SsmShape(16, 8, StateSizes(128, 64, 4, 4), 64, "bfloat16")


@dataclass(frozen=True)
class Served:
    """A kernel and the card that it runs on.

    size:    of heads, or the sizes of experts and of what has states
    numbers: dtype of the cache, or of weights
    """

    sm: int
    size: int | str
    numbers: str
    kernel: str

    @property
    def variant(self) -> Variant:
        return _of_card(self.sm)[self]


def served(cards: Sequence[int]) -> list[Served]:
    """All of ``cards``. The slowest to compile come first."""
    every = [kernel for sm in cards for kernel in _of_card(sm)]
    return sorted(every, key=lambda kernel: -kernel.size if isinstance(kernel.size, int) else -128)


@cache
def _of_card(sm: int) -> dict[Served, Variant]:
    states = *_delta_nets(sm), *_ssms(sm), *_kdas(sm)
    return dict([*_attention(sm), *_experts(sm), *states, *_together(sm), *_entries(sm)])


SMALLER_VALUES = {192: 128}
"""Of heads whose values are smaller than their keys in the models that have them (MiMo-V2-Flash)."""


def _attention(sm: int) -> Iterator[tuple[Served, Variant]]:
    for head_dim in HEAD_DIMS:
        for kv_dtype in ("bfloat16", "int8", "float8_e4m3fn", "int4"):
            if sm < OLDEST_SM_E4M3 and kv_dtype == "float8_e4m3fn":
                continue
            value = SMALLER_VALUES.get(head_dim, 0)
            shape = AttentionShape(8 if head_dim > 256 else 4, head_dim, 64, "bfloat16", kv_dtype, smaller_value=value)
            for name, variant in zip(KERNELS, variants_of(shape, sm), strict=True):
                yield Served(sm, head_dim, kv_dtype, name), variant
            if head_dim in JOINT_DIMS:
                for name, variant in zip(JOINT, every_variant_of(shape, sm)[2:], strict=False):
                    yield Served(sm, head_dim, kv_dtype, name), variant
            by_tma = variants_of(shape, sm, tma=True)[0]
            if dict(by_tma.constants)["BULK"]:
                yield Served(sm, head_dim, kv_dtype, TMA), by_tma


def _together(sm: int) -> Iterator[tuple[Served, Variant]]:
    """Decodes over what ranks keep together, of which each has 16 tokens of a block."""
    for kv_dtype in ("bfloat16", "int8"):
        latents = replace(DEEPSEEK_V3, kv_dtype=kv_dtype)
        (decode,) = variants_of_ranks(latents, sm)
        yield Served(sm, f"latents, {latents.heads} heads of ranks", kv_dtype, KERNELS[1]), decode
        for head_dim in (64, 128, 256):
            heads = AttentionShape(8, head_dim, 16, "bfloat16", kv_dtype)
            yield Served(sm, f"{head_dim}, 8 heads of ranks", kv_dtype, KERNELS[1]), variant_of_ranks(heads, sm)


def _entries(sm: int) -> Iterator[tuple[Served, Variant]]:
    """Attention to entries of several tokens, of each kind, and an indexer's scores of them."""
    for kv_dtype in ("bfloat16", "int8", *(["float8_e4m3fn"] if sm >= OLDEST_SM_E4M3 else [])):
        for variant in replace(DEEPSEEK_V4, kv_dtype=kv_dtype).variants(sm):
            sizes = dict(variant.constants)
            name = "scores"
            if "RATE" in sizes:
                name = f"{'chosen ' * sizes['CHOSEN']}entries of {sizes['RATE']}" if sizes["RATE"] else "window"
            yield Served(sm, f"entries, {DEEPSEEK_V4.heads} heads", kv_dtype, name), variant


def _experts(sm: int) -> Iterator[tuple[Served, Variant]]:
    """Those of codes on one card: `make soak` has the others."""
    mixtures = [("bfloat16", ERNIE_21B), ("bfloat16", NEMOTRON_3_NANO)]
    if sm == 90:
        mixtures += [("fp8", _with_codes(8, is_float=True)), ("int4 with minima", _with_codes(4, has_minimum=True))]
    for numbers, shape in mixtures:
        for variant in experts.variants_of(shape, sm):
            sizes = dict(variant.constants)
            into = "gate and up" if sizes["GATED"] else "up"
            name = f"{sizes['BLOCK_M']} rows, {into if sizes['ACTIVATION'] else 'down'}"
            yield Served(sm, f"experts of {shape.inner}", numbers, name), variant


def _with_codes(bits: int, has_minimum: bool = False, is_float: bool = False) -> ExpertShape:
    """In groups of 128."""
    depths = QWEN3_30B.hidden, QWEN3_30B.inner
    up, down = (form_of("bfloat16", bits, 128, has_minimum, depth, is_float) for depth in depths)
    return replace(QWEN3_30B, up_codes=up, down_codes=down)


def _delta_nets(sm: int) -> Iterator[tuple[Served, Variant]]:
    size = f"delta-net of {QWEN3_NEXT.value_heads} heads"
    for name, variant in delta.variants_of(QWEN3_NEXT, sm).items():
        yield Served(sm, size, QWEN3_NEXT.dtype, name), variant


def _ssms(sm: int) -> Iterator[tuple[Served, Variant]]:
    size = f"state space model of {NEMOTRON_3_NANO_STATES.heads} heads"
    for name, variant in ssm.variants_of(NEMOTRON_3_NANO_STATES, sm).items():
        yield Served(sm, size, NEMOTRON_3_NANO_STATES.dtype, name), variant


def _kdas(sm: int) -> Iterator[tuple[Served, Variant]]:
    size = f"Kimi Delta Attention of {KIMI_LINEAR.heads} heads"
    for name, variant in kda.variants_of(KIMI_LINEAR, sm).items():
        yield Served(sm, size, KIMI_LINEAR.dtype, name), variant
