"""Step-3.5, and the text of Step-3.7: windows in most layers, which have query heads and a rotation of their own.

What a head has seen is multiplied with the sigmoid of a gate of its own. In some layers activations are clipped: those
of routed experts at the limit of `clipped_silu`, those of a shared one, and of dense MLPs, at another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.experts import Mixture, sigmoid
from headwise.kernels.fused import Attention
from headwise.runtime.models.gated_heads import GatedHeadsDecoder
from headwise.runtime.models.grouped_moe import GroupedMoeDecoder
from headwise.runtime.models.layers import DenseMlp, Layer
from headwise.runtime.models.moe import MoeMlp
from headwise.runtime.models.moe_config import MoeConfig
from headwise.runtime.models.rope import pairs_first
from headwise.runtime.models.step3_config import ARCHITECTURE, MULTIMODAL, Step3Config, parse, parse_multimodal
from headwise.runtime.models.weight_view import ExpertWeights, Reader, RenamedWeights, RotatedByLayer
from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.base import Tensor

__all__ = ["ARCHITECTURE", "MULTIMODAL", "Step3", "parse", "parse_multimodal"]

_NAMES = {
    ".moe.gate.weight": ".mlp.gate.weight",
    ".moe.router_bias": ".mlp.gate.e_score_correction_bias",
    ".moe.gate_proj.weight": ".mlp.experts.gate_proj",
    ".moe.up_proj.weight": ".mlp.experts.up_proj",
    ".moe.down_proj.weight": ".mlp.experts.down_proj",
    ".share_expert.": ".mlp.shared_experts.",
}
"""Of published checkpoints, and ours."""


@dataclass(frozen=True)
class ClippedMlp:
    """A dense MLP: of the least of ``silu`` of a gate and ``limit``, and of an up of a magnitude of at most that."""

    mlp: DenseMlp
    limit: float


@dataclass(frozen=True)
class ClippedBeside:
    """Routed experts, and a shared one with a limit of its own."""

    routed: MoeMlp
    shared: ClippedMlp


class _StackedExperts(ExpertWeights):
    """The same, and of a layer's in three tensors ``[E, ...]``."""

    def _joined_expert(self, source: Reader, name: str) -> NDArray[Any] | None:
        match = None if name in self._known else self._EXPERT.fullmatch(name)
        stacked = "" if match is None else f"{match['at']}experts.{match['kind']}_proj"
        joined = "" if match is None else match["at"] + self.joined[0]
        if match is None or stacked not in self._known or joined in self._known:
            return super()._joined_expert(source, name)
        expert = int(match["expert"])
        matrix: NDArray[Any] = source.rows(stacked, expert, expert + 1)[0]
        return matrix


class Step3(GatedHeadsDecoder, GroupedMoeDecoder):
    config: Step3Config
    gate_name: ClassVar[str] = "g_proj"
    norm_offset = 1.0
    norm_names: ClassVar[Mapping[str, str]] = {
        **GroupedMoeDecoder.norm_names,
        "query": "self_attn.q_norm",
        "key": "self_attn.k_norm",
    }

    # ---- weights ----

    def view(self, weights: Weights) -> Weights:
        config, named = self.config, {name: _renamed(name) for name in weights.names}
        orders = [pairs_first(turning, config.head_dim) for turning in config.ropes]
        return RotatedByLayer(_StackedExperts(RenamedWeights(weights, named)), orders)

    def gate_size(self, layer: int) -> int:
        return 1

    def load_mlp(self, layer: int, at: str) -> Any:
        self._loading = layer
        made, limit, moe = super().load_mlp(layer, at), self.config.shared_limits[layer], self.config.moe
        if isinstance(made, DenseMlp):
            return ClippedMlp(made, limit) if limit else made
        if not limit and layer not in self.config.clipped:
            return made
        assert moe is not None, "it has experts"
        shared = self.dense_mlp(f"{at}{self.shared_name}.", moe.shared_size, moe.shared_parts)
        return ClippedBeside(made, ClippedMlp(shared, limit or float(np.inf)))

    def _shared(self, at: str, moe: MoeConfig) -> DenseMlp | None:
        """With routed experts, unless one of both is clipped: then it is beside them."""
        layer = self._loading
        is_beside = self.config.shared_limits[layer] or layer in self.config.clipped
        return None if is_beside else super()._shared(at, moe)

    def mixture(self, moe: MoeConfig, correction: NDArray[np.float32] | None) -> Mixture:
        is_clipped = self._loading in self.config.clipped
        return Mixture(moe.routing, "clipped_silu" if is_clipped else self.activation, correction)

    # ---- computation ----

    def fusible_attention(self, index: int, attention: Any) -> Attention | None:
        return None  # gates of fused layers are one for each number

    def gated(self, layer: Layer, x: Tensor, heads: Tensor, wanted: NDArray[np.int64] | None) -> Tensor:
        if not heads.shape[0]:
            return heads
        gates = self._linear(x if wanted is None else self.ops.take_rows(x, wanted), layer.attention.gate)
        rows, size = heads.shape[0] * heads.shape[1], heads.shape[2]
        return self.ops.sigmoid_mul(heads.reshape([rows, size]), gates.reshape([rows, 1])).reshape(heads.shape)

    def feed_forward(self, mlp: Any, x: Tensor) -> Tensor:
        if isinstance(mlp, ClippedBeside):
            return super().feed_forward(mlp.routed, x) + self._clipped(mlp.shared, x)
        return self._clipped(mlp, x) if isinstance(mlp, ClippedMlp) else super().feed_forward(mlp, x)

    def _clipped(self, clipped: ClippedMlp, x: Tensor) -> Tensor:
        into, ops, limit = clipped.mlp.into, self.ops, np.float32(clipped.limit)
        given = ops.unactivated_linear(x, into.weight, into.bias)
        if self.adapted is not None and into.adapters is not None:
            given = into.adapters.add(given, x, self.adapted)
        both = ops.kernel_array(given)
        half = both.shape[1] // 2
        gate, up = both[:, :half].astype(np.float32), both[:, half:].astype(np.float32)
        activated = np.minimum(gate * sigmoid(gate), limit) * np.clip(up, -limit, limit)
        return self._linear(ops.from_kernel_array(activated.astype(both.dtype, copy=False)), clipped.mlp.down)


def _renamed(name: str) -> str:
    for published, ours in _NAMES.items():
        name = name.replace(published, ours)
    return name
