"""GGUF's Qwen 2, 2.5 and 3, and Qwen 3 with experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headwise.runtime.loader.gguf_architecture import HEAD_NORMS, LLAMA_NAMES, Architecture, as_llama, experts_at
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import integer, rope_scaling, theta
from headwise.runtime.models.base import ModelConfig


def _qwen(name: str, architecture: str, model_type: str) -> Callable[[GgufFile], dict[str, Any]]:
    def config(source: GgufFile) -> dict[str, Any]:
        return {
            "architectures": [architecture],
            "model_type": model_type,
            "hidden_act": "silu",
            "rope_theta": theta(source, name),
            "rope_scaling": rope_scaling(source, name),
            "use_sliding_window": False,
        }

    return config


def _qwen3moe(source: GgufFile) -> dict[str, Any]:
    """All that were published have experts in every layer, and weights that are normed; GGUF says neither."""
    return {
        **_qwen("qwen3moe", "Qwen3MoeForCausalLM", "qwen3_moe")(source),
        "num_experts": integer(source, "qwen3moe.expert_count"),
        "num_experts_per_tok": integer(source, "qwen3moe.expert_used_count"),
        "moe_intermediate_size": integer(source, "qwen3moe.expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _needs_qwen3(config: ModelConfig, layer: int) -> tuple[str, ...]:
    return (*as_llama(config, layer), *HEAD_NORMS)


QWEN: Mapping[str, Architecture] = {
    "qwen2": Architecture(_qwen("qwen2", "Qwen2ForCausalLM", "qwen2"), LLAMA_NAMES, as_llama),
    "qwen3": Architecture(_qwen("qwen3", "Qwen3ForCausalLM", "qwen3"), {**LLAMA_NAMES, **HEAD_NORMS}, _needs_qwen3),
    "qwen3moe": Architecture(
        _qwen3moe,
        {**LLAMA_NAMES, **HEAD_NORMS, "ffn_gate_inp": "mlp.gate"},
        _needs_qwen3,
        experts=experts_at("mlp.experts"),
    ),
}
