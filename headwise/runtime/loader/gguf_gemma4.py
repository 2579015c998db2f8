"""GGUF's Gemma 4: heads of two sizes, shared caches, embeddings per layer, experts beside MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headwise.errors import ModelError
from headwise.runtime.loader.gguf_architecture import DENSE, EXPERTS, HEAD_NORMS, Architecture, experts_at
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_gemma import GEMMA2_NAMES, GEMMA3_PATTERN
from headwise.runtime.loader.gguf_keys import count, integer, layer_types, theta
from headwise.runtime.models.gemma4_config import FULL, Gemma4Config
from headwise.runtime.models.model_config import ModelConfig

_NAME = "gemma4"
_FREQS = "rope_freqs.weight"
_STILL = 1e10
"""From here on a divisor of a frequency says that its pair stands still."""


def _config(source: GgufFile) -> dict[str, Any]:
    layers = integer(source, f"{_NAME}.block_count")
    kinds, shared = layer_types(source, _NAME, GEMMA3_PATTERN), count(source, f"{_NAME}.attention.shared_kv_layers")
    sliding_heads, full_heads = _heads(source, kinds)
    sizes = _each(source, "feed_forward_length", layers)
    found = {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] != sizes[0],
        "layer_types": kinds,
        "num_kv_shared_layers": shared,
        "num_key_value_heads": sliding_heads,
        "num_global_key_value_heads": full_heads,
        "head_dim": integer(source, f"{_NAME}.attention.key_length_swa"),
        "global_head_dim": integer(source, f"{_NAME}.attention.key_length"),
        "attention_k_eq_v": _values_are_keys(source, kinds, layers - shared),
        "sliding_window": integer(source, f"{_NAME}.attention.sliding_window"),
        "hidden_size_per_layer_input": count(source, f"{_NAME}.embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": source.tensors["token_embd.weight"].shape[0],
        "rope_parameters": _ropes(source),
        "final_logit_softcapping": source.get(f"{_NAME}.final_logit_softcapping"),
    }
    return {**found, **_experts(source)}


def _each(source: GgufFile, key: str, layers: int) -> list[int]:
    """A number of each layer, which may be given once for all."""
    value = source.require(f"{_NAME}.{key}")
    found = value if isinstance(value, list) else [value] * layers
    if len(found) != layers or not all(isinstance(number, int) and number > 0 for number in found):
        raise ModelError(f"{source.path}: {_NAME}.{key} must be a positive integer for each of {layers} layers")
    return found


def _heads(source: GgufFile, kinds: list[str]) -> tuple[int, int]:
    """KV heads of windowed layers, and of full ones."""
    each = _each(source, "attention.head_count_kv", len(kinds))
    of_kind = {kind: {heads for heads, its in zip(each, kinds, strict=True) if its == kind} for kind in kinds}
    if any(len(counts) > 1 for counts in of_kind.values()):
        raise ModelError(f"{source.path}: {_NAME}.attention.head_count_kv differs between layers of a kind: {each}")
    full = next(iter(of_kind.get(FULL, {each[0]})))
    return next((next(iter(counts)) for kind, counts in of_kind.items() if kind != FULL), full), full


def _values_are_keys(source: GgufFile, kinds: list[str], own: int) -> bool:
    """Whether full layers make their values of what their keys are made of: they have no projection of values then."""
    full = next((layer for layer, kind in enumerate(kinds[:own]) if kind == FULL), None)
    return full is not None and f"blk.{full}.attn_v.weight" not in source.tensors


def _ropes(source: GgufFile) -> dict[str, Any]:
    """Of a full head only some pairs turn: the others have frequencies that are divided by a huge number."""
    turning = 1.0
    if _FREQS in source.tensors:
        divisors = source.tensor(_FREQS)
        turns = divisors < _STILL
        if not np.allclose(divisors[turns], 1.0) or not turns[: int(turns.sum())].all():
            raise ModelError(f"{source.path}: {_FREQS} is not that of a Gemma 4, whose first pairs turn, and no others")
        turning = int(turns.sum()) / len(divisors)
    base = theta(source, _NAME, 1_000_000.0)
    return {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": turning, "rope_theta": base},
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": float(source.get(f"{_NAME}.rope.freq_base_swa", 10_000.0)),
        },
    }


def _experts(source: GgufFile) -> dict[str, Any]:
    experts = count(source, f"{_NAME}.expert_count")
    if not experts:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": experts,
        "top_k_experts": integer(source, f"{_NAME}.expert_used_count"),
        "moe_intermediate_size": integer(source, f"{_NAME}.expert_feed_forward_length"),
    }


def _needed(config: ModelConfig, layer: int) -> tuple[str, ...]:
    assert isinstance(config, Gemma4Config), "parsed so"
    found = ["attn_norm", "attn_q", "attn_q_norm", "attn_output", "post_attention_norm", "ffn_norm", "post_ffw_norm"]
    if config.heads_of(layer).cache_layer == layer:
        found += ["attn_k", "attn_k_norm", *(() if config.values_are_keys[layer] else ("attn_v",))]
    if config.moe is not None:
        found += ["ffn_gate_inp", "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2", *EXPERTS]
        found += ["ffn_gate_inp.scale", "ffn_down_exps.scale"]
    if config.side_size:
        found += ["inp_gate", "proj", "post_norm"]
    return (*found, *DENSE, "layer_output_scale")


_NAMES = {
    **GEMMA2_NAMES,
    **HEAD_NORMS,
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_GLOBAL_NAMES = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}

GEMMA4: Mapping[str, Architecture] = {
    _NAME: Architecture(
        _config,
        _NAMES,
        _needed,
        experts=experts_at("experts"),
        global_names=_GLOBAL_NAMES,
        in_config=frozenset({_FREQS}),
    )
}
