"""GGUF's ``olmo2``: OLMo 2, and OLMo 3, which has windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.runtime.loader.gguf_architecture import ATTENTION, DENSE, HEAD_NORMS, LAYER_NAMES, Architecture
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import count, layer_types, rope_scaling, theta
from headwise.runtime.models.model_config import ModelConfig

_PATTERN = 4


def _olmo(source: GgufFile) -> dict[str, Any]:
    found = {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "hidden_act": "silu",
        "rope_theta": theta(source, "olmo2"),
        "rope_scaling": rope_scaling(source, "olmo2"),
    }
    window = count(source, "olmo2.attention.sliding_window")
    if not window:
        return found
    return {
        **found,
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": layer_types(source, "olmo2", _PATTERN),
    }


def needs_norms_behind(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Of models that norm what attention and MLP add, and not what they are given."""
    return (*(name for name in ATTENTION if name != "attn_norm"), *HEAD_NORMS, *NORMS_BEHIND, *DENSE)


NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
NAMES_BEHIND = {
    **{name: hf for name, hf in LAYER_NAMES.items() if name != "attn_norm"},
    **HEAD_NORMS,
    **NORMS_BEHIND,
}

OLMO: Mapping[str, Architecture] = {"olmo2": Architecture(_olmo, NAMES_BEHIND, needs_norms_behind)}
