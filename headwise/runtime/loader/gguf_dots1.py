"""GGUF's dots.llm1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.runtime.loader.gguf_architecture import (
    ATTENTION,
    HEAD_NORMS,
    LLAMA_NAMES,
    SHARED_EXPERT,
    Architecture,
    experts_at,
)
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import count, integer
from headwise.runtime.loader.gguf_rope import whole_rope
from headwise.runtime.loader.gguf_routing import CORRECTION, corrected_feed_forward, sigmoid_routing
from headwise.runtime.models.model_config import ModelConfig


def _dots1(source: GgufFile) -> dict[str, Any]:
    return {
        **sigmoid_routing(source, "dots1"),
        "architectures": ["Dots1ForCausalLM"],
        "model_type": "dots1",
        "hidden_act": "silu",
        "sliding_window": None,
        "n_routed_experts": integer(source, "dots1.expert_count"),
        "n_shared_experts": count(source, "dots1.expert_shared_count"),
        "first_k_dense_replace": count(source, "dots1.leading_dense_block_count"),
        **whole_rope(source, "dots1"),
    }


def _needed(config: ModelConfig, layer: int) -> tuple[str, ...]:
    return (*ATTENTION, *HEAD_NORMS, "ffn_norm", *corrected_feed_forward(config, layer))


DOTS1: Mapping[str, Architecture] = {
    "dots1": Architecture(
        _dots1,
        {
            **LLAMA_NAMES,
            **HEAD_NORMS,
            **SHARED_EXPERT,
            "ffn_gate_inp": "mlp.gate",
            CORRECTION: "mlp.gate.e_score_correction_bias",
        },
        _needed,
        experts=experts_at("mlp.experts"),
    )
}
