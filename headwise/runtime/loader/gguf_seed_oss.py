"""GGUF's Seed-OSS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.runtime.loader.gguf_architecture import ATTENTION, DENSE, LAYER_NAMES, Architecture
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_rope import whole_rope
from headwise.runtime.models.model_config import ModelConfig


def _seed_oss(source: GgufFile) -> dict[str, Any]:
    return {
        "architectures": ["SeedOssForCausalLM"],
        "model_type": "seed_oss",
        "hidden_act": "silu",
        "attention_out_bias": "blk.0.attn_output.bias" in source.tensors,
        **whole_rope(source, "seed_oss"),
    }


def _needed(config: ModelConfig, layer: int) -> tuple[str, ...]:
    return (*ATTENTION, "post_attention_norm", *DENSE)


SEED_OSS: Mapping[str, Architecture] = {
    "seed_oss": Architecture(_seed_oss, {**LAYER_NAMES, "post_attention_norm": "post_attention_layernorm"}, _needed)
}
