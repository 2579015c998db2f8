"""GGUF's EXAONE 4, and K-EXAONE, which has experts."""

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
from headwise.runtime.loader.gguf_keys import count, integer, layer_types
from headwise.runtime.loader.gguf_olmo import NAMES_BEHIND, needs_norms_behind
from headwise.runtime.loader.gguf_rope import ROPE_FREQS, whole_rope
from headwise.runtime.loader.gguf_routing import CORRECTION, corrected_feed_forward, sigmoid_routing
from headwise.runtime.models.model_config import ModelConfig

_DENSE, _MOE = "exaone4", "exaone-moe"
_PATTERN = 4


def _of_exaone(source: GgufFile, name: str) -> dict[str, Any]:
    window = count(source, f"{name}.attention.sliding_window") or None
    return {
        "hidden_act": "silu",
        "sliding_window": window,
        "layer_types": None if window is None else layer_types(source, name, _PATTERN),
        **whole_rope(source, name),
    }


def _exaone4(source: GgufFile) -> dict[str, Any]:
    return {**_of_exaone(source, _DENSE), "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4"}


def _exaone_moe(source: GgufFile) -> dict[str, Any]:
    return {
        **_of_exaone(source, _MOE),
        **sigmoid_routing(source, _MOE),
        "architectures": ["ExaoneMoeForCausalLM"],
        "model_type": "exaone_moe",
        "num_experts": integer(source, f"{_MOE}.expert_count"),
        "num_shared_experts": count(source, f"{_MOE}.expert_shared_count"),
        "first_k_dense_replace": count(source, f"{_MOE}.leading_dense_block_count"),
    }


def _needs_exaone_moe(config: ModelConfig, layer: int) -> tuple[str, ...]:
    return (*ATTENTION, *HEAD_NORMS, "ffn_norm", *corrected_feed_forward(config, layer))


EXAONE: Mapping[str, Architecture] = {
    _DENSE: Architecture(_exaone4, NAMES_BEHIND, needs_norms_behind, in_config=frozenset({ROPE_FREQS})),
    _MOE: Architecture(
        _exaone_moe,
        {
            **LLAMA_NAMES,
            **HEAD_NORMS,
            **SHARED_EXPERT,
            "ffn_gate_inp": "mlp.gate",
            CORRECTION: "mlp.e_score_correction_bias",
        },
        _needs_exaone_moe,
        experts=experts_at("mlp.experts"),
        in_config=frozenset({ROPE_FREQS}),
    ),
}
