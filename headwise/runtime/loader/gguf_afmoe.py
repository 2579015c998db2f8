"""GGUF's AFMoE: Arcee's Trinity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.errors import ModelError
from headwise.runtime.loader.gguf_architecture import (
    ATTENTION,
    HEAD_NORMS,
    LAYER_NAMES,
    SHARED_EXPERT,
    Architecture,
    experts_at,
)
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import count, integer, layer_types
from headwise.runtime.loader.gguf_rope import whole_rope
from headwise.runtime.loader.gguf_routing import CORRECTION, corrected_feed_forward, sigmoid_routing
from headwise.runtime.models.model_config import ModelConfig

_PATTERN = 4
_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}


def _afmoe(source: GgufFile) -> dict[str, Any]:
    routing = sigmoid_routing(source, "afmoe")
    if not routing["norm_topk_prob"]:
        raise ModelError(f"{source.path} says that experts' weights are not normed (expert_weights_norm), which cannot "
                         "be served; use the model's Hugging Face directory")  # fmt: skip
    return {
        **{key: routing[key] for key in ("num_experts_per_tok", "moe_intermediate_size", "n_group")},
        "architectures": ["AfmoeForCausalLM"],
        "model_type": "afmoe",
        "hidden_act": "silu",
        "route_scale": routing["routed_scaling_factor"],
        "num_experts": integer(source, "afmoe.expert_count"),
        "num_shared_experts": count(source, "afmoe.expert_shared_count"),
        "num_dense_layers": count(source, "afmoe.leading_dense_block_count"),
        "sliding_window": integer(source, "afmoe.attention.sliding_window"),
        "layer_types": layer_types(source, "afmoe", _PATTERN),
        "mup_enabled": True,  # as published; GGUF does not say that embeddings are scaled
        **whole_rope(source, "afmoe"),
    }


def _needed(config: ModelConfig, layer: int) -> tuple[str, ...]:
    return (*ATTENTION, *HEAD_NORMS, *_NORMS, "attn_gate", *corrected_feed_forward(config, layer))


AFMOE: Mapping[str, Architecture] = {
    "afmoe": Architecture(
        _afmoe,
        {
            **LAYER_NAMES,
            **HEAD_NORMS,
            **SHARED_EXPERT,
            **_NORMS,
            "attn_gate": "self_attn.gate_proj",
            "ffn_gate_inp": "mlp.router.gate",
            CORRECTION: "mlp.expert_bias",
        },
        _needed,
        experts=experts_at("mlp.experts"),
    )
}
