"""GGUF's gpt-oss, and ERNIE 4.5 with and without experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.errors import ModelError
from headwise.runtime.loader.gguf_architecture import (
    ATTENTION,
    LAYER_NAMES,
    LLAMA_NAMES,
    SHARED_EXPERT,
    Architecture,
    as_llama,
    experts_at,
    feed_forward,
)
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import count, integer, rope_scaling, theta
from headwise.runtime.loader.gguf_routing import CORRECTION, corrected_feed_forward
from headwise.runtime.models.model_config import ModelConfig


def _gpt_oss(source: GgufFile) -> dict[str, Any]:
    scaling = rope_scaling(source, "gpt-oss")
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "intermediate_size": integer(source, "gpt-oss.expert_feed_forward_length"),
        "num_local_experts": integer(source, "gpt-oss.expert_count"),
        "num_experts_per_tok": integer(source, "gpt-oss.expert_used_count"),
        "sliding_window": integer(source, "gpt-oss.attention.sliding_window"),
        "rope_theta": theta(source, "gpt-oss"),
        # As published; GGUF does not say that the ramp between frequencies begins and ends between two pairs.
        "rope_scaling": None if scaling is None else {**scaling, "truncate": False},
    }


def _needs_gpt_oss(config: ModelConfig, layer: int) -> tuple[str, ...]:
    weights = (*ATTENTION, "post_attention_norm", *feed_forward(config, layer), "attn_sinks.weight")
    biased = ("attn_q", "attn_k", "attn_v", "attn_output", *feed_forward(config, layer))
    return (*weights, *(f"{name}.bias" for name in biased))


def _ernie(source: GgufFile) -> dict[str, Any]:
    return _of_ernie(source, "ernie4_5", "Ernie4_5ForCausalLM")


def _of_ernie(source: GgufFile, name: str, architecture: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "ernie4_5",
        "hidden_act": "silu",
        "rope_theta": theta(source, name, 500_000.0),
        "rope_scaling": rope_scaling(source, name),
        "use_bias": False,
    }


def _ernie_moe(source: GgufFile) -> dict[str, Any]:
    name = "ernie4_5-moe"
    size, shared = integer(source, f"{name}.expert_feed_forward_length"), count(source, f"{name}.expert_shared_count")
    layers = integer(source, f"{name}.block_count")
    having = [layer for layer in range(layers) if f"blk.{layer}.ffn_gate_inp.weight" in source.tensors]
    if not having:
        raise ModelError(f"{source.path} lacks the tensor 'blk.{layers - 1}.ffn_gate_inp.weight'; download it again")
    return {
        **_of_ernie(source, name, "Ernie4_5_MoeForCausalLM"),
        "model_type": "ernie4_5_moe",
        "moe_num_experts": integer(source, f"{name}.expert_count"),
        "moe_k": integer(source, f"{name}.expert_used_count"),
        "moe_intermediate_size": size,
        "moe_num_shared_experts": shared,
        "moe_layer_start_index": count(source, f"{name}.leading_dense_block_count"),
        "moe_layer_end_index": having[-1],
        "moe_layer_interval": integer(source, f"{name}.interleave_moe_layer_step", 1),
    }


def _needs_ernie_moe(config: ModelConfig, layer: int) -> tuple[str, ...]:
    return (*ATTENTION, "ffn_norm", *corrected_feed_forward(config, layer))


WITH_EXPERTS: Mapping[str, Architecture] = {
    "gpt-oss": Architecture(
        _gpt_oss,
        {
            **LAYER_NAMES,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
            "attn_sinks.weight": "self_attn.sinks",
        },
        _needs_gpt_oss,
        experts=experts_at("mlp.experts"),
    ),
    "ernie4_5": Architecture(_ernie, LLAMA_NAMES, as_llama),
    "ernie4_5-moe": Architecture(
        _ernie_moe,
        {
            **LLAMA_NAMES,
            **SHARED_EXPERT,
            "ffn_gate_inp": "mlp.gate",
            CORRECTION: "mlp.moe_statics.e_score_correction_bias",
        },
        _needs_ernie_moe,
        experts=experts_at("mlp.experts"),
    ),
}
