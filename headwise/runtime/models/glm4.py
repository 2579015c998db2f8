"""GLM-4, of which half of each head is rotated, and GLM-4.5 to 4.7, with experts. GLM-4.7-Flash has latents.

Solar Open is of the same kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.deepseek import parse_latents
from headwise.runtime.models.deepseek_routing import ungrouped_moe
from headwise.runtime.models.drafting import BEHIND_THE_LAST, DraftingNames
from headwise.runtime.models.grouped_moe import GroupedMoeDecoder
from headwise.runtime.models.hf_config import HfConfig, decoder_config, flag, positive, rope, split_share
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.phi3 import fused_mlp
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.models.qwen import Qwen3
from headwise.runtime.models.rope import pairs_first
from headwise.runtime.models.weight_view import ExpertWeights, FusedWeights, rotated
from headwise.runtime.models.weights import Weights

GLM, GLM4, MOE, LITE = "GlmForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"
SOLAR = "SolarOpenForCausalLM"

_DENSE_DEFAULTS = {"rms_norm_eps": 1.5625e-7, "head_dim": 128, "attention_bias": True}
_MOE_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_SOLAR_DEFAULTS = {
    **_MOE_DEFAULTS,
    "moe_intermediate_size": 1280,
    "head_dim": 128,
    "rope_theta": 1e6,
}
_LITE_DEFAULTS = {
    **_MOE_DEFAULTS,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
}
"""Those of Hugging Face's configs."""


@dataclass(frozen=True)
class GlmMoeConfig(ModelConfig):
    """has_qk_norm: queries and keys are normed per head"""

    has_qk_norm: bool = False


def parse_glm(config: HfConfig) -> ModelConfig:
    return _parse({**_DENSE_DEFAULTS, **config}, GLM)


def parse_glm4(config: HfConfig) -> ModelConfig:
    return _parse({**_DENSE_DEFAULTS, **config}, GLM4)


def parse_moe(config: HfConfig) -> GlmMoeConfig:
    own = {**_MOE_DEFAULTS, **config}
    return _with_experts(_parse(own, MOE), own)


def parse_solar(config: HfConfig) -> GlmMoeConfig:
    """Solar Open: experts in every layer, and whole heads rotated."""
    own = {**_SOLAR_DEFAULTS, **config, "first_k_dense_replace": 0, "use_qk_norm": False}
    own["intermediate_size"] = positive(own, "moe_intermediate_size")  # no layer has a dense MLP
    return _with_experts(_parse(own, SOLAR, share=1.0), own)


def _with_experts(decoder: ModelConfig, config: HfConfig) -> GlmMoeConfig:
    moe = ungrouped_moe(config, decoder.num_layers)
    return GlmMoeConfig(**{**vars(decoder), "moe": moe, "has_qk_norm": flag(config, "use_qk_norm")})


def parse_lite(config: HfConfig) -> ModelConfig:
    return parse_latents({**_LITE_DEFAULTS, **config}, LITE, ungrouped_moe)


def _parse(config: HfConfig, architecture: str, share: float = 0.5) -> ModelConfig:
    own, share = split_share(config, default=share)

    def layer_rope(kind: str) -> RopeConfig:
        return replace(rope(own), share=share)

    return decoder_config(own, architecture, ropes=layer_rope, out_bias=False)


class Glm(Decoder):
    """The shared decoder over a fused MLP. Neighbours of a head are rotated."""

    def view(self, weights: Weights) -> Weights:
        order = pairs_first(self.config.ropes[0], self.config.head_dim, of_neighbours=True)
        return rotated(FusedWeights(weights, fused_mlp(self.config)), order)


class Glm4(Glm):
    """The same with norms of what attention and MLP add, too."""

    norm_names: ClassVar[Mapping[str, str]] = {
        **Decoder.norm_names,
        "after_attention": "post_self_attn_layernorm",
        "after_mlp": "post_mlp_layernorm",
    }


class Glm4Moe(GroupedMoeDecoder):
    """Routed and shared experts for the MLP in most layers. Halves of what is rotated turn with one another."""

    config: GlmMoeConfig
    drafting_names: ClassVar[DraftingNames | None] = BEHIND_THE_LAST

    def view(self, weights: Weights) -> Weights:
        return rotated(ExpertWeights(weights), pairs_first(self.config.ropes[0], self.config.head_dim))

    def norms_of(self, layer: int) -> Mapping[str, str]:
        return Qwen3.norm_names if self.config.has_qk_norm else Decoder.norm_names
