"""Gemma 3 (text): alternating sliding and full layers, normed queries and keys, norms around attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from headwise.runtime.models.gemma2 import Gemma2, gemma_fields
from headwise.runtime.models.hf_config import (
    HfConfig,
    decoder_config,
    mapping,
    named_layer_types,
    number,
    positive,
    rope,
)
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.position_config import RopeConfig

_WITH_IMAGES = "Gemma3ForConditionalGeneration"

_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
"""Those of Hugging Face's ``Gemma3TextConfig``: the published multimodal models leave these fields out."""


def parse(config: HfConfig) -> ModelConfig:
    text = {**_DEFAULTS, **config, **mapping(config, "text_config")}
    pattern = positive(text, "sliding_window_pattern", default=6)

    def layer_type(layer: int) -> str:
        return "sliding_attention" if (layer + 1) % pattern else "full_attention"

    def layer_rope(kind: str) -> RopeConfig:
        if kind == "sliding_attention" and not text.get("rope_parameters"):
            return RopeConfig(number(text, "rope_local_base_freq", 10000.0))
        return rope(text, kind, default_theta=10000.0 if kind == "sliding_attention" else 1000000.0)

    decoder = decoder_config(
        text,
        "Gemma3ForCausalLM",
        layer_types=named_layer_types(text, layer_type),
        ropes=layer_rope,
        window=positive(text, "sliding_window", default=4096),
        **gemma_fields(text),
    )
    has_images = _WITH_IMAGES in config.get("architectures", ())
    return replace(decoder, both_ways=(has_images,) * decoder.num_layers)


class Gemma3(Gemma2):
    norm_names: ClassVar[Mapping[str, str]] = {
        **Gemma2.norm_names,
        "query": "self_attn.q_norm",
        "key": "self_attn.k_norm",
    }
