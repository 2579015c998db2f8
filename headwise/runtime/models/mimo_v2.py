"""MiMo-V2-Flash: windows with learned sinks in five of six layers, keys larger than values, DeepSeek-V3's routing.

Layers with windows have more KV heads than those that see all, and turn their heads faster. Values are multiplied with
a constant, ``s``. The norm before attention is, in their place, so queries and keys are, too, and scores are divided by
``s ** 2``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.models.deepseek_routing import ungrouped_moe
from headwise.runtime.models.drafting import DraftingNames
from headwise.runtime.models.grouped_moe import GroupedMoeDecoder
from headwise.runtime.models.hf_config import (
    MOST_HEAD_DIM,
    MOST_LAYERS,
    MOST_MEMBERS,
    HfConfig,
    check_served,
    decoder_config,
    flag,
    mapping,
    named_layer_types,
    number,
    positive,
    rope,
    split_share,
)
from headwise.runtime.models.model_config import LayerHeads, ModelConfig
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.models.rope import pairs_first, scaling_kind
from headwise.runtime.models.values import shown
from headwise.runtime.models.weight_view import ExpertWeights, rotated
from headwise.runtime.models.weights import Weights
from headwise.runtime.models.windows import FULL, SLIDING
from headwise.runtime.ops.base import KernelArray, Tensor

ARCHITECTURE = "MiMoV2FlashForCausalLM"

_SERVED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "attention_projection_layout": (None,),  # else queries, keys and values are one matrix, in parts for some ranks
    "hybrid_block_size": (None,),
    "n_shared_experts": (None, 0),
    "layer_norm_eps": (None,),
}
_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 192,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
}
"""Those of Hugging Face's ``MiMoV2FlashConfig``."""
_VALUE_SCALE, _SHARE, _WINDOW, _EVERY = 0.707, 0.334, 128, 6
_THETAS = {FULL: ("rope_theta", 5e6), SLIDING: ("swa_rope_theta", 1e4)}


@dataclass(frozen=True)
class MiMoV2Config(ModelConfig):
    """value_scale: what values are multiplied with; sunk: `FULL` and `SLIDING`, if such layers have learned sinks"""

    value_scale: float = 1.0
    sunk: frozenset[str] = frozenset()

    def has_sinks(self, layer: int) -> bool:
        """Whether the query heads of a layer have learned sinks."""
        return (FULL if self.policies[layer][0].is_full else SLIDING) in self.sunk


def parse(config: HfConfig) -> MiMoV2Config:
    """Read it as it was published, or as Hugging Face writes it; raises ModelError on what is not served."""
    check_served(config, _SERVED_VALUES)
    own = {**_DEFAULTS, **config}
    if config.get("layernorm_epsilon") is not None:
        own["rms_norm_eps"] = number(config, "layernorm_epsilon", 1e-5)
    layers = positive(own, "num_hidden_layers", most=MOST_LAYERS)
    kinds = _layer_kinds(own, layers)
    plain, _ = split_share({**own, "rope_parameters": None}, default=_SHARE)
    decoder = decoder_config(
        plain,
        ARCHITECTURE,
        layer_types=kinds.__getitem__,
        ropes=lambda kind: _rope(own, kind),
        window=_same(own, "sliding_window", "sliding_window_size", default=_WINDOW),
    )
    heads = [LayerHeads(*_heads(own, kind, decoder)) for kind in kinds]
    heads = [replace(each, cache_layer=layer) for layer, each in enumerate(heads)]
    if sum(each.kv_heads for each in heads) > MOST_MEMBERS:
        raise ModelError(f"config.json: {layers} layers have more than the {MOST_MEMBERS} heads that can be served")
    has_sinks = {
        SLIDING: flag(own, "add_swa_attention_sink_bias", default=True),
        FULL: flag(own, "add_full_attention_sink_bias"),
    }
    sunk = frozenset(kind for kind in kinds if has_sinks[kind])
    rows = zip(decoder.policies, heads, strict=True)
    scale = 1.0 if own.get("attention_value_scale", 0) is None else number(own, "attention_value_scale", _VALUE_SCALE)
    known = vars(decoder) | {
        "layer_heads": tuple(heads),
        "policies": tuple((row[0],) * each.kv_heads for row, each in rows),
        "moe": ungrouped_moe({**own, **_mlp_kinds(own, layers)}, layers),
        "sink_logits": bool(sunk),
        "attention_scale": decoder.attention_scale / scale**2,
    }
    return MiMoV2Config(**known, value_scale=scale, sunk=sunk)


def _layer_kinds(config: HfConfig, layers: int) -> list[str]:
    """Of each layer: as `layer_types` names it, or ``hybrid_layer_pattern`` has a 1 for each that has a window."""
    pattern = _ones(config, "hybrid_layer_pattern", layers)

    def default(layer: int) -> str:
        is_full = layer == 0 or not (layer + 1) % _EVERY
        return (SLIDING if pattern[layer] else FULL) if pattern is not None else FULL if is_full else SLIDING

    named = named_layer_types(config, default)
    kinds = [named(layer) for layer in range(layers)]
    if pattern is not None and kinds != [default(layer) for layer in range(layers)]:
        raise ModelError("config.json: 'layer_types' and 'hybrid_layer_pattern' tell of other windows; leave one out")
    return kinds


def _mlp_kinds(config: HfConfig, layers: int) -> Mapping[str, Any]:
    """The fields that say which layers have experts, as `ungrouped_moe` knows them."""
    pattern = _ones(config, "moe_layer_freq", layers)
    kinds = None if pattern is None else ["sparse" if one else "dense" for one in pattern]
    named = config.get("mlp_layer_types")
    if named is not None and kinds is not None and named != kinds:
        raise ModelError("config.json: 'mlp_layer_types' and 'moe_layer_freq' tell of other experts; leave one out")
    return {"moe_layer_freq": None, "mlp_layer_types": kinds if named is None else named}


def _ones(config: HfConfig, key: str, layers: int) -> Sequence[int] | None:
    """A list of a 0 or 1 for each layer; None if it is missing."""
    found = config.get(key)
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != layers or not {*map(shown, found)} <= {"0", "1"}:
        raise ModelError(f"config.json: {key!r} must be a 0 or 1 for each of {layers} layers, got {shown(found)}")
    return found


def _same(config: HfConfig, key: str, other: str, default: int) -> int:
    """A field that may go by either name."""
    known = [positive(config, name) for name in (key, other) if config.get(name) is not None]
    if len({*known}) > 1:
        raise ModelError(f"config.json: {key!r} {known[0]} and {other!r} {known[1]} must be the same; leave one out")
    return known[0] if known else default


def _rope(config: HfConfig, kind: str) -> RopeConfig:
    """Of layers of a kind: of their own ``rope_parameters``, or of the fields that published files have."""
    parameters, (key, theta) = mapping(config, "rope_parameters"), _THETAS[kind]
    if kind in parameters:
        plain, share = split_share({**config, "rope_parameters": mapping(parameters, kind)}, default=_SHARE)
        return replace(rope(plain, default_theta=theta), share=share)
    for scaling in (parameters, mapping(config, "rope_scaling")):
        if scaling_kind(scaling) != "default":
            raise ModelError(
                f"config.json: {ARCHITECTURE} is served with a scaling of rotary embedding for each kind of layer "
                f"alone, in 'rope_parameters', got {shown(scaling)} for all"
            )
    _, share = split_share(config, default=_SHARE)
    return RopeConfig(number({**parameters, **config}, key, theta), share=share)


def _heads(config: HfConfig, kind: str, decoder: ModelConfig) -> tuple[int, int, int, int]:
    """`LayerHeads` of a kind, but for the layer: those with windows may have fields of their own."""
    count, dim, queries = decoder.num_kv_heads, decoder.head_dim, decoder.num_heads
    value = positive(config, "v_head_dim", most=MOST_HEAD_DIM)
    if kind == SLIDING:
        count = positive(config, "swa_num_key_value_heads", default=2 * count, most=MOST_MEMBERS)
        value = positive(config, "swa_v_head_dim", default=value, most=MOST_HEAD_DIM)
        for key, same in (("swa_head_dim", dim), ("swa_num_attention_heads", queries)):
            if positive(config, key, default=same) != same:
                raise ModelError(
                    f"config.json: {key!r} {config[key]} is not {same}, as that of other layers: not served"
                )
    if queries % count or value > dim:
        raise ModelError(
            f"config.json: {queries} attention heads of {dim} for {count} key-value heads, with values of {value}, of "
            f"{kind}: the former must be a multiple, and values no larger"
        )
    return count, dim, 0, value if value < dim else 0


class _OwnNames(ExpertWeights):
    """Sinks by their published name, where that is how a checkpoint has them."""

    def tensor(self, name: str) -> NDArray[np.float32]:
        published = f"{name.removesuffix('sinks')}attention_sink_bias"
        return super().tensor(published if name.endswith(".sinks") and published in self._known else name)


class MiMoV2(GroupedMoeDecoder):
    """Routed experts for the MLP in most layers, over heads a part of each of which is rotated."""

    config: MiMoV2Config
    drafting_names: ClassVar[DraftingNames | None] = DraftingNames(
        is_nested=True,
        layer="mtp.layers.0.",
        embedding_norm="mtp.layers.0.enorm",
        hidden_norm="mtp.layers.0.hnorm",
        join="mtp.layers.0.eh_proj",
        final_norm="mtp.layers.0.final_layernorm",
        has_window=True,
    )

    def view(self, weights: Weights) -> Weights:
        order = pairs_first(self.config.ropes[0], self.config.head_dim)
        return rotated(_OwnNames(weights), order)

    def norms_of(self, layer: int) -> Mapping[str, str]:
        is_drafting = layer == self.config.decoder_layers
        return {**self.norm_names, "before_mlp": "pre_mlp_layernorm"} if is_drafting else self.norm_names

    def load_norm(self, layer: int, norm: str, name: str) -> Tensor:
        return self._norm(name, self.config.value_scale if norm == "before_attention" else 1.0)

    def _sink_logits(self, at: str, layer: int) -> KernelArray | None:
        return super()._sink_logits(at, layer) if self.config.has_sinks(layer) else None
