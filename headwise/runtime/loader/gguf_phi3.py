"""GGUF's Phi-3, 3.5 and 4-mini."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.runtime.loader.gguf_architecture import LLAMA_NAMES, Architecture
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import integer, theta
from headwise.runtime.models.model_config import ModelConfig

_NAMES = {**LLAMA_NAMES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_FACTORS = {kind: f"rope_factors_{kind}.weight" for kind in ("long", "short")}


def _phi3(source: GgufFile) -> dict[str, Any]:
    hidden, heads = integer(source, "phi3.embedding_length"), integer(source, "phi3.attention.head_count")
    head_dim = hidden // heads
    rotated = integer(source, "phi3.rope.dimension_count", head_dim)
    longest = integer(source, "phi3.context_length")
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_act": "silu",
        "partial_rotary_factor": rotated / head_dim,
        "original_max_position_embeddings": integer(source, "phi3.rope.scaling.original_context_length", longest),
        "rope_theta": theta(source, "phi3"),
        "rope_scaling": _longrope_scaling(source),
        "sliding_window": source.get("phi3.attention.sliding_window") or None,
    }


def _longrope_scaling(source: GgufFile) -> dict[str, Any] | None:
    """The ``longrope`` scaling whose factors are tensors in a GGUF file; None without them."""
    if not any(name in source.tensors for name in _FACTORS.values()):
        return None
    factors = {f"{kind}_factor": source.tensor(name).tolist() for kind, name in _FACTORS.items()}
    return {"rope_type": "longrope", **factors, "attention_factor": source.get("phi3.rope.scaling.attn_factor")}


def _needs_phi3(config: ModelConfig, layer: int) -> tuple[str, ...]:
    return ("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down")


PHI3: Mapping[str, Architecture] = {
    "phi3": Architecture(_phi3, _NAMES, _needs_phi3, in_config=frozenset(_FACTORS.values()))
}
