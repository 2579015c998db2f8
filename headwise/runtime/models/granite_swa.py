"""Granite with windows (Granite SWA, Granite MoE SWA): learned sinks in all layers, rotations that differ by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from headwise.errors import ModelError
from headwise.runtime.models.granite import Granite, GraniteConfig, GraniteMoe, SharedMlp, scaled, with_shared
from headwise.runtime.models.hf_config import (
    LEAST_NUMBER,
    MOST_NUMBER,
    HfConfig,
    decoder_config,
    integer,
    named_layer_types,
    positive,
    rope,
)
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.moe_decoder import local_experts
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.models.rope import inverse_frequencies
from headwise.runtime.models.values import finite_number, shown
from headwise.runtime.models.weight_view import ExpertWeights
from headwise.runtime.models.weights import Weights
from headwise.runtime.models.windows import FULL, SLIDING

DENSE, MOE = "GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM"

_DEFAULTS = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
_MOE_DEFAULTS = {"rms_norm_eps": 1e-6}
"""Those of Hugging Face's configs."""
_WINDOW, _EVERY = 128, 4


def parse(config: HfConfig) -> GraniteConfig:
    own = {**_DEFAULTS, **config}
    return scaled(own, _decoder(own, DENSE))


def parse_moe(config: HfConfig) -> GraniteConfig:
    own = {**_MOE_DEFAULTS, **config}
    decoder = local_experts(own, _decoder(own, MOE), experts=8, per_token=2)
    shared = integer(own, "shared_intermediate_size", default=0)
    return scaled(own, with_shared(decoder, shared) if shared else decoder)


def _decoder(config: HfConfig, architecture: str) -> ModelConfig:
    decoder = decoder_config(
        config,
        architecture,
        layer_types=_layer_types(config),
        window=positive(config, "sliding_window", default=_WINDOW),
        sink_logits=True,
    )
    return replace(decoder, ropes=_ropes(config, decoder))


def _layer_types(config: HfConfig) -> Callable[[int], str]:
    return named_layer_types(config, lambda layer: SLIDING if layer % _EVERY else FULL)


def _ropes(config: HfConfig, decoder: ModelConfig) -> tuple[RopeConfig, ...]:
    """Of each layer: ``layer_rope_theta`` has a theta for each, 0 of one that rotates nothing."""
    thetas, turning = config.get("layer_rope_theta"), rope(config)
    if thetas is None:
        return decoder.ropes
    found = [finite_number(theta) for theta in thetas] if isinstance(thetas, list) else []
    numbers = [theta for theta in found if theta is not None and (theta == 0 or LEAST_NUMBER <= theta <= MOST_NUMBER)]
    if len(numbers) != decoder.num_layers or len(found) != decoder.num_layers:
        raise ModelError(
            f"config.json: 'layer_rope_theta' must be 0 or a positive number for each of {decoder.num_layers} layers, "
            f"up to {MOST_NUMBER:g}, got {shown(thetas)}"
        )
    ropes = tuple(replace(turning, theta=theta or turning.theta, is_none=not theta) for theta in numbers)
    for layer_rope in {each.theta: each for each in ropes}.values():
        inverse_frequencies(layer_rope, decoder.head_dim)  # raises on one that cannot be computed
    return ropes


class GraniteSwa(Granite):
    """Granite over a cache of which most layers keep a window alone."""


class GraniteMoeSwa(GraniteMoe):
    """The same with experts, and maybe a shared one."""

    router_name: ClassVar[str] = "router"
    shared_name: ClassVar[str] = "shared_mlp"

    def view(self, weights: Weights) -> Weights:
        moe = self.config.moe
        assert moe is not None, "parsed so"
        return SharedMlp(ExpertWeights(weights), moe.shared_size)
