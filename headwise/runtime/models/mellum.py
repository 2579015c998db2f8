"""Mellum 2: a Qwen 3 with experts, and windows in most layers, which turn their heads by a rotation of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headwise.runtime.models.deepseek_routing import named_sparse_layers
from headwise.runtime.models.hf_config import (
    MOST_EXPERTS,
    HfConfig,
    decoder_config,
    mapping,
    named_layer_types,
    positive,
    rope,
)
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.models.qwen import Qwen3Moe, moe_config
from headwise.runtime.models.windows import FULL, SLIDING

ARCHITECTURE = "MellumForCausalLM"

_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 896,
    "norm_topk_prob": True,
}
"""Those of Hugging Face's ``MellumConfig``."""
_THETAS = {FULL: 5e5, SLIDING: 1e4}


def parse(config: HfConfig) -> ModelConfig:
    own = {**_DEFAULTS, **config}
    if "num_experts" not in config and config.get("num_local_experts") is not None:  # by either name
        own["num_experts"] = positive(config, "num_local_experts", most=MOST_EXPERTS)

    def layer_rope(kind: str) -> RopeConfig:
        parameters = mapping(mapping(own, "rope_parameters"), kind)
        return rope({**own, "rope_parameters": parameters}, default_theta=_THETAS[kind])

    decoder = decoder_config(
        own,
        ARCHITECTURE,
        layer_types=named_layer_types(own, lambda layer: FULL),
        ropes=layer_rope,
        window=positive(own, "sliding_window", default=1024),
    )
    moe = moe_config({**own, "decoder_sparse_step": 1, "mlp_only_layers": None}, decoder.num_layers)
    return replace(decoder, moe=replace(moe, layers=named_sparse_layers(own, moe.layers, decoder.num_layers)))


class Mellum(Qwen3Moe):
    """As it is."""
