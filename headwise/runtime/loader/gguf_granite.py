"""GGUF's Granite 3, and what of Granite 4 has no states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.errors import ModelError
from headwise.runtime.loader.gguf_architecture import LLAMA_NAMES, Architecture, as_llama, experts_at
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import count, integer, shortest
from headwise.runtime.loader.gguf_rope import undo_neighbours, whole_rope

_FACTORS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}


def _granite(source: GgufFile) -> dict[str, Any]:
    return {"architectures": ["GraniteForCausalLM"], "model_type": "granite", **_shared(source, "granite")}


def _granite_moe(source: GgufFile) -> dict[str, Any]:
    name = "granitemoe"
    if count(source, f"{name}.expert_shared_feed_forward_length"):
        raise ModelError(f"{source.path} has experts that every token goes through, which Granite is not served with")
    return {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": name,
        "num_local_experts": integer(source, f"{name}.expert_count"),
        "num_experts_per_tok": integer(source, f"{name}.expert_used_count"),
        **_shared(source, name),
    }


def _shared(source: GgufFile, name: str) -> dict[str, Any]:
    if not source.get(f"{name}.rope.scaling.finetuned", True):  # llama.cpp's switch
        raise ModelError(f"{source.path} rotates nothing, which Granite is not served with")
    factors = {ours: source.get(f"{name}.{theirs}") for ours, theirs in _FACTORS.items()}
    return {
        "hidden_act": "silu",
        **{key: shortest(value) for key, value in factors.items() if value is not None},
        **whole_rope(source, name),
    }


GRANITE: Mapping[str, Architecture] = {
    "granite": Architecture(_granite, LLAMA_NAMES, as_llama, undo=undo_neighbours),
    "granitemoe": Architecture(
        _granite_moe,
        {**LLAMA_NAMES, "ffn_gate_inp": "block_sparse_moe.router.layer"},
        as_llama,
        experts=experts_at("block_sparse_moe.experts"),
        undo=undo_neighbours,
    ),
}
