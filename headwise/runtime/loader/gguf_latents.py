"""GGUF's models with latent attention: DeepSeek-V2 and V3, R1, Kimi-K2, GLM-4.7-Flash (``deepseek2``), V3.2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.loader.gguf_architecture import (
    LLAMA_NAMES,
    SHARED_EXPERT,
    Architecture,
    Config,
    experts_at,
    feed_forward,
)
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import count, integer, rope_scaling, shortest, theta
from headwise.runtime.loader.gguf_part import Part, made_of
from headwise.runtime.loader.gguf_routing import CORRECTION, SIGMOID, SOFTMAX, weights_scale
from headwise.runtime.models.model_config import ModelConfig

_GROUPS = {(160, SOFTMAX): (8, 3), (256, SIGMOID): (8, 4)}
"""Groups of experts, and those that a token may use, of DeepSeek-V2 and V3 by their experts and their router: files of
before llama.cpp knew of groups do not say."""

_LOG_MULTIPLIER = 0.1
"""GGUF has YaRN's ``mscale_all_dim`` multiplied with it."""

_JOINED, _KEYS, _VALUES = "attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight"


def _deepseek2(source: GgufFile) -> dict[str, Any]:
    is_v3 = _gating(source, "deepseek2") == SIGMOID
    found = {
        **_latents(source, "deepseek2"),
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
    }
    return {**found, **_routing(source, "deepseek2", found["n_routed_experts"])}


def _deepseek32(source: GgufFile) -> dict[str, Any]:
    name = "deepseek32"
    found = {
        **_latents(source, name),
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_n_heads": integer(source, f"{name}.attention.indexer.head_count"),
        "index_head_dim": integer(source, f"{name}.attention.indexer.key_length"),
        "index_topk": integer(source, f"{name}.attention.indexer.top_k"),
    }
    return {**found, **_routing(source, name, found["n_routed_experts"])}


def _gating(source: GgufFile, name: str) -> int:
    """The function that makes scores. Of files that do not say: softmax, or sigmoid where experts have a correction, as
    those of GLM-4.7-Flash do."""
    is_corrected = any(tensor.endswith(CORRECTION) for tensor in source.tensors)
    found = source.get(f"{name}.expert_gating_func", 0) or (SIGMOID if is_corrected else SOFTMAX)
    if found not in (SOFTMAX, SIGMOID):
        raise ModelError(f"{source.path}: {name}.expert_gating_func {found!r} is neither softmax (1) nor sigmoid (2)")
    return int(found)


def _latents(source: GgufFile, name: str) -> dict[str, Any]:
    """What all of them have. A head's sizes are in keys of their own, or (older files) where other models have them."""
    if source.get(f"{name}.attention.temperature_scale"):
        raise ModelError(f"{source.path} scales queries by their position (temperature_scale), which cannot be served")
    heads = integer(source, f"{name}.attention.head_count")
    rotated = integer(source, f"{name}.rope.dimension_count")
    is_split = f"{name}.attention.key_length_mla" in source.metadata
    size, value_dim = (
        integer(source, f"{name}.attention.{kind}_length{'_mla' if is_split else ''}") for kind in ("key", "value")
    )
    if size <= rotated:
        raise ModelError(f"{source.path}: {name} has heads of {size} elements, of which {rotated} are rotated")
    experts = count(source, f"{name}.expert_count")
    return {
        "hidden_act": "silu",
        "head_dim": None,
        "num_key_value_heads": heads,
        "q_lora_rank": source.get(f"{name}.attention.q_lora_rank") or None,
        "kv_lora_rank": integer(source, f"{name}.attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": value_dim,
        "first_k_dense_replace": count(source, f"{name}.leading_dense_block_count"),
        "n_routed_experts": experts or None,
        "rope_theta": theta(source, name),
        "rope_scaling": _yarn(source, name),
    }


def _yarn(source: GgufFile, name: str) -> dict[str, Any] | None:
    scaling = rope_scaling(source, name)
    if scaling is None or scaling["rope_type"] != "yarn":
        return scaling
    multiplier = float(source.get(f"{name}.rope.scaling.yarn_log_multiplier", 0.0))
    if not multiplier:
        return scaling
    mscale = shortest(shortest(multiplier) / _LOG_MULTIPLIER)
    return {**scaling, "mscale": mscale, "mscale_all_dim": mscale}


def _routing(source: GgufFile, name: str, experts: int | None) -> dict[str, Any]:
    if experts is None:
        return {}
    gating, groups = _gating(source, name), count(source, f"{name}.expert_group_count")
    used = count(source, f"{name}.expert_group_used_count")
    if not groups:
        groups, used = _GROUPS.get((experts, gating), (1, 1))
    found = {
        "num_experts_per_tok": integer(source, f"{name}.expert_used_count"),
        "moe_intermediate_size": integer(source, f"{name}.expert_feed_forward_length"),
        "n_shared_experts": count(source, f"{name}.expert_shared_count"),
        "routed_scaling_factor": weights_scale(source, name),
        "norm_topk_prob": bool(source.get(f"{name}.expert_weights_norm", False)),
        "n_group": groups,
        "topk_group": used or groups,
    }
    if gating == SIGMOID:
        return {**found, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return {**found, "topk_method": "greedy" if groups == 1 else "group_limited_greedy", "scoring_func": "softmax"}


def _made(source: GgufFile, config: Config) -> Iterable[Part]:
    return up_projections(source, config, range(config["num_hidden_layers"]))


def up_projections(source: GgufFile, config: Config, layers: Iterable[int]) -> Iterable[Part]:
    """``kv_b_proj`` of some layers, of which newer files have each head's keys, turned over, and values apart."""
    for layer in layers:
        names = f"blk.{layer}.{_KEYS}", f"blk.{layer}.{_VALUES}"
        if f"blk.{layer}.{_JOINED}" in source.tensors:
            continue
        for name in names:
            if name not in source.tensors:
                raise ModelError(f"{source.path} lacks the tensor {name!r}; download it again")
        heads, plain, value_dim, rank = (
            config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
        )
        expected = (heads, rank, plain), (heads, value_dim, rank)
        for name, shape in zip(names, expected, strict=True):
            if source.tensors[name].shape != shape:
                raise ModelError(
                    f"{source.path}: {name} has the shape {source.tensors[name].shape}, the metadata say {shape}; "
                    "download it again"
                )
        both = heads * (plain + value_dim), rank
        hf = f"model.layers.{layer}.self_attn.kv_b_proj.weight"
        yield made_of(source, hf, both, names, partial(_both, source, names, both))


def _both(source: GgufFile, names: tuple[str, str], shape: tuple[int, int]) -> NDArray[np.float32]:
    keys, values = (source.tensor(name) for name in names)
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(shape)


def _needed(config: ModelConfig, layer: int) -> tuple[str, ...]:
    mla = config.mla
    assert mla is not None, "parsed so"
    queries = ("attn_q",) if mla.q_rank is None else ("attn_q_a", "attn_q_a_norm", "attn_q_b")
    own = ("attn_norm", *queries, "attn_kv_a_mqa", "attn_kv_a_norm", "attn_output", "ffn_norm")
    indexer = tuple(_INDEXER) if mla.indexer is not None else ()
    shared = SHARED_EXPERT if config.moe is not None and config.moe.num_shared_experts else ()
    correction = (CORRECTION,) if getattr(config.moe, "has_correction", False) else ()
    return (*own, *indexer, *feed_forward(config, layer, (*shared, *correction)))


_INDEXER = {
    "indexer.k_norm.weight": "self_attn.indexer.k_norm.weight",
    "indexer.k_norm.bias": "self_attn.indexer.k_norm.bias",
    "indexer.proj.weight": "self_attn.indexer.weights_proj.weight",
    "indexer.attn_k.weight": "self_attn.indexer.wk.weight",
    "indexer.attn_q_b.weight": "self_attn.indexer.wq_b.weight",
}
LATENT_NAMES = {
    **LLAMA_NAMES,
    **SHARED_EXPERT,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate_inp": "mlp.gate",
    CORRECTION: "mlp.gate.e_score_correction_bias",
}

LATENTS: Mapping[str, Architecture] = {
    "deepseek2": Architecture(_deepseek2, LATENT_NAMES, _needed, experts=experts_at("mlp.experts"), made=_made),
    "deepseek32": Architecture(
        _deepseek32, {**LATENT_NAMES, **_INDEXER}, _needed, experts=experts_at("mlp.experts"), made=_made
    ),
}
