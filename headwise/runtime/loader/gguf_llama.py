"""GGUF's ``llama``: Llama, Mistral and Mixtral, which has experts; and ``llama4``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.loader.gguf_architecture import (
    ATTENTION,
    LLAMA_NAMES,
    Architecture,
    Config,
    as_llama,
    experts_at,
    feed_forward,
)
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import count, integer, rope_scaling, shortest, theta
from headwise.runtime.models.base import ModelConfig

# What Meta published for Llama 3.1 to 3.3, and 4. GGUF keeps only the frequency factors that follow from it.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192
_ROPE_FREQS = "rope_freqs.weight"

_MAVERICK_EXPERTS = 128
"""Of the Llama 4 that does not norm queries and keys; GGUF does not say so, llama.cpp knows it by its size. Nor does it
say how queries grow with their position."""


def _llama(source: GgufFile) -> dict[str, Any]:
    head_dim = integer(
        source,
        "llama.attention.key_length",
        integer(source, "llama.embedding_length") // integer(source, "llama.attention.head_count"),
    )
    _check_rotated(source, "llama", head_dim)
    found = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": "blk.0.ffn_gate.bias" in source.tensors,
        **_rope(source, "llama", head_dim),
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


def _check_rotated(source: GgufFile, name: str, head_dim: int) -> None:
    rotary = integer(source, f"{name}.rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise ModelError(f"{source.path} rotates {rotary} of {head_dim} dimensions per head; only all can be served")


def _rope(source: GgufFile, name: str, head_dim: int) -> dict[str, Any]:
    base = theta(source, name)
    return {
        "rope_theta": base,
        "rope_scaling": _llama3_scaling(source, base, head_dim) or rope_scaling(source, name),
    }


def _llama3_scaling(source: GgufFile, base: float, head_dim: int) -> dict[str, Any] | None:
    """The ``llama3`` RoPE scaling that the factors in ``rope_freqs.weight`` follow from; None without that tensor."""
    if _ROPE_FREQS not in source.tensors:
        return None
    factors = source.tensor(_ROPE_FREQS)
    scaling = {
        "rope_type": "llama3",
        "factor": shortest(float(factors.max())),
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }
    expected = _llama3_factors(base, head_dim, float(factors.max()))
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ModelError(
            f"{source.path}: rope_freqs.weight is not Llama 3's scaling (low 1, high 4, original context 8192); "
            "use the model's Hugging Face directory, whose config.json states its scaling"
        )
    return scaling


def _llama3_factors(base: float, head_dim: int, factor: float) -> NDArray[np.float64]:
    """The divisors of the ``head_dim / 2`` RoPE frequencies (Llama 3.1's ``apply_scaling``)."""
    wavelength = 2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    share = (_LLAMA3_ORIGINAL / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    share = np.clip(share, 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - share) / factor + share))


def _undo(name: str, values: NDArray[Any], config: Config) -> NDArray[Any]:
    """Reorder the rows of Q and K. RoPE rotates pairs of them: neighbours in llama.cpp; in Hugging Face row ``i`` of a
    head's first half with row ``i`` of its second."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return values
    pairs = values.reshape(config[heads], config["head_dim"] // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _llama4(source: GgufFile) -> dict[str, Any]:
    head_dim = integer(source, "llama4.attention.key_length")
    _check_rotated(source, "llama4", head_dim)
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
        **_rope(source, "llama4", head_dim),
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
        undo=_undo,
        in_config=frozenset({_ROPE_FREQS}),
    ),
    "llama4": Architecture(
        _llama4,
        _LLAMA4_NAMES,
        _needs_llama4,
        experts=experts_at("feed_forward.experts"),
        in_config=frozenset({_ROPE_FREQS}),
    ),
}
