"""Hunyuan 4 (HY V4): DeepSeek-V3.2's attention with gated heads and sinks, over hyper-connections.

An indexer's heads turn with their last elements; it and latents turn the elements ``(i, i + D / 2)``. Routed experts
limit what their activation is given, dense MLPs and shared experts do not.

Tensor parallel: as DeepSeek-V3.2; hyper-connections are whole on every rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.experts import Mixture
from headwise.runtime.models.deepseek import LatentProjections
from headwise.runtime.models.deepseek_v32 import DeepseekV32, IndexedProjections
from headwise.runtime.models.drafting import DraftingNames
from headwise.runtime.models.hy_v4_config import ARCHITECTURE, HyV4Config, parse
from headwise.runtime.models.hyper import HyperConnections
from headwise.runtime.models.hyper_decoder import HyperDecoder
from headwise.runtime.models.identity_hyper import IdentityConnections
from headwise.runtime.models.layers import DenseMlp, Layer, Linear
from headwise.runtime.models.moe import MoeMlp
from headwise.runtime.models.moe_config import MoeConfig
from headwise.runtime.models.weight_view import ExpertWeights, RenamedWeights
from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.base import Tensor

__all__ = ["ARCHITECTURE", "HyV4", "parse"]

_NAMES = (
    (r"\.hc_pre\.hc_", ".hc_"),
    (r"\.learnable_sink_param$", ".sinks"),
    (r"\.linear_gate\.", ".gate_proj."),
    (r"\.hc_attn_layer\.hc_", ".attn_hc."),
    (r"\.hc_mlp_layer\.hc_", ".ffn_hc."),
    (r"\.hc_head\.hc_head_", ".hc_head.hc_"),
)
"""Of published checkpoints, and ours, which are Hugging Face's classes'."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class GatedLatents(LatentProjections):
    """The same with what makes the gates of this rank's heads, one for each number of a head's values."""

    gate: Linear = field(kw_only=True)


@dataclass(frozen=True)
class GatedIndexed(IndexedProjections):
    """Likewise."""

    gate: Linear = field(kw_only=True)


@dataclass(frozen=True)
class SharedBeside:
    """Routed experts, and one MLP that all tokens go through besides, by another activation."""

    routed: MoeMlp
    shared: DenseMlp


class HyV4(HyperDecoder, DeepseekV32):
    config: HyV4Config
    connections_kind: ClassVar[type[HyperConnections]] = IdentityConnections
    drafting_names: ClassVar[DraftingNames | None] = None

    # ---- weights ----

    def view(self, weights: Weights) -> Weights:
        return ExpertWeights(RenamedWeights(weights, {name: _renamed(name) for name in weights.names}))

    @property
    def key_norm_eps(self) -> float:
        return self.config.rms_norm_eps

    def index_order(self) -> NDArray[np.int64]:
        """What turns comes first, as kernels have it: a head's elements are the same numbers in any order."""
        dim, rotated = self.indexer.head_dim, self.mla.rotated
        return np.concatenate([np.arange(dim - rotated, dim), np.arange(dim - rotated)])

    def load_attention(self, layer: int, at: str) -> LatentProjections:
        found, (first, last), size = super().load_attention(layer, at), self._heads(), self.mla.value_dim
        gate = self._split_rows([(f"{at}gate_proj", [(first * size, last * size)])], has_bias=False)
        kind = GatedIndexed if isinstance(found, IndexedProjections) else GatedLatents
        return kind(**vars(found), gate=gate)

    def load_mlp(self, layer: int, at: str) -> Any:
        made, moe = super().load_mlp(layer, at), self.config.moe
        if not isinstance(made, MoeMlp) or moe is None or not moe.shared_size:
            return made
        return SharedBeside(made, self.dense_mlp(f"{at}{self.shared_name}.", moe.shared_size, moe.shared_parts))

    def _shared(self, at: str, moe: MoeConfig) -> DenseMlp | None:
        return None  # it is beside them

    def mixture(self, moe: MoeConfig, correction: Floats | None) -> Mixture:
        return Mixture(moe.routing, "limited_silu", correction)

    # ---- computation ----

    def gated(self, layer: Layer, x: Tensor, heads: Tensor, wanted: NDArray[np.int64] | None) -> Tensor:
        if not heads.shape[0]:
            return heads
        gates = self._linear(x if wanted is None else self.ops.take_rows(x, wanted), layer.attention.gate)
        return self.ops.sigmoid_mul(heads.reshape(gates.shape), gates)

    def feed_forward(self, mlp: Any, x: Tensor) -> Tensor:
        if not isinstance(mlp, SharedBeside):
            return super().feed_forward(mlp, x)
        return super().feed_forward(mlp.routed, x) + super().feed_forward(mlp.shared, x)


def _renamed(name: str) -> str:
    for pattern, ours in _NAMES:
        name = re.sub(pattern, ours, name)
    return name
