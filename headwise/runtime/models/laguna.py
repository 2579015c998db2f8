"""Laguna: windows in most layers, which have query heads and a rotation of their own; gates, DeepSeek-V3's routing.

What a head has seen is multiplied with softplus of its gate, or of each of its numbers'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.kernels.fused import Attention
from headwise.runtime.models.deepseek_routing import RoutedFields, ungrouped_moe
from headwise.runtime.models.gated_heads import GatedHeadsDecoder
from headwise.runtime.models.grouped_moe import GroupedMoeDecoder
from headwise.runtime.models.hf_config import (
    MOST_HEADS,
    HfConfig,
    check_served,
    decoder_config,
    mapping,
    named_layer_types,
    positive,
    rope,
    split_share,
)
from headwise.runtime.models.layers import Layer
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.models.rope import pairs_first
from headwise.runtime.models.values import shown
from headwise.runtime.models.weight_view import ExpertWeights, RenamedWeights, RotatedByLayer
from headwise.runtime.models.weights import Weights
from headwise.runtime.models.windows import FULL, SLIDING
from headwise.runtime.ops.base import KernelArray, Tensor

ARCHITECTURE = "LagunaForCausalLM"

_SERVED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "gating": (None, True, "per-head", "per-element"),
    "moe_apply_router_weight_on_input": (None, False),
    "moe_router_logit_softcapping": (None, 0),
    "norm_topk_prob": (None, True),
    "decoder_sparse_step": (None, 1),
    "swa_rope_parameters": (None,),
}
_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "first_k_dense_replace": 1,
}
"""Those of Hugging Face's ``LagunaConfig``."""
_ROTATIONS = {FULL: (5e5, 0.5), SLIDING: (1e4, 1.0)}
"""Its thetas, and the shares of a head's elements that turn."""
_FIELDS = RoutedFields("num_experts", scale="moe_routed_scaling_factor")


@dataclass(frozen=True)
class LagunaConfig(ModelConfig):
    """gates_heads: whether a head has one gate; else each of its numbers has"""

    gates_heads: bool = True

    @property
    def side_elements(self) -> int:
        """See `ModelConfig.side_elements`: of heads' gates."""
        heads = sum(map(self.query_heads_of, range(self.num_layers)))
        return self.hidden_size * heads * (1 if self.gates_heads else self.head_dim)


def parse(config: HfConfig) -> LagunaConfig:
    check_served(config, _SERVED_VALUES)
    own = {**_DEFAULTS, **config}
    plain, _ = split_share({**own, "rope_parameters": None}, default=1.0)
    decoder = decoder_config(
        plain,
        ARCHITECTURE,
        layer_types=named_layer_types(own, lambda layer: FULL),
        ropes=lambda kind: _rope(own, kind),
        window=positive(own, "sliding_window", default=512),
    )
    moe = ungrouped_moe({**own, "n_shared_experts": 1}, decoder.num_layers, _FIELDS)
    shared = positive(own, "shared_expert_intermediate_size")
    fields = {
        **vars(decoder),
        **_query_heads(own, decoder),
        "moe": replace(moe, shared_expert_size=shared) if moe.layers else None,
        "gates_heads": own.get("gating") != "per-element",
    }
    return LagunaConfig(**fields)


def _query_heads(config: HfConfig, decoder: ModelConfig) -> dict[str, Any]:
    """Fields of a `ModelConfig`: of each layer as they are named; alike where that is missing."""
    key, layers, kv_heads = "num_attention_heads_per_layer", decoder.num_layers, decoder.num_kv_heads
    found = config.get(key)
    if found is None:
        return {}
    if not isinstance(found, list) or len(found) != layers:
        raise ModelError(f"config.json: {key!r} must have a number for each of {layers} layers, got {shown(found)}")
    counts = tuple(positive({key: count}, key, most=MOST_HEADS) for count in found)
    odd = next((count for count in counts if count % kv_heads), None)
    if odd is not None:
        raise ModelError(
            f"config.json: {key!r} has {odd} attention heads, which cannot share {kv_heads} key-value heads evenly"
        )
    return {"num_heads": min(counts), "query_heads": counts if len({*counts}) > 1 else ()}


def _rope(config: HfConfig, kind: str) -> RopeConfig:
    parameters, (theta, share) = mapping(config, "rope_parameters"), _ROTATIONS[kind]
    if not parameters:
        return RopeConfig(theta, share=share)
    if kind not in parameters:
        raise ModelError(
            f"config.json: 'rope_parameters' must have those of each kind of layer, {kind!r} too, got "
            f"{shown(parameters)}"
        )
    plain, share = split_share({**config, "rope_parameters": mapping(parameters, kind)}, default=1.0)
    return replace(rope(plain, default_theta=theta), share=share)


class Laguna(GatedHeadsDecoder, GroupedMoeDecoder):
    config: LagunaConfig
    gate_name: ClassVar[str] = "g_proj"
    norm_names: ClassVar[Mapping[str, str]] = {
        **GroupedMoeDecoder.norm_names,
        "query": "self_attn.q_norm",
        "key": "self_attn.k_norm",
    }

    def view(self, weights: Weights) -> Weights:
        config, named = self.config, {name: _renamed(name) for name in weights.names}
        orders = [pairs_first(turning, config.head_dim) for turning in config.ropes]
        return RotatedByLayer(ExpertWeights(RenamedWeights(weights, named)), orders)

    def gate_size(self, layer: int) -> int:
        return 1 if self.config.gates_heads else super().gate_size(layer)

    def fusible_attention(self, index: int, attention: Any) -> Attention | None:
        return None  # gates of fused layers are sigmoids, one for each number

    def gated(self, layer: Layer, x: Tensor, heads: Tensor, wanted: NDArray[np.int64] | None) -> Tensor:
        if not heads.shape[0]:
            return heads
        gates = self._linear(x if wanted is None else self.ops.take_rows(x, wanted), layer.attention.gate)
        seen = self.ops.kernel_array(heads)
        factors = _softplus(self.ops.kernel_array(gates)).reshape(*seen.shape[:2], -1)
        return self.ops.from_kernel_array((seen * factors).astype(seen.dtype, copy=False))


def _renamed(name: str) -> str:
    """Published checkpoints' names, or as they are."""
    name = name.replace(".mlp.experts.e_score_correction_bias", ".mlp.gate.e_score_correction_bias")
    return name.replace(".mlp.shared_expert.", ".mlp.shared_experts.")


def _softplus(x: KernelArray) -> KernelArray:
    """``log(1 + exp(x))``, float32, without overflow."""
    wide = x.astype(np.float32, copy=False)
    found: KernelArray = np.maximum(wide, np.float32(0)) + np.log1p(np.exp(-np.abs(wide)))
    return found
