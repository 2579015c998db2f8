"""ERNIE 4.5, dense and mixture of experts, and the head windows that its ``config.json`` may ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.errors import ModelError
from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.hf_config import (
    MOST_EXPERTS,
    HfConfig,
    check_served,
    decoder_config,
    flag,
    integer,
    number,
    positive,
    rope,
)
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.moe_config import MoeConfig
from headwise.runtime.models.moe_decoder import MoeDecoder, check_routing
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.models.rope import pairs_first
from headwise.runtime.models.values import shown
from headwise.runtime.models.weight_view import ExpertWeights, rotated
from headwise.runtime.models.weights import Weights

DENSE = "Ernie4_5ForCausalLM"
MOE = "Ernie4_5_MoeForCausalLM"

_SERVED_VALUES: dict[str, tuple[Any, ...]] = {"use_bias": (None, False), "moe_gate_act": (None, "softmax")}
_THETA = 500000.0
_RMS_NORM_EPS = 1e-5
_DENSE_HEAD_DIM = 128
"""Defaults of Hugging Face's ``Ernie4_5Config`` that differ from those of other decoders."""


def parse(config: HfConfig) -> ModelConfig:
    return parse_decoder({"head_dim": _DENSE_HEAD_DIM, **config}, DENSE)


def parse_moe(config: HfConfig) -> ModelConfig:
    decoder = parse_decoder(config, MOE)
    return replace(decoder, moe=moe_of(config, decoder.num_layers))


def parse_decoder(config: HfConfig, architecture: str) -> ModelConfig:
    """All but its experts."""
    check_served(config, _SERVED_VALUES)

    def layer_rope(kind: str) -> RopeConfig:
        return rope(config, default_theta=_THETA)

    decoder = decoder_config(
        {"rms_norm_eps": _RMS_NORM_EPS, **config},
        architecture,
        ropes=layer_rope,
        tie_embeddings=flag(config, "tie_word_embeddings", default=True),
    )
    return replace(decoder, policies=head_policies(config, decoder.num_layers, decoder.num_kv_heads))


def moe_of(config: HfConfig, num_layers: int) -> MoeConfig:
    """The ``moe_*`` fields, with the defaults of Hugging Face's ``Ernie4_5_MoeConfig``.

    Layer ``l`` has experts if ``moe_layer_start_index <= l <= moe_layer_end_index`` (-1: the last layer) and
    ``l + 1`` is a multiple of ``moe_layer_interval``.
    """
    start = integer(config, "moe_layer_start_index", default=1)
    end = integer(config, "moe_layer_end_index", default=-1, least=-1)
    interval = positive(config, "moe_layer_interval", default=1)
    stop = num_layers if end == -1 else min(end + 1, num_layers)
    experts, per_token = (
        positive(config, "moe_num_experts", default=64, most=MOST_EXPERTS),
        positive(config, "moe_k", default=6),
    )
    check_routing(config, {"moe_k": per_token}, {"moe_num_experts": experts})
    return MoeConfig(
        layers=tuple(layer for layer in range(start, stop) if (layer + 1) % interval == 0),
        num_experts=experts,
        experts_per_token=per_token,
        expert_size=positive(config, "moe_intermediate_size", default=1536),
        num_shared_experts=integer(config, "moe_num_shared_experts", default=2),
        norm_min=number(config, "moe_norm_min", 1e-12),
    )


# ---- head windows ----


def head_policies(config: HfConfig, num_layers: int, num_kv_heads: int) -> tuple[tuple[HeadPolicy, ...], ...]:
    """What every KV head sees, ``[num_layers][num_kv_heads]``, from four fields of ``config.json``.

    window_size:           most recent tokens that a windowed head sees. Missing or null: no head is windowed.
    sink_size:             first tokens that it sees besides, 0 by default; less than the window.
    window_attn_skip_freq: layers that are not windowed. An integer ``n``: every n-th, those where ``layer + 1`` is a
                           multiple of ``n``. A list of one 0 or 1 a layer: those with 0. Missing or null: none.
    head_wise_swa_ratio:   share of the KV heads that are windowed in a windowed layer, 1 by default: the last
                           ``round(ratio * num_kv_heads)`` of them (a half is rounded to the even number). That the
                           full heads come first is how PaddlePaddle's own servers read the field.

    Raises ModelError on values that make no sense.
    """
    details = ("sink_size", "window_attn_skip_freq", "head_wise_swa_ratio")
    if config.get("window_size") is None:
        lost = [key for key in details if config.get(key)]
        if lost:
            raise ModelError(f"config.json: {lost[0]!r} means nothing without 'window_size'; give it, or remove {lost}")
        return ((FULL,) * num_kv_heads,) * num_layers
    window, sink = positive(config, "window_size"), integer(config, "sink_size", default=0)
    if sink >= window:
        raise ModelError(f"config.json: 'sink_size' {sink} must be less than 'window_size' {window}")
    windowed = round(_swa_ratio(config) * num_kv_heads)
    mixed = (FULL,) * (num_kv_heads - windowed) + (HeadPolicy(window, sink),) * windowed
    return tuple(mixed if is_windowed else (FULL,) * num_kv_heads for is_windowed in _windowed(config, num_layers))


def _swa_ratio(config: HfConfig) -> float:
    ratio = config.get("head_wise_swa_ratio")
    if ratio is None:
        return 1.0
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 0 <= ratio <= 1:
        raise ModelError(f"config.json: 'head_wise_swa_ratio' must be a number from 0 to 1, got {shown(ratio)}")
    return float(ratio)


def _windowed(config: HfConfig, num_layers: int) -> list[bool]:
    """Whether each layer is windowed."""
    skip = config.get("window_attn_skip_freq")
    if skip is None:
        return [True] * num_layers
    if isinstance(skip, list):
        if len(skip) != num_layers or any(flag not in (0, 1) for flag in skip):
            raise ModelError(
                f"config.json: 'window_attn_skip_freq' must be a list of one 0 or 1 for each of {num_layers} layers, "
                f"got {shown(skip)}"
            )
        return [bool(flag) for flag in skip]
    if not isinstance(skip, int) or isinstance(skip, bool) or skip < 1:
        raise ModelError(
            "config.json: 'window_attn_skip_freq' must be a positive integer, or a list of one 0 or 1 a layer, "
            f"got {shown(skip)}"
        )
    return [(layer + 1) % skip != 0 for layer in range(num_layers)]


# ---- models ----


class Ernie45(Decoder):
    """The shared decoder. ERNIE rotates neighbours of a head."""

    def view(self, weights: Weights) -> Weights:
        order = pairs_first(self.config.ropes[0], self.config.head_dim, of_neighbours=True)
        return rotated(ExpertWeights(weights), order)


class Ernie45Moe(MoeDecoder, Ernie45):
    """Routed and shared experts for the MLP in most layers."""

    def correction(self, layer: int, at: str) -> NDArray[np.float32]:
        published, fused = (f"{at}{where}moe_statics.e_score_correction_bias" for where in ("", "gate."))
        return self._weights.tensor(fused if fused in self._weights.names else published).reshape(-1)
