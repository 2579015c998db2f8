"""Reads the ``config.json`` of a Step-3.5 or of a Step-3.7's text, as it was published or as transformers writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headwise.errors import ModelError
from headwise.kernels.fused import SWIGLU_LIMIT
from headwise.runtime.models.deepseek_routing import RoutedFields, named_sparse_layers, ungrouped_moe
from headwise.runtime.models.hf_config import (
    MOST_HEADS,
    MOST_LAYERS,
    HfConfig,
    check_served,
    decoder_config,
    integer,
    mapping,
    named_layer_types,
    number,
    positive,
    rope,
    split_share,
    text_of,
)
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.models.values import finite_number, shown
from headwise.runtime.models.windows import FULL, SLIDING

ARCHITECTURE, MULTIMODAL = "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"

_ALIASES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
"""Published names, and Hugging Face's."""
_SERVED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "gating": (None, True, "per-head"),
    "use_head_wise_attn_gate": (None, True),
    "use_qk_norm": (None, True),
    "zero_centered": (None, True),
    "sink": (None, False),
    "norm_expert_weight": (None, True),
    "use_moe_router_bias": (None, True),
    "moe_router_activation": (None, "sigmoid"),
    "use_rope_layers": (None, []),
    "yarn_only_types": (None, [], [FULL]),
    "sparse_attention_config": (None, {}),
}
_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
}
"""Those of Hugging Face's ``Step3p7TextConfig``."""
_FIELDS = RoutedFields(scale="moe_router_scaling_factor")
_FIRST_SPARSE = 3
_PER_LAYER = ("layer_types", "mlp_layer_types", "rope_theta", "partial_rotary_factors")


@dataclass(frozen=True)
class Step3Config(ModelConfig):
    """
    clipped:       layers whose routed experts' activation is `clipped_silu`
    shared_limits: ``[num_layers]``, of dense MLPs and shared experts, as `SWIGLU_LIMIT` of routed ones; 0: none
    """

    clipped: frozenset[int] = frozenset()
    shared_limits: tuple[float, ...] = ()

    @property
    def side_elements(self) -> int:
        """See `ModelConfig.side_elements`: of heads' gates."""
        return self.hidden_size * sum(map(self.query_heads_of, range(self.num_layers)))


def parse_multimodal(config: HfConfig) -> Step3Config:
    """The text of a Step-3.7."""
    return parse(text_of(config))


def parse(config: HfConfig) -> Step3Config:
    check_served(config, _SERVED_VALUES)
    layers = positive(config, "num_hidden_layers", most=MOST_LAYERS)
    own = {**_DEFAULTS, **_trimmed(config, layers)}
    own |= {ours: config[theirs] for theirs, ours in _ALIASES.items() if config.get(theirs) is not None}
    kinds = named_layer_types(own, lambda layer: FULL)
    has_windows = any(kinds(layer) == SLIDING for layer in range(layers))
    plain = {key: value for key, value in own.items() if key not in ("rope_parameters", "rope_scaling", "rope_theta")}
    decoder = decoder_config(
        plain,
        ARCHITECTURE,
        layer_types=kinds,
        ropes=lambda kind: _rope(own, kind, [kinds(layer) for layer in range(layers)].index(kind)),
        window=positive(own, "sliding_window") if has_windows else 0,
    )
    shared = positive(own, "share_expert_dim")
    moe = ungrouped_moe({**own, "n_shared_experts": 1, "mlp_layer_types": None}, layers, _FIELDS)
    limits = _limits(own, "swiglu_limits", layers)
    if not {*limits} <= {0.0, SWIGLU_LIMIT}:
        raise ModelError(
            f"config.json: 'swiglu_limits' {shown(own['swiglu_limits'])} are served where each is 0 or {SWIGLU_LIMIT}"
        )
    fields = {
        **vars(decoder),
        **_query_heads(own, decoder, kinds),
        "attention_scale": number(own, "query_pre_attn_scalar", decoder.head_dim) ** -0.5,
        "moe": replace(moe, layers=_sparse(own, layers), shared_expert_size=shared),
        "clipped": frozenset(layer for layer, limit in enumerate(limits) if limit),
        "shared_limits": _limits(own, "swiglu_limits_shared", layers),
    }
    return Step3Config(**fields)


def _trimmed(config: HfConfig, layers: int) -> dict[str, Any]:
    """Without what lists of layers have of those that draft, behind the others."""
    drafting = integer(config, "num_nextn_predict_layers", 0)
    own = dict(config)
    for key in _PER_LAYER:
        found = config.get(key)
        if isinstance(found, list) and len(found) == layers + drafting:
            own[key] = found[:layers]
    return own


def _limits(config: HfConfig, key: str, layers: int) -> tuple[float, ...]:
    """Of each layer; 0 where there is none."""
    found = config.get(key)
    if found is None:
        return (0.0,) * layers
    numbers = [0.0 if each is None else finite_number(each) for each in found] if isinstance(found, list) else []
    limits = tuple(each for each in numbers[:layers] if each is not None and 0 <= each <= 1e12)
    if len(limits) != layers:
        raise ModelError(
            f"config.json: {key!r} must be a number or null for each of {layers} layers, got {shown(found)}"
        )
    return limits


def _sparse(config: HfConfig, layers: int) -> tuple[int, ...]:
    """Layers with experts: as they are named or numbered, or all but the first few."""
    named = config.get("moe_layers_enum")
    parts = named.split(",") if isinstance(named, str) else named
    default = range(min(_FIRST_SPARSE, layers), layers)
    if parts is not None and config.get("mlp_layer_types") is None:
        is_list = isinstance(parts, list) and len(parts) <= 2 * MOST_LAYERS
        texts = [str(part).strip() for part in parts] if is_list else []
        if not texts or not all(text.isascii() and text.isdecimal() and len(text) < 6 for text in texts):
            raise ModelError(f"config.json: 'moe_layers_enum' must be layers' numbers with commas, got {shown(named)}")
        return tuple(sorted({int(text) for text in texts if int(text) < layers}))
    return named_sparse_layers(config, tuple(default), layers)


def _query_heads(config: HfConfig, decoder: ModelConfig, kinds: Any) -> dict[str, Any]:
    """Fields of a `ModelConfig`: layers with windows may have more query heads, or less."""
    other, heads = mapping(config, "attention_other_setting"), decoder.num_heads
    for key, same in (("num_attention_groups", decoder.num_kv_heads), ("head_dim", decoder.head_dim)):
        if positive(other, key, default=same) != same:
            raise ModelError(
                f"config.json: 'attention_other_setting' has {key!r} {other[key]}, others {same}: not served"
            )
    key = "num_sliding_attention_heads"
    count = positive(config, key, default=positive(other, "num_attention_heads", default=heads), most=MOST_HEADS)
    if count % decoder.num_kv_heads:
        raise ModelError(
            f"config.json: {count} attention heads of layers with windows cannot share {decoder.num_kv_heads} "
            "key-value heads evenly"
        )
    counts = tuple(count if kinds(layer) == SLIDING else heads for layer in range(decoder.num_layers))
    return {"num_heads": min(counts), "query_heads": counts if len({*counts}) > 1 else ()}


def _rope(config: HfConfig, kind: str, first: int) -> RopeConfig:
    """Of a kind of layers, by what its ``first`` one has: only layers that see all tokens have a scaling."""
    parameters = mapping(config, "rope_parameters")
    nested = mapping(parameters, kind)
    if not nested:
        theta, share = _of_layer(config, "rope_theta", first), _of_layer(config, "partial_rotary_factors", first)
        scaling = mapping(config, "rope_scaling") or parameters
        nested = {"rope_type": "default", **(scaling if kind == FULL else {})}
        nested |= {} if theta is None else {"rope_theta": theta}
        nested |= {} if share is None else {"partial_rotary_factor": share}
    plain, share = split_share({**config, "rope_parameters": nested, "rope_theta": None}, default=1.0)
    return replace(rope(plain), share=share)


def _of_layer(config: HfConfig, key: str, layer: int) -> Any:
    """A field that has one value for all layers, or one for each."""
    found = config.get(key)
    if not isinstance(found, Sequence) or isinstance(found, str):
        return found
    if layer >= len(found):
        raise ModelError(f"config.json: {key!r} must have a number for each layer, got {shown(found)}")
    return found[layer]
