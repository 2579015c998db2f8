"""GGUF's ``llama``: Llama, Mistral and Mixtral, which has experts; and ``llama4``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.errors import ModelError
from headwise.runtime.loader.gguf_architecture import (
    ATTENTION,
    LLAMA_NAMES,
    Architecture,
    as_llama,
    experts_at,
    feed_forward,
)
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import count, integer
from headwise.runtime.loader.gguf_rope import ROPE_FREQS, undo_neighbours, whole_rope
from headwise.runtime.models.model_config import ModelConfig

_MAVERICK_EXPERTS = 128
"""Of the Llama 4 that does not norm queries and keys; GGUF does not say so, llama.cpp knows it by its size. Nor does it
say how queries grow with their position."""


def _llama(source: GgufFile) -> dict[str, Any]:
    found = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": "blk.0.ffn_gate.bias" in source.tensors,
        **whole_rope(source, "llama"),
    }
    experts = count(source, "llama.expert_count")
    if not experts:
        return found
    if "blk.0.ffn_gate.0.weight" in source.tensors:
        raise ModelError(
            f"{source.path} has each expert in tensors of its own, as files of early 2024 do; download a newer one"
        )
    return {
        **found,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": integer(source, "llama.expert_used_count"),
        "sliding_window": None,
    }


def _llama4(source: GgufFile) -> dict[str, Any]:
    experts = integer(source, "llama4.expert_count")
    return {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "hidden_act": "silu",
        "intermediate_size_mlp": integer(source, "llama4.feed_forward_length"),
        "intermediate_size": integer(source, "llama4.expert_feed_forward_length"),
        "num_local_experts": experts,
        "num_experts_per_tok": integer(source, "llama4.expert_used_count"),
        "interleave_moe_layer_step": integer(source, "llama4.interleave_moe_layer_step"),
        "attention_chunk_size": integer(source, "llama4.attention.chunk_size", 8192),
        "use_qk_norm": experts != _MAVERICK_EXPERTS,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        **whole_rope(source, "llama4"),
    }


def _needs_llama4(config: ModelConfig, layer: int) -> tuple[str, ...]:
    return (*ATTENTION, "ffn_norm", *feed_forward(config, layer, _LLAMA4_SHARED))


_LLAMA4_SHARED = {f"ffn_{kind}_shexp": f"feed_forward.shared_expert.{kind}_proj" for kind in ("gate", "up", "down")}
_LLAMA4_NAMES = {
    **LLAMA_NAMES,
    **{f"ffn_{kind}": f"feed_forward.{kind}_proj" for kind in ("gate", "up", "down")},
    **_LLAMA4_SHARED,
    "ffn_gate_inp": "feed_forward.router",
}

LLAMA: Mapping[str, Architecture] = {
    "llama": Architecture(
        _llama,
        {**LLAMA_NAMES, "ffn_gate_inp": "block_sparse_moe.gate"},
        as_llama,
        experts=experts_at("block_sparse_moe.experts", ("w1", "w3", "w2")),
        undo=undo_neighbours,
        in_config=frozenset({ROPE_FREQS}),
    ),
    "llama4": Architecture(
        _llama4,
        _LLAMA4_NAMES,
        _needs_llama4,
        experts=experts_at("feed_forward.experts"),
        in_config=frozenset({ROPE_FREQS}),
    ),
}
