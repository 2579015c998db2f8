"""MiniMax-M2: experts in every layer, queries and keys normed over all heads, a part of each of which is rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from headwise.errors import ModelError
from headwise.runtime.models.deepseek_routing import RoutedFields, ungrouped_moe
from headwise.runtime.models.grouped_moe import GroupedMoeDecoder
from headwise.runtime.models.hf_config import HfConfig, check_served, decoder_config, positive, rope, split_share
from headwise.runtime.models.mixtral import Mixtral
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.models.rope import pairs_first
from headwise.runtime.models.values import shown
from headwise.runtime.models.weight_view import ExpertWeights, rotated
from headwise.runtime.models.weights import Weights
from headwise.runtime.models.whole_norms import WholeNormDecoder

ARCHITECTURE = "MiniMaxM2ForCausalLM"

_SERVED_VALUES: dict[str, tuple[Any, ...]] = {
    "use_qk_norm": (None, True),
    "qk_norm_type": (None, "per_layer"),
    "use_routing_bias": (None, True),
    "shared_intermediate_size": (None, 0),
}
_DEFAULTS = {"head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 1536}
"""Those of Hugging Face's ``MiniMaxM2Config``."""
_THETA = 5e6
_FIELDS = RoutedFields(experts="num_local_experts", size="intermediate_size")


def parse(config: HfConfig) -> ModelConfig:
    check_served(config, _SERVED_VALUES)
    own = {**_DEFAULTS, **config}
    kinds = own.get("attn_type_list")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != 1 for kind in kinds)):
        raise ModelError(
            f"config.json: 'attn_type_list' is {shown(kinds)}; {ARCHITECTURE} is served with attention (1) in every "
            "layer"
        )
    if own.get("rotary_dim") is not None:
        own.setdefault("partial_rotary_factor", positive(own, "rotary_dim") / positive(own, "head_dim"))
    plain, share = split_share(own, default=1.0)

    def layer_rope(kind: str) -> RopeConfig:
        return replace(rope(plain, default_theta=_THETA), share=share)

    decoder = decoder_config(plain, ARCHITECTURE, ropes=layer_rope)
    moe = ungrouped_moe({**own, "norm_topk_prob": True}, decoder.num_layers, _FIELDS)
    return replace(decoder, moe=moe)


class MiniMaxM2(WholeNormDecoder, GroupedMoeDecoder):
    mlp_name: ClassVar[str] = Mixtral.mlp_name
    mlp_parts: ClassVar[tuple[str, str, str]] = Mixtral.mlp_parts
    correction_name: ClassVar[str] = "e_score_correction_bias"

    def view(self, weights: Weights) -> Weights:
        return rotated(ExpertWeights(weights), pairs_first(self.config.ropes[0], self.config.head_dim))
