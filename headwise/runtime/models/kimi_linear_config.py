"""What a Kimi-Linear's ``config.json`` says, by its own names of fields and by those that transformers writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from headwise.cache_controller.policy import FULL, STATE
from headwise.errors import ModelError
from headwise.kernels.state_layout import StateSizes
from headwise.runtime.models.deepseek import parse_latents
from headwise.runtime.models.deepseek_routing import ungrouped_moe
from headwise.runtime.models.hf_config import (
    MOST_EXPERTS,
    MOST_HEAD_DIM,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_MEMBERS,
    MOST_POSITIONS,
    HfConfig,
    check_served,
    flag,
    integer,
    mapping,
    named_layer_types,
    positive,
)
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.models.states_config import KdaConfig
from headwise.runtime.models.values import shown

ARCHITECTURE = "KimiLinearForCausalLM"
MOST_CONVOLUTION = 64

_LINEAR, _FULL = "linear_attention", "full_attention"
_OWN = "linear_attn_config"
_SERVED_VALUES: dict[str, tuple[Any, ...]] = {
    "mla_use_nope": (None, True),
    "attention_bias": (None, False),
    "moe_router_activation_func": (None, "sigmoid"),
}
_NOT_READ = ("rope_scaling", "rope_parameters", "rope_theta", "layer_types")
"""Of what is rotated, which nothing is; and what is read here."""

Read = Callable[[HfConfig, str], Any]


def _count(most: int) -> Read:
    return lambda config, key: positive(config, key, most=most)


_NAMES: Mapping[str, tuple[str, Read]] = {
    "model_max_length": ("max_position_embeddings", _count(MOST_POSITIONS)),
    "num_experts": ("num_local_experts", _count(MOST_EXPERTS)),
    "num_experts_per_token": ("num_experts_per_tok", _count(MOST_EXPERTS)),
    "num_shared_experts": ("n_shared_experts", lambda config, key: integer(config, key, default=0)),
    "num_expert_group": ("n_group", lambda config, key: positive(config, key, default=1)),
    "topk_group": ("topk_group", lambda config, key: positive(config, key, default=1)),
    "moe_renormalize": ("norm_topk_prob", lambda config, key: flag(config, key, default=True)),
}
"""Fields that have a name of transformers', too: that, and how they are read."""


def parse(config: HfConfig) -> ModelConfig:
    """Read a ``config.json``; raises ModelError on what is wrong or not served."""
    check_served(config, _SERVED_VALUES)
    layers = positive(config, "num_hidden_layers", most=MOST_LAYERS)
    states = _states(config, layers)
    decoder = parse_latents(_as_deepseek(config), ARCHITECTURE, ungrouped_moe)
    rows = ((STATE,) * states.members if layer in states.layers else (FULL,) for layer in range(layers))
    return replace(
        decoder, policies=tuple(rows), ropes=(RopeConfig(10000.0, is_none=True),) * layers, states=states,
        mla=None if decoder.mla is None else replace(decoder.mla, in_halves=True),
    )  # fmt: skip


def _as_deepseek(config: HfConfig) -> HfConfig:
    """The same by DeepSeek's names, of which each was read by the file's own."""
    told = {name: (_name(config, name), read) for name, (_, read) in _NAMES.items()}
    found = {name: read(config, key) for name, (key, read) in told.items()}
    experts, chosen, groups = (found[name] for name in ("num_experts", "num_experts_per_token", "num_expert_group"))
    of_groups = found["topk_group"]
    if experts % groups or of_groups > groups or chosen > experts // groups * of_groups or experts < 2 * groups:
        keys = {name: repr(key) for name, (key, _) in told.items()}
        raise ModelError(
            f"config.json: {keys['num_experts_per_token']} {chosen} cannot be chosen from 'topk_group' {of_groups} of "
            f"{keys['num_expert_group']} {groups} equal groups of {keys['num_experts']} {experts}; a group has two or "
            "more"
        )
    if groups > 1 and not flag(config, "use_grouped_topk", default=True):
        raise ModelError(
            f"config.json: 'use_grouped_topk' is false with {groups} groups of experts, which cannot be served: "
            "experts are chosen within groups"
        )
    renamed = {_NAMES[name][0]: value for name, value in found.items()}
    left = {key: value for key, value in config.items() if key not in _NOT_READ}
    return {**left, **renamed, "n_routed_experts": experts}


def _name(config: HfConfig, name: str) -> str:
    """By which of a field's names the file has it; the published one, where it has it by none."""
    other = _NAMES[name][0]
    return other if config.get(name) is None and config.get(other) is not None else name


def _states(config: HfConfig, layers: int) -> KdaConfig:
    """Layers, heads and sizes: of `_OWN`, or as transformers writes them."""
    own = mapping(config, _OWN)
    heads = _size(config, own, "num_heads", "linear_num_heads", MOST_HEADS)
    dim = _size(config, own, "head_dim", "linear_head_dim", MOST_HEAD_DIM)
    width = _size(config, own, "short_conv_kernel_size", "linear_conv_kernel_dim", MOST_CONVOLUTION)
    linear = _layers(config, own, layers)
    if not 0 < len(linear) < layers:
        raise ModelError(
            f"config.json: of {layers} layers {len(linear)} have Kimi Delta Attention, by {_OWN!r} or 'layer_types'; "
            "some must, and some must have latent attention, as states alone are not served"
        )
    if len(linear) * heads > MOST_MEMBERS:
        raise ModelError(
            f"config.json: {len(linear)} layers of {heads} heads make {len(linear) * heads}; at most {MOST_MEMBERS} "
            "can be served"
        )
    return KdaConfig(linear, heads, StateSizes(dim, dim, 1, width), rank=dim)


def _size(config: HfConfig, own: HfConfig, name: str, other: str, most: int) -> int:
    """A size of `_OWN`, or by transformers' name for it."""
    if own.get(name) is None and config.get(other) is not None:
        return positive(config, other, most=most)
    return positive({f"{_OWN}.{name}": own.get(name)}, f"{_OWN}.{name}", most=most)


def _layers(config: HfConfig, own: HfConfig, layers: int) -> tuple[int, ...]:
    """Those with states, from 0 on: by ``layer_types``, or by two lists that count from 1 on."""
    if config.get("layer_types") is not None:
        kind_of = named_layer_types(config, lambda layer: _FULL)
        kinds = [kind_of(layer) for layer in range(layers)]
        unknown = sorted({*kinds} - {_LINEAR, _FULL})
        if unknown:
            raise ModelError(
                f"config.json: layer types {shown(unknown)} are not supported; known are {[_FULL, _LINEAR]}"
            )
        return tuple(layer for layer, kind in enumerate(kinds) if kind == _LINEAR)
    linear, full = (_numbers(own, name, layers) for name in ("kda_layers", "full_attn_layers"))
    wrong = next((layer for layer in range(1, layers + 1) if (layer in linear) is (layer in full)), None)
    if wrong is not None:
        where = "both" if wrong in linear else "none"
        raise ModelError(
            f"config.json: layer {wrong} is in {where} of 'kda_layers' and 'full_attn_layers' of {_OWN!r}; each of the "
            f"{layers} layers, counted from 1 on, must be in one of them"
        )
    return tuple(sorted(layer - 1 for layer in linear))


def _numbers(own: HfConfig, name: str, layers: int) -> set[int]:
    found = own.get(name)
    if not isinstance(found, list) or not all(type(layer) is int and 1 <= layer <= layers for layer in found):
        raise ModelError(
            f"config.json: '{_OWN}.{name}' must be a list of layers from 1 to {layers}, got {shown(found)}; or "
            "'layer_types' must name all of them"
        )
    return {*found}
