"""GGUF's Gemma 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.loader.gguf_architecture import (
    ATTENTION,
    DENSE,
    HEAD_NORMS,
    LAYER_NAMES,
    Architecture,
    Config,
)
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import integer, layer_types, rope_scaling, theta
from headwise.runtime.models.model_config import ModelConfig

_GEMMA3_LOCAL_THETA = 10_000.0
GEMMA3_PATTERN = 6
_GEMMA3_27B_LAYERS = 62
_GEMMA2_27B_LAYERS = 46

GEMMA2_NAMES = {
    **LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _gemma2(source: GgufFile) -> dict[str, Any]:
    layers, heads = integer(source, "gemma2.block_count"), integer(source, "gemma2.attention.head_count")
    head_dim = integer(source, "gemma2.attention.key_length", 256)
    # As with Gemma 3, the largest model alone scales by its hidden size per head.
    scalar = integer(source, "gemma2.embedding_length") // heads if layers == _GEMMA2_27B_LAYERS else head_dim
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": integer(source, "gemma2.attention.sliding_window"),
        "rope_theta": theta(source, "gemma2"),
        "rope_scaling": rope_scaling(source, "gemma2"),
        "attn_logit_softcapping": source.get("gemma2.attn_logit_softcapping"),
        "final_logit_softcapping": source.get("gemma2.final_logit_softcapping"),
    }


def _gemma3(source: GgufFile) -> dict[str, Any]:
    layers, heads = integer(source, "gemma3.block_count"), integer(source, "gemma3.attention.head_count")
    head_dim = integer(source, "gemma3.attention.key_length", 256)
    # The 27B model alone scales by its hidden size per head; GGUF does not say so, llama.cpp knows it by its depth.
    scalar = integer(source, "gemma3.embedding_length") // heads if layers == _GEMMA3_27B_LAYERS else head_dim
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": integer(source, "gemma3.attention.sliding_window"),
        "layer_types": layer_types(source, "gemma3", GEMMA3_PATTERN),
        "rope_theta": theta(source, "gemma3", 1_000_000.0),
        "rope_local_base_freq": float(source.get("gemma3.rope.freq_base_swa", _GEMMA3_LOCAL_THETA)),
        "rope_scaling": rope_scaling(source, "gemma3"),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": source.get("gemma3.final_logit_softcapping"),
    }


def _undo(name: str, values: NDArray[Any], config: Config) -> NDArray[Any]:
    """Take 1 from the weights of norms. Gemma's norms multiply by ``1 + weight``, and GGUF stores that sum."""
    return values - np.float32(1.0) if name.endswith("norm.weight") else values


def _needs_gemma2(config: ModelConfig, layer: int) -> tuple[str, ...]:
    return (*ATTENTION, "post_attention_norm", "ffn_norm", "post_ffw_norm", *DENSE)


def _needs_gemma3(config: ModelConfig, layer: int) -> tuple[str, ...]:
    return (*_needs_gemma2(config, layer), *HEAD_NORMS)


GEMMA: Mapping[str, Architecture] = {
    "gemma2": Architecture(_gemma2, GEMMA2_NAMES, _needs_gemma2, undo=_undo),
    "gemma3": Architecture(_gemma3, {**GEMMA2_NAMES, **HEAD_NORMS}, _needs_gemma3, undo=_undo),
}
