"""Gemma 4's ``config.json``: which layers have which heads, which share a cache, and what stands beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from headwise.errors import ModelError
from headwise.kernels.experts import NORM_MIN
from headwise.runtime.models.gemma2 import gemma_fields
from headwise.runtime.models.hf_config import (
    MOST_EXPERTS,
    MOST_HEAD_DIM,
    MOST_LAYERS,
    MOST_MEMBERS,
    HfConfig,
    decoder_config,
    flag,
    integer,
    mapping,
    named_layer_types,
    number,
    positive,
)
from headwise.runtime.models.model_config import LayerHeads, ModelConfig
from headwise.runtime.models.moe_config import MoeConfig
from headwise.runtime.models.moe_decoder import check_routing
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.models.rope import inverse_frequencies
from headwise.runtime.models.values import shown

ARCHITECTURES = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")

FULL, SLIDING = "full_attention", "sliding_attention"
_EVERY = 6
_DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
}
"""Those of Hugging Face's ``Gemma4TextConfig``."""

_ROPES: dict[str, HfConfig] = {
    SLIDING: {"rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


@dataclass(frozen=True)
class Gemma4Config(ModelConfig):
    """values_are_keys: ``[num_layers]``, whether a layer's values are made of what its keys are
    side_size:       of a token's own embedding of every layer; 0: it has none
    wide_mlps:       whether layers that share a cache have MLPs of twice the size
    """

    values_are_keys: tuple[bool, ...] = ()
    side_size: int = 0
    wide_mlps: bool = False

    def mlp_size(self, layer: int) -> int:
        """See `ModelConfig.mlp_size`."""
        is_wide = self.wide_mlps and self.heads_of(layer).cache_layer != layer
        return self.intermediate_size * (2 if is_wide else 1)

    @property
    def undivided(self) -> str:
        """See `ModelConfig.undivided`."""
        return "each layer has an embedding of every token" if self.side_size else super().undivided

    @property
    def side_elements(self) -> int:
        """See `ModelConfig.side_elements`: of per-layer embeddings, and of MLPs that stand beside experts."""
        beside = 0 if self.moe is None else 3 * self.hidden_size * self.intermediate_size * len(self.moe.layers)
        return 3 * self.hidden_size * self.side_size * self.num_layers + beside


def parse(config: HfConfig) -> Gemma4Config:
    """Read it; raises ModelError on what is not served."""
    nested = mapping(config, "text_config")
    text: dict[str, Any] = {**_DEFAULTS, **config, **nested}
    text["eos_token_id"] = config.get("eos_token_id", nested.get("eos_token_id"))
    sees_images = text.get("use_bidirectional_attention") == "vision"
    if sees_images:  # of what is no image `decoder_config` is told
        text["use_bidirectional_attention"] = None
    layers = positive(text, "num_hidden_layers", most=MOST_LAYERS)
    named = named_layer_types(text, lambda layer: SLIDING if (layer + 1) % _EVERY else FULL)
    kinds = [FULL if layer == layers - 1 else named(layer) for layer in range(layers)]
    decoder = decoder_config(
        text,
        "Gemma4ForCausalLM",
        layer_types=kinds.__getitem__,
        ropes=lambda kind: _rope(text, kind),
        window=positive(text, "sliding_window"),
        **{**gemma_fields(text), "attention_scale": 1.0, "attention_softcap": 0.0},
    )
    heads = _layer_heads(text, kinds, decoder)
    for kind, each in dict(zip(kinds, heads, strict=True)).items():
        inverse_frequencies(_rope(text, kind), each.head_dim)  # raises on one that cannot be computed
    keeps = [each.cache_layer == layer for layer, each in enumerate(heads)]
    known: dict[str, Any] = {field.name: getattr(decoder, field.name) for field in fields(decoder)}
    known |= {
        "layer_heads": heads,
        "policies": tuple(
            (row[0],) * each.kv_heads if own else ()
            for row, each, own in zip(decoder.policies, heads, keeps, strict=True)
        ),
        "moe": _moe(text, layers) if flag(text, "enable_moe_block") else None,
        "both_ways": tuple(sees_images and kind == SLIDING for kind in kinds),  # full layers see none ahead
        "values_are_keys": tuple(flag(text, "attention_k_eq_v") and kind == FULL for kind in kinds),
        "side_size": _side_size(text),
        "wide_mlps": flag(text, "use_double_wide_mlp"),
    }
    return Gemma4Config(**known)


def _rope(text: HfConfig, kind: str) -> RopeConfig:
    parameters = mapping(mapping(text, "rope_parameters") or _ROPES, kind) or _ROPES[kind]
    return RopeConfig(number(parameters, "rope_theta"), parameters)


def _layer_heads(text: HfConfig, kinds: Sequence[str], decoder: ModelConfig) -> tuple[LayerHeads, ...]:
    """Of each layer. The last ``num_kv_shared_layers`` use the cache of the last other layer of their type."""
    own = len(kinds) - integer(text, "num_kv_shared_layers", default=0)
    latest: dict[str, LayerHeads] = {}
    found = []
    for layer, kind in enumerate(kinds):
        count, dim = _heads(text, layer, kind, decoder)
        if layer < own:
            latest[kind] = LayerHeads(count, dim, layer)
        shared = latest.get(kind)
        if shared is None or (shared.kv_heads, shared.head_dim) != (count, dim):
            raise ModelError(
                f"config.json: 'num_kv_shared_layers' {shown(text.get('num_kv_shared_layers'))} of {len(kinds)} leaves "
                f"no {kind} layer with {count} heads of {dim} whose cache layer {layer} could use"
            )
        found.append(shared)
    if sum(heads.kv_heads for heads in found) > MOST_MEMBERS:
        raise ModelError(f"config.json: {len(kinds)} layers have more than the {MOST_MEMBERS} heads that can be served")
    return tuple(found)


def _heads(text: HfConfig, layer: int, kind: str, decoder: ModelConfig) -> tuple[int, int]:
    """KV heads of a layer and their size: those of ``per_layer_config``, or in full layers of two fields."""
    count, dim = decoder.num_kv_heads, decoder.head_dim
    if text.get("per_layer_config") is not None:
        told = mapping(mapping(text, "per_layer_config"), str(layer))
        unknown = sorted(set(told) - {"head_dim", "num_key_value_heads"})
        if unknown:
            raise ModelError(f"config.json: 'per_layer_config' changes {shown(unknown)}, which cannot be served")
        count = positive(told, "num_key_value_heads", default=count, most=MOST_MEMBERS)
        dim = positive(told, "head_dim", default=dim, most=MOST_HEAD_DIM)
    elif kind == FULL:
        dim = positive(text, "global_head_dim", most=MOST_HEAD_DIM)
        if flag(text, "attention_k_eq_v"):
            count = positive(text, "num_global_key_value_heads", default=count, most=MOST_MEMBERS)
    if decoder.num_heads % count or dim % 2:
        raise ModelError(
            f"config.json: layer {layer} has {decoder.num_heads} attention heads for {count} key-value heads of {dim}; "
            "the former must be a multiple, and the latter of an even size"
        )
    return count, dim


def _side_size(text: HfConfig) -> int:
    size, vocab = integer(text, "hidden_size_per_layer_input", default=0), positive(text, "vocab_size")
    known = positive(text, "vocab_size_per_layer_input", default=vocab)
    if size and known != vocab:
        raise ModelError(
            f"config.json: 'vocab_size_per_layer_input' {shown(known)} is not 'vocab_size' {vocab}: not served"
        )
    return size


def _moe(text: HfConfig, layers: int) -> MoeConfig:
    experts, per_token = positive(text, "num_experts", most=MOST_EXPERTS), positive(text, "top_k_experts")
    check_routing(text, {"top_k_experts": per_token}, {"num_experts": experts})
    return MoeConfig(tuple(range(layers)), experts, per_token, positive(text, "moe_intermediate_size"), 0, NORM_MIN)
