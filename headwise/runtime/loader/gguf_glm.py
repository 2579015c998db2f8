"""GGUF's GLM-4, and GLM-4.5 to 4.7, which have experts."""

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
from headwise.runtime.loader.gguf_keys import count, integer, placed_scaling, theta
from headwise.runtime.loader.gguf_rope import rotated_share
from headwise.runtime.loader.gguf_routing import CORRECTION, corrected_feed_forward, sigmoid_routing
from headwise.runtime.models.model_config import ModelConfig


def _of_glm(source: GgufFile, name: str) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "partial_rotary_factor": rotated_share(source, name),
        "rope_theta": theta(source, name),
        "rope_scaling": placed_scaling(source, name),
    }


def _glm4(source: GgufFile) -> dict[str, Any]:
    if any(source.get("glm4.rope.dimension_sections", ())):
        raise ModelError(
            f"{source.path} rotates by positions in images (rope.dimension_sections), which reorders a GLM-4's rows; "
            "use the model's Hugging Face directory"
        )
    return {**_of_glm(source, "glm4"), "architectures": ["Glm4ForCausalLM"], "model_type": "glm4"}


def _glm4_moe(source: GgufFile) -> dict[str, Any]:
    """Of a GLM-4.5V, too, whose rows are in order."""
    rotated = _of_glm(source, "glm4moe")
    has_places = "mrope_section" in (rotated["rope_scaling"] or {})
    return {
        **rotated,
        **sigmoid_routing(source, "glm4moe"),
        "architectures": ["Glm4vMoeForConditionalGeneration" if has_places else "Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "use_qk_norm": "blk.0.attn_q_norm.weight" in source.tensors,
        "n_routed_experts": integer(source, "glm4moe.expert_count"),
        "n_shared_experts": count(source, "glm4moe.expert_shared_count"),
        "first_k_dense_replace": count(source, "glm4moe.leading_dense_block_count"),
    }


def _needs_glm4(config: ModelConfig, layer: int) -> tuple[str, ...]:
    return (*ATTENTION, "post_attention_norm", "ffn_norm", "ffn_up", "ffn_down", "post_ffw_norm")


def _needs_glm4_moe(config: ModelConfig, layer: int) -> tuple[str, ...]:
    norms = HEAD_NORMS if getattr(config, "has_qk_norm", False) else ()
    return (*ATTENTION, *norms, "post_attention_norm", *corrected_feed_forward(config, layer))


_GLM4_NAMES = {
    **{name: hf for name, hf in LAYER_NAMES.items() if name != "ffn_gate"},
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "post_ffw_norm": "post_mlp_layernorm",
}

GLM: Mapping[str, Architecture] = {
    "glm4": Architecture(_glm4, _GLM4_NAMES, _needs_glm4),
    "glm4moe": Architecture(
        _glm4_moe,
        {
            **LAYER_NAMES,
            **HEAD_NORMS,
            **SHARED_EXPERT,
            "post_attention_norm": "post_attention_layernorm",  # which is before the MLP
            "ffn_gate_inp": "mlp.gate",
            CORRECTION: "mlp.gate.e_score_correction_bias",
        },
        _needs_glm4_moe,
        experts=experts_at("mlp.experts"),
    ),
}
