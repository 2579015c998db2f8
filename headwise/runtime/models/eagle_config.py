"""Reads the ``config.json`` of an EAGLE-3 head, and what it takes of the model that it drafts for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headwise.cache_controller.policy import FULL
from headwise.errors import ModelError
from headwise.runtime.models.hf_config import HfConfig, check_served, decoder_config, flag, mapping, positive
from headwise.runtime.models.model_config import EagleConfig, LayerHeads, ModelConfig
from headwise.runtime.models.values import shown

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")

_LAYERS = "eagle_aux_hidden_state_layer_ids"
_NO = (None, False)
_SERVED_VALUES: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (1,),
    "attention_bias": _NO,
    "bias": _NO,
    "qkv_bias": _NO,
    "mlp_bias": _NO,
    "fc_norm": _NO,
    "norm_before_fc": _NO,
    "norm_output": _NO,
    "parallel_drafting": _NO,
    "pard_token": (None,),
    "ptd_token_id": (None,),
}
"""Fields by which a head computes otherwise, or is more than one layer that drafts one token after the other."""
_SERVED_EAGLE_VALUES: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (None, True),
    "use_input_layernorm_in_first_layer": (None, True),
    "use_last_layernorm": (None, True),
    "use_mtp_layernorm": _NO,
    "norm_before_fc": _NO,
    "parallel_draft_step": (None, 1),
}
"""The same of ``eagle_config``."""


def eagle_config(config: HfConfig, target: ModelConfig) -> EagleConfig:
    """The head of that ``config.json`` for this model.

    Raises:
        ModelError: the head cannot be served, or not beside this model.
    """
    _check_target(target)
    names = config.get("architectures")
    if not isinstance(names, list) or not any(name in ARCHITECTURES for name in names):
        raise ModelError(
            f"config.json: 'architectures' is {shown(names)}, which is no EAGLE-3 head that is served; give one of "
            f"{' or '.join(ARCHITECTURES)}"
        )
    own = mapping(config, "eagle_config")
    check_served(config, _SERVED_VALUES)
    check_served(own, _SERVED_EAGLE_VALUES)
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise ModelError(f"config.json: 'layer_types' is {shown(kinds)}; heads with full attention are served")
    plain = {key: value for key, value in config.items() if key != "layer_types"}
    layer = replace(decoder_config(plain, ARCHITECTURES[0]), tie_embeddings=False)
    _check_fits(config, layer, target)
    vocab_size = positive(config, "draft_vocab_size", default=layer.vocab_size)
    if vocab_size > layer.vocab_size:
        raise ModelError(
            f"config.json: 'draft_vocab_size' {vocab_size} is more than 'vocab_size' {layer.vocab_size}: give a head "
            "that drafts tokens of the model"
        )
    taken = _taken(config, own, target.decoder_layers)
    return EagleConfig(layer, vocab_size, taken, norms_residual=flag(config, "norm_before_residual"))


def _check_target(target: ModelConfig) -> None:
    """Raise ModelError if attention of the model's kind is none that a head's layer has."""
    reasons = {
        "latent attention": target.mla is not None,
        "compressed attention": target.compressed is not None,
        "states in some layers": target.states is not None,
        "attention within chunks": target.chunk > 0,
        "layers of unlike heads": bool(target.layer_heads or target.query_heads),
        "attention scores with a cap": target.attention_softcap > 0,
        "attention scores of another scale": abs(target.attention_scale * target.head_dim**0.5 - 1) > 1e-6,
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    if why:
        raise ModelError(
            f"{target.architecture} has {why}, which no EAGLE-3 head is served with: leave draft_model out"
        )


def _check_fits(config: HfConfig, layer: ModelConfig, target: ModelConfig) -> None:
    """Raise ModelError unless the head's sizes are those of the model where they have to be."""
    sizes = {
        "hidden_size": (layer.hidden_size, target.hidden_size),
        "target_hidden_size": (positive(config, "target_hidden_size", target.hidden_size), target.hidden_size),
        "vocab_size": (layer.vocab_size, target.vocab_size),
        "num_attention_heads": (layer.num_heads, target.num_heads),
        "head_dim": (layer.head_dim, target.head_dim),
    }
    for key, (own, wanted) in sizes.items():
        if own != wanted:
            raise ModelError(
                f"config.json: {key!r} is {own}, and {wanted} of the model that it is to draft for: give a head that "
                "was made for the model, and with heads as it has them"
            )


def _taken(config: HfConfig, own: HfConfig, layers: int) -> tuple[int, ...]:
    """Layers before which the residual stream is taken; vLLM's defaults where the head has no list, or an empty one."""
    given = config.get(_LAYERS) or own.get(_LAYERS)
    found: Sequence[Any] = (2, layers // 2, layers - 3)
    if given:
        found = given if isinstance(given, list) else [given]
    if not all(type(layer) is int and 0 <= layer < layers for layer in found):
        raise ModelError(
            f"config.json: {_LAYERS!r} is {shown(given)}, for layers {shown(list(found))}; the model has the layers 0 "
            f"to {layers - 1}: give a list of some of these"
        )
    return tuple(sorted(set(found)))


def with_eagle(config: ModelConfig, eagle: EagleConfig) -> ModelConfig:
    """``config`` with the head's layer behind the decoder's."""
    layers, own = config.num_layers, eagle.layer
    heads: tuple[LayerHeads, ...] = ()
    if own.num_kv_heads != config.num_kv_heads:
        heads = (*map(config.heads_of, range(layers)), LayerHeads(own.num_kv_heads, own.head_dim, layers))
    return replace(
        config,
        num_layers=layers + 1,
        draft_layers=1,
        policies=(*config.policies, (FULL,) * own.num_kv_heads),
        ropes=(*config.ropes, *own.ropes),
        layer_heads=heads,
        eagle=eagle,
    )
