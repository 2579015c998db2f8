"""Phi-3, 3.5 and 4: Llama, with fused projections and LongRoPE; in Phi-4-mini only a part of each head is rotated."""

from __future__ import annotations

from dataclasses import replace

from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.hf_config import HfConfig, decoder_config, mapping, rope, split_share
from headwise.runtime.models.mistral import window_everywhere
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.models.rope import pairs_first
from headwise.runtime.models.weight_view import FusedWeights, rotated
from headwise.runtime.models.weights import Weights

ARCHITECTURE = "Phi3ForCausalLM"

_ROPE_FIELDS = ("rope_scaling", "rope_parameters")


def parse(config: HfConfig) -> ModelConfig:
    renamed = {key: _rope_fields(config, key) for key in _ROPE_FIELDS}
    own, share = split_share({"rms_norm_eps": 1e-5, **config, **renamed}, default=1.0)

    def layer_rope(kind: str) -> RopeConfig:
        return replace(rope(own), share=share)

    return decoder_config(own, ARCHITECTURE, ropes=layer_rope, **window_everywhere(own))


def _rope_fields(config: HfConfig, key: str) -> HfConfig:
    """A mapping of the rotary embedding's fields. Older checkpoints call LongRoPE "su", the oldest "yarn"."""
    fields = mapping(config, key)
    renamed = {name: "longrope" for name in ("rope_type", "type") if fields.get(name) == "yarn"}
    return {**fields, **renamed}


class Phi3(Decoder):
    """The shared decoder over a checkpoint's fused projections.

    ``qkv_proj`` has the rows of queries, keys and values one below the other, ``gate_up_proj`` those of gate and up.
    """

    def view(self, weights: Weights) -> Weights:
        config = self.config
        q, kv = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
        at = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", q), "v_proj": ("qkv_proj", q + kv)}
        parts = FusedWeights(weights, {**at, **fused_mlp(config)})
        return rotated(parts, pairs_first(config.ropes[0], config.head_dim))


def fused_mlp(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """Of `FusedWeights`: gate above up."""
    return {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", config.intermediate_size)}
