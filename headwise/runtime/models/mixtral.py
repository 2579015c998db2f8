"""Mixtral: Mistral, with a mixture of experts for the MLP in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from headwise.kernels.experts import NORM_MIN
from headwise.runtime.models.base import ModelConfig, MoeConfig
from headwise.runtime.models.hf_config import HfConfig, decoder_config, positive, rope
from headwise.runtime.models.mistral import window_everywhere
from headwise.runtime.models.moe_decoder import MoeDecoder, check_routing

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
    experts = positive(config, "num_local_experts", default=8)
    per_token = positive(config, "num_experts_per_tok", default=2)
    check_routing(config, {"num_experts_per_tok": per_token}, {"num_local_experts": experts})
    moe = MoeConfig(
        layers=tuple(range(decoder.num_layers)),
        num_experts=experts,
        experts_per_token=per_token,
        expert_size=decoder.intermediate_size,
        num_shared_experts=0,
        norm_min=NORM_MIN,
    )
    return replace(decoder, moe=moe)


class Mixtral(MoeDecoder):
    mlp_name: ClassVar[str] = "block_sparse_moe"
    mlp_parts: ClassVar[tuple[str, str, str]] = ("w1", "w3", "w2")
