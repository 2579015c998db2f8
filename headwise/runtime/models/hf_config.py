"""Reads the fields that decoder models share from a Hugging Face ``config.json``, in its old and new spellings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.errors import ModelError
from headwise.runtime.models.base import ModelConfig, RopeConfig
from headwise.runtime.models.rope import scaling_kind

HfConfig = Mapping[str, Any]


def positive(config: HfConfig, key: str, default: int | None = None) -> int:
    """A positive integer field; raises ModelError naming it."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key!r} must be a positive integer, got {value!r}")
    return value


def rope(config: HfConfig, layer_type: str | None = None, default_theta: float = 10000.0) -> RopeConfig:
    """Rotary embedding: ``rope_parameters`` (maybe per layer type), or ``rope_theta`` and ``rope_scaling``."""
    parameters = config.get("rope_parameters") or {}
    if layer_type is not None and layer_type in parameters:
        parameters = parameters[layer_type]
    if parameters:
        return _checked(RopeConfig(float(parameters.get("rope_theta", default_theta)), parameters))
    return _checked(RopeConfig(float(config.get("rope_theta", default_theta)), config.get("rope_scaling")))


def _checked(rope_config: RopeConfig) -> RopeConfig:
    scaling_kind(rope_config.scaling)
    return rope_config


def token_ids(value: Any) -> tuple[int, ...]:
    """``eos_token_id`` may be missing, one id or several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)


def decoder_config(
    config: HfConfig,
    architecture: str,
    *,
    layer_types: Callable[[int], str] = lambda layer: "full_attention",
    ropes: Callable[[str], RopeConfig] | None = None,
    window: int = 0,
    **changes: Any,
) -> ModelConfig:
    """The `ModelConfig` of a Llama-like ``config.json``.

    layer_types: ``"full_attention"`` or ``"sliding_attention"`` of a layer; sliding layers see ``window`` tokens
    ropes:       rotary embedding of a layer type, if it differs between them
    changes:     further fields of `ModelConfig`
    """
    heads, hidden = positive(config, "num_attention_heads"), positive(config, "hidden_size")
    kv_heads = positive(config, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ModelError(f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
    head_dim = positive(config, "head_dim", default=hidden // heads)
    types = [layer_types(layer) for layer in range(positive(config, "num_hidden_layers"))]
    policies = {"full_attention": FULL, "sliding_attention": HeadPolicy(window=window)}
    unknown = sorted(set(types) - set(policies))
    if unknown:
        raise ModelError(f"config.json: layer types {unknown} are not supported; known are {sorted(policies)}")
    values: dict[str, Any] = {
        "architecture": architecture,
        "hidden_size": hidden,
        "intermediate_size": positive(config, "intermediate_size"),
        "num_layers": len(types),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": positive(config, "vocab_size"),
        "max_position": positive(config, "max_position_embeddings"),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "policies": tuple((policies[kind],) * kv_heads for kind in types),
        "ropes": tuple(rope(config) if ropes is None else ropes(kind) for kind in types),
        "attention_scale": head_dim**-0.5,
        "attention_bias": bool(config.get("attention_bias", False)),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "eos_token_ids": token_ids(config.get("eos_token_id")),
        "bos_token_id": next(iter(token_ids(config.get("bos_token_id"))), None),
    }
    return ModelConfig(**{**values, **changes})
