"""Reads the fields that decoder models share from a Hugging Face ``config.json``, in its old and new spellings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.errors import ModelError
from headwise.kernels.fused import is_gated
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.models.rope import inverse_frequencies, rotation_scale, scaling_kind
from headwise.runtime.models.values import finite_number, shown

HfConfig = Mapping[str, Any]

_PARTIAL = "partial_rotary_factor"

_SERVED_VALUES: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    _PARTIAL: (None, 1),
    "use_bidirectional_attention": (None, False),
}
"""Fields that change what a decoder computes, and the values that are served: others would be silently wrong."""

MOST_LAYERS, MOST_HEAD_DIM, MOST_MEMBERS = 4096, 4096, 16384
MOST_HEADS, MOST_EXPERTS, MOST_POSITIONS = 4096, 1 << 16, 1 << 27
"""No model has more; members are (layer, KV head) pairs. A config that claims more would cost minutes and gigabytes."""
_MOST = 2**31 - 1
"""Of every other integer: what token ids and sizes of arrays go up to."""
LEAST_NUMBER, MOST_NUMBER = 1e-30, 1e12
"""Of numbers that are not whole: float32 holds what is computed with them."""


def positive(config: HfConfig, key: str, default: int | None = None, most: int = _MOST) -> int:
    """A positive integer field, of at most ``most``; raises ModelError naming it."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key!r} must be a positive integer, got {shown(value)}")
    return _at_most(most, key, value)


def integer(config: HfConfig, key: str, default: int, least: int = 0) -> int:
    """An integer field of at least ``least``; raises ModelError naming it."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ModelError(f"config.json: {key!r} must be an integer of at least {least}, got {shown(value)}")
    return _at_most(_MOST, key, value)


def number(config: HfConfig, key: str, default: float | None = None, *, optional: bool = False) -> float:
    """A positive number up to `MOST_NUMBER`; 0 if it is ``optional`` and missing. Raises ModelError naming it."""
    value = config.get(key)
    if value is None:
        value = 0.0 if optional else default
    found = finite_number(value)
    if optional and found == 0:
        return 0.0
    if found is None or found <= 0:
        raise ModelError(f"config.json: {key!r} must be a positive number, got {shown(value)}")
    if not LEAST_NUMBER <= found <= MOST_NUMBER:
        raise ModelError(f"config.json: {key!r} must be from {LEAST_NUMBER:g} to {MOST_NUMBER:g}, got {shown(value)}")
    return found


def flag(config: HfConfig, key: str, *, default: bool = False) -> bool:
    """True or false, or 1 or 0; null is false. Raises ModelError naming it: the text ``"false"`` is none of these."""
    value = config.get(key, default)
    if value is None:
        return False
    if not isinstance(value, int) or value not in (0, 1):
        raise ModelError(f"config.json: {key!r} must be true or false, got {shown(value)}")
    return bool(value)


def layer_list(config: HfConfig, key: str, num_layers: int) -> list[int] | None:
    """A list of layers by their numbers; None if it is missing. Raises ModelError naming it."""
    found = config.get(key)
    if found is None:
        return None
    if not isinstance(found, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in found):
        raise ModelError(f"config.json: {key!r} must be a list of the {num_layers} layers, got {shown(found)}")
    return found


def _at_most(most: int, key: str, value: int) -> int:
    if value > most:
        raise ModelError(f"config.json: {key!r} must be at most {most}, got {shown(value)}")
    return value


def mapping(config: HfConfig, key: str) -> HfConfig:
    """A field that holds an object, empty if it is missing; raises ModelError naming it."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ModelError(f"config.json: {key!r} must be an object, got {shown(value)}")
    return value


def text_of(config: HfConfig) -> HfConfig:
    """A multimodal model's config as that of its decoder alone."""
    text = mapping(config, "text_config")
    return {**{key: value for key, value in config.items() if key != "text_config"}, **text}


def rope(config: HfConfig, layer_type: str | None = None, default_theta: float = 10000.0) -> RopeConfig:
    """Rotary embedding: ``rope_parameters`` (maybe per layer type), or ``rope_theta`` and ``rope_scaling``."""
    parameters = mapping(config, "rope_parameters")
    if layer_type is not None and layer_type in parameters:
        parameters = mapping(parameters, layer_type)
    check_served(parameters)
    theta = number(parameters, "rope_theta", number(config, "rope_theta", default_theta))
    return RopeConfig(theta, _with_lengths(config, parameters or mapping(config, "rope_scaling")) or None)


def split_share(config: HfConfig, default: float) -> tuple[HfConfig, float]:
    """A config without ``partial_rotary_factor``, and what that says: the share of a head's elements that is rotated.

    For `RopeConfig.share`, of models that are served with a part; others refuse the field. Raises ModelError naming it.
    """
    parameters = mapping(config, "rope_parameters")
    value = parameters.get(_PARTIAL, config.get(_PARTIAL))
    share = finite_number(default if value is None else value)
    if share is None or not 0 < share <= 1:
        raise ModelError(f"config.json: {_PARTIAL!r} must be a number above 0 and up to 1, got {shown(value)}")
    own = {key: value for key, value in config.items() if key != _PARTIAL}
    if parameters:
        own["rope_parameters"] = {key: value for key, value in parameters.items() if key != _PARTIAL}
    return own, share


def _with_lengths(config: HfConfig, scaling: HfConfig) -> HfConfig:
    """A scaling with the lengths that follow from fields outside of it, as Hugging Face has them follow."""
    if scaling_kind(scaling) not in ("yarn", "longrope"):
        return scaling
    longest, key = positive(config, "max_position_embeddings", most=MOST_POSITIONS), "original_max_position_embeddings"
    trained = positive(config, key, default=positive(scaling, key, default=longest))
    factor = longest / trained if scaling.get("factor") is None else scaling["factor"]
    return {**scaling, key: trained, "factor": factor}


def named_layer_types(config: HfConfig, default: Callable[[int], str]) -> Callable[[int], str]:
    """The type of each layer: as ``layer_types`` names them, or where that is missing ``default``."""
    kinds = config.get("layer_types")
    if kinds is None:
        return default
    layers = positive(config, "num_hidden_layers", most=MOST_LAYERS)
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelError(
            f"config.json: 'layer_types' must name {layers} layers, as many as 'num_hidden_layers', got {shown(kinds)}"
        )
    return lambda layer: str(kinds[layer])


def rotated_layers(config: HfConfig, num_layers: int) -> list[bool]:
    """Which layers rotate queries and keys: ``no_rope_layers`` has a 1 for each that does."""
    interval, found = positive(config, "no_rope_layer_interval", default=4), config.get("no_rope_layers")
    if not found:
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(found, list) or len(found) < num_layers or not {*map(shown, found)} <= {"0", "1"}:
        raise ModelError(f"config.json: 'no_rope_layers' must be a 0 or 1 for {num_layers} layers, got {shown(found)}")
    return [bool(each) for each in found[:num_layers]]


def token_ids(config: HfConfig, key: str) -> tuple[int, ...]:
    """A field, as ``eos_token_id``, that may be missing, one id or several."""
    value = config.get(key)
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(type(i) is int and 0 <= i <= _MOST for i in ids):
        raise ModelError(
            f"config.json: {key!r}: token ids must be integers from 0 on, got {shown(value)}; the largest is {_MOST}"
        )
    return ids


def decoder_config(
    config: HfConfig,
    architecture: str,
    *,
    layer_types: Callable[[int], str] = lambda layer: "full_attention",
    ropes: Callable[[str], RopeConfig] | None = None,
    window: int = 0,
    activation: str = "silu",
    **changes: Any,
) -> ModelConfig:
    """The `ModelConfig` of a Llama-like ``config.json``.

    layer_types: ``"full_attention"`` or ``"sliding_attention"`` of a layer; sliding layers see ``window`` tokens
    ropes:       rotary embedding of a layer type, if it differs between them
    activation:  the MLP's, the only one that the model computes
    changes:     further fields of `ModelConfig`
    """
    check_served(config)
    given = (config.get(key) for key in ("hidden_activation", "hidden_act"))
    named = next((name for name in given if name is not None), activation)
    if named != activation:
        raise ModelError(
            f"config.json: {architecture} is served with the activation {activation!r} only, got {shown(named)}"
        )
    heads, hidden = positive(config, "num_attention_heads", most=MOST_HEADS), positive(config, "hidden_size")
    kv_heads = positive(config, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly: "
            "'num_attention_heads' must be a multiple of 'num_key_value_heads'"
        )
    head_dim = positive(config, "head_dim", default=hidden // heads, most=MOST_HEAD_DIM)
    if head_dim % 2:
        raise ModelError(f"config.json: rotary embedding needs an even 'head_dim', got {head_dim}")
    num_layers = positive(config, "num_hidden_layers", most=MOST_LAYERS)
    if num_layers * kv_heads > MOST_MEMBERS:
        raise ModelError(
            f"config.json: {num_layers} layers of {kv_heads} KV heads make {num_layers * kv_heads} heads; "
            f"at most {MOST_MEMBERS} can be served"
        )
    types = [layer_types(layer) for layer in range(num_layers)]
    policies = {"full_attention": FULL, "sliding_attention": HeadPolicy(window=window)}
    unknown = sorted(set(types) - set(policies))
    if unknown:
        raise ModelError(f"config.json: layer types {shown(unknown)} are not supported; known are {sorted(policies)}")
    rope_of = {kind: rope(config) if ropes is None else ropes(kind) for kind in set(types)}
    for rope_config in rope_of.values():
        for is_long in (False, True):  # raises on a scaling that cannot be computed
            inverse_frequencies(replace(rope_config, is_long=is_long), head_dim)
            rotation_scale(rope_config, head_dim)
    values: dict[str, Any] = {
        "architecture": architecture,
        "hidden_size": hidden,
        "intermediate_size": positive(config, "intermediate_size"),
        "num_layers": len(types),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": positive(config, "vocab_size"),
        "max_position": positive(config, "max_position_embeddings", most=MOST_POSITIONS),
        "rms_norm_eps": number(config, "rms_norm_eps", 1e-6),
        "tie_embeddings": flag(config, "tie_word_embeddings"),
        "policies": tuple((policies[kind],) * kv_heads for kind in types),
        "ropes": tuple(rope_of[kind] for kind in types),
        "attention_scale": head_dim**-0.5,
        "attention_bias": flag(config, "attention_bias"),
        "out_bias": flag(config, "attention_bias"),
        "mlp_bias": flag(config, "mlp_bias"),
        "mlp_gate": is_gated(activation),
        "eos_token_ids": token_ids(config, "eos_token_id"),
        "bos_token_id": next(iter(token_ids(config, "bos_token_id")), None),
    }
    return ModelConfig(**{**values, **changes})


def check_served(config: HfConfig, served_values: Mapping[str, tuple[Any, ...]] = _SERVED_VALUES) -> None:
    """Raise ModelError if a field has a value that is not among the served ones."""
    for key, served in served_values.items():
        if config.get(key) not in served:
            raise ModelError(
                f"config.json: {key!r} is {shown(config[key])}, which cannot be served; use a model without it"
            )
