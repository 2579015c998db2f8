"""Granite 3 and 4: Llama, with factors on embeddings, on what goes into the residual stream, on scores and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from headwise.runtime.models.base import ModelConfig
from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.hf_config import (
    HfConfig,
    check_served,
    decoder_config,
    named_layer_types,
    number,
    positive,
)
from headwise.runtime.models.moe_decoder import MoeDecoder, local_experts
from headwise.runtime.models.weight_view import ExpertWeights, FusedWeights
from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.base import Tensor

DENSE = "GraniteForCausalLM"
MOE = "GraniteMoeForCausalLM"
HYBRID = "GraniteMoeHybridForCausalLM"

_SERVED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope",),
    "num_local_experts": (None, 0),
    "normalization_function": (None, "rmsnorm"),
}
"""Of Granite 4. Those with experts have states of a state space model, too."""


@dataclass(frozen=True)
class GraniteConfig(ModelConfig):
    """entering_scale: factor on embeddings"""

    entering_scale: float = 1.0


def parse(config: HfConfig) -> GraniteConfig:
    return _scaled(config, decoder_config(config, DENSE))


def parse_moe(config: HfConfig) -> GraniteConfig:
    decoder = decoder_config(config, MOE)
    return _scaled(config, local_experts(config, decoder, experts=8, per_token=2))


def parse_hybrid(config: HfConfig) -> GraniteConfig:
    named = named_layer_types(config, lambda layer: "linear_attention")
    own = {**config, "intermediate_size": positive(config, "shared_intermediate_size", default=1024)}
    full = {"attention": "full_attention"}
    decoder = decoder_config(own, HYBRID, layer_types=lambda layer: full.get(named(layer), named(layer)))
    check_served(config, _SERVED_VALUES)
    return _scaled(config, decoder)


def _scaled(config: HfConfig, decoder: ModelConfig) -> GraniteConfig:
    """With the factors.

    What goes into the residual stream has one, ``m``. All that reads the stream is RMS norms, so it is kept divided by
    ``m``: ``norm(x, eps) = norm(x / m, eps / m^2)``.
    """
    factor = number(config, "residual_multiplier", 1.0)
    scaled = replace(
        decoder,
        attention_scale=number(config, "attention_multiplier", 1.0),
        logit_scale=1 / number(config, "logits_scaling", 1.0),
        rms_norm_eps=decoder.rms_norm_eps / factor**2,
    )
    return GraniteConfig(**vars(scaled), entering_scale=number(config, "embedding_multiplier", 1.0) / factor)


class Granite(Decoder):
    """The shared decoder over a residual stream of another scale."""

    config: GraniteConfig

    def entering(self, x: Tensor) -> Tensor:
        rows = self.ops.kernel_array(x)
        scaled = rows.astype(np.float32) * np.float32(self.config.entering_scale)
        return self.ops.from_kernel_array(scaled.astype(rows.dtype))


class GraniteHybrid(Granite):
    """One without states: its MLP is what the others have as shared experts, gate above up."""

    mlp_name: ClassVar[str] = "shared_mlp"
    mlp_parts: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "output_linear")

    def view(self, weights: Weights) -> Weights:
        size = self.config.intermediate_size
        return FusedWeights(weights, {"gate_proj": ("input_linear", 0), "up_proj": ("input_linear", size)})


class GraniteMoe(Granite, MoeDecoder):
    mlp_name: ClassVar[str] = "block_sparse_moe"
    router_name: ClassVar[str] = "router.layer"

    def view(self, weights: Weights) -> Weights:
        return _JoinedExperts(weights)


class _JoinedExperts(ExpertWeights):
    joined: ClassVar[tuple[str, str]] = ("input_linear.weight", "output_linear.weight")
