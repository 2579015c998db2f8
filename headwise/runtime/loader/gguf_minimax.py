"""GGUF's MiniMax-M2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.runtime.loader.gguf_architecture import (
    ATTENTION,
    HEAD_NORMS,
    LLAMA_NAMES,
    Architecture,
    experts_at,
)
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import integer, rope_scaling, theta
from headwise.runtime.loader.gguf_rope import rotated_share
from headwise.runtime.loader.gguf_routing import CORRECTION, corrected_feed_forward, sigmoid_routing
from headwise.runtime.models.model_config import ModelConfig

_NAME = "minimax-m2"


def _minimax(source: GgufFile) -> dict[str, Any]:
    return {
        **sigmoid_routing(source, _NAME),
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "hidden_act": "silu",
        "intermediate_size": integer(source, f"{_NAME}.expert_feed_forward_length"),
        "num_local_experts": integer(source, f"{_NAME}.expert_count"),
        "partial_rotary_factor": rotated_share(source, _NAME),
        "rope_theta": theta(source, _NAME),
        "rope_scaling": rope_scaling(source, _NAME),
        "norm_topk_prob": True,  # always; GGUF does not say so
        "use_qk_norm": True,
        "use_routing_bias": True,
    }


def _needed(config: ModelConfig, layer: int) -> tuple[str, ...]:
    return (*ATTENTION, *HEAD_NORMS, "ffn_norm", *corrected_feed_forward(config, layer))


MINIMAX: Mapping[str, Architecture] = {
    _NAME: Architecture(
        _minimax,
        {
            **LLAMA_NAMES,
            **HEAD_NORMS,
            "ffn_gate_inp": "block_sparse_moe.gate",
            CORRECTION: "block_sparse_moe.e_score_correction_bias",
        },
        _needed,
        experts=experts_at("block_sparse_moe.experts", ("w1", "w3", "w2")),
    )
}
