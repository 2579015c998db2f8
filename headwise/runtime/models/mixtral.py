"""Mixtral: Mistral, with a mixture of experts for the MLP in every layer."""

from __future__ import annotations

from typing import ClassVar

from headwise.runtime.models.hf_config import HfConfig, decoder_config, rope
from headwise.runtime.models.mistral import window_everywhere
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.moe_decoder import MoeDecoder, local_experts

ARCHITECTURE = "MixtralForCausalLM"

_THETA = 1e6
"""Default of Hugging Face's ``MixtralConfig``."""


def parse(config: HfConfig) -> ModelConfig:
    decoder = decoder_config(
        {"rms_norm_eps": 1e-5, **config},
        ARCHITECTURE,
        ropes=lambda kind: rope(config, default_theta=_THETA),
        **window_everywhere(config),
    )
    return local_experts(config, decoder, experts=8, per_token=2)


class Mixtral(MoeDecoder):
    mlp_name: ClassVar[str] = "block_sparse_moe"
    mlp_parts: ClassVar[tuple[str, str, str]] = ("w1", "w3", "w2")
