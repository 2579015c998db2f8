"""AFMoE (Arcee's Trinity): gated heads, three of four of whose layers have windows; the others rotate nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from headwise.runtime.models.deepseek_routing import RoutedFields, ungrouped_moe
from headwise.runtime.models.gated_heads import GatedHeadsDecoder
from headwise.runtime.models.grouped_moe import GroupedMoeDecoder
from headwise.runtime.models.hf_config import (
    HfConfig,
    check_served,
    decoder_config,
    flag,
    positive,
)
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.weight_view import ExpertWeights
from headwise.runtime.models.weights import Weights
from headwise.runtime.models.windows import full_every, rotated_in_windows

ARCHITECTURE = "AfmoeForCausalLM"

_SERVED_VALUES = {"score_func": (None, "sigmoid"), "route_norm": (None, True), "n_group": (None, 1)}
_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "num_shared_experts": 2,
    "num_dense_layers": 1,
}
"""Those of Hugging Face's ``AfmoeConfig``."""
_FIELDS = RoutedFields("num_experts", shared="num_shared_experts", dense="num_dense_layers", scale="route_scale")


@dataclass(frozen=True)
class AfmoeConfig(ModelConfig):
    """scales_embedding: by the root of the hidden size (muP)"""

    scales_embedding: bool = False


def parse(config: HfConfig) -> AfmoeConfig:
    check_served(config, _SERVED_VALUES)
    own = {**_DEFAULTS, **config}
    decoder = decoder_config(
        own,
        ARCHITECTURE,
        layer_types=full_every(own, positive(own, "global_attn_every_n_layers", default=4)),
        ropes=rotated_in_windows(own),
        window=positive(own, "sliding_window", default=1024),
    )
    moe = ungrouped_moe(own, decoder.num_layers, _FIELDS)
    return AfmoeConfig(**{**vars(decoder), "moe": moe, "scales_embedding": flag(own, "mup_enabled")})


class Afmoe(GatedHeadsDecoder, GroupedMoeDecoder):
    config: AfmoeConfig
    norm_names: ClassVar[Mapping[str, str]] = {
        "before_attention": "input_layernorm",
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_mlp_layernorm",
        "after_mlp": "post_mlp_layernorm",
        "query": "self_attn.q_norm",
        "key": "self_attn.k_norm",
    }
    gate_name: ClassVar[str] = "gate_proj"
    router_name: ClassVar[str] = "router.gate"
    correction_name: ClassVar[str] = "expert_bias"

    def view(self, weights: Weights) -> Weights:
        return ExpertWeights(weights)

    @property
    def embedding_scale(self) -> float:
        return float(self.config.hidden_size**0.5) if self.config.scales_embedding else 1.0
