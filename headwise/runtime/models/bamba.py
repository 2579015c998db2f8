"""Bamba: state space models (Mamba-2) in most layers, attention that rotates half of each head in the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.hf_config import HfConfig, decoder_config, layer_list, rope, split_share
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.models.rope import pairs_first
from headwise.runtime.models.state_space import (
    MAMBA_FIELDS,
    StateSpaceDecoder,
    ssm_config,
    with_head_dim,
    with_states,
)
from headwise.runtime.models.weight_view import rotated
from headwise.runtime.models.weights import Weights

ARCHITECTURE = "BambaForCausalLM"

_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 262144}
"""Those of Hugging Face's ``BambaConfig``."""


def parse(config: HfConfig) -> ModelConfig:
    own, share = split_share({**_DEFAULTS, **config}, default=0.5)

    def layer_rope(kind: str) -> RopeConfig:
        return replace(rope(own), share=share)

    decoder = decoder_config(own, ARCHITECTURE, ropes=layer_rope, out_bias=False)
    attended = layer_list(own, "attn_layer_indices", decoder.num_layers) or []
    layers = [layer for layer in range(decoder.num_layers) if layer not in attended]
    if not layers:
        return decoder
    ssm = ssm_config(with_head_dim(own), MAMBA_FIELDS, layers, has_group_norms=False, eps=decoder.rms_norm_eps)
    return with_states(decoder, ssm)


class Bamba(StateSpaceDecoder):
    """Its layers and norms have names of their own."""

    mlp_name: ClassVar[str] = "feed_forward"
    norm_names: ClassVar[Mapping[str, str]] = {**Decoder.norm_names, "before_mlp": "pre_ff_layernorm"}
    final_norm_name: ClassVar[str] = "final_layernorm"

    def view(self, weights: Weights) -> Weights:
        return rotated(weights, pairs_first(self.config.ropes[0], self.config.head_dim))
