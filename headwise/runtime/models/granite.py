"""Granite 3 and 4: Llama, with factors on embeddings, on what goes into the residual stream, on scores and logits.

Granite 4 has state space models in most layers, and attention without positions in the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.hf_config import (
    HfConfig,
    check_served,
    decoder_config,
    named_layer_types,
    number,
    positive,
    rope,
)
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.moe_decoder import MoeDecoder, local_experts
from headwise.runtime.models.state_space import MAMBA_FIELDS, StateSpaceDecoder, ssm_config, with_head_dim, with_states
from headwise.runtime.models.weight_view import ExpertWeights, Reader, WeightView
from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.base import Tensor
from headwise.runtime.ops.quantised import Matrix

DENSE = "GraniteForCausalLM"
MOE = "GraniteMoeForCausalLM"
HYBRID = "GraniteMoeHybridForCausalLM"

_SERVED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": (None, "nope", "rope"),
    "normalization_function": (None, "rmsnorm"),
}
"""Of Granite 4."""

_WITH_STATES = ("mamba", "linear_attention")
_KINDS = dict.fromkeys(("attention", *_WITH_STATES), "full_attention")
"""Layers' kinds as this family has them, by what the shared decoder knows."""


@dataclass(frozen=True)
class GraniteConfig(ModelConfig):
    """entering_scale: factor on embeddings"""

    entering_scale: float = 1.0


def parse(config: HfConfig) -> GraniteConfig:
    return scaled(config, decoder_config(config, DENSE))


def parse_moe(config: HfConfig) -> GraniteConfig:
    decoder = decoder_config(config, MOE)
    return scaled(config, local_experts(config, decoder, experts=8, per_token=2))


def parse_hybrid(config: HfConfig) -> GraniteConfig:
    check_served(config, _SERVED_VALUES)
    named = named_layer_types(config, lambda layer: "linear_attention")
    has_experts = bool(config.get("num_local_experts", 8))
    own = config if has_experts else {**config, "intermediate_size": _shared_size(config)}
    decoder = decoder_config(
        own,
        HYBRID,
        layer_types=lambda layer: _KINDS.get(named(layer), named(layer)),
        ropes=lambda kind: replace(rope(own), is_none=config.get("position_embedding_type") != "rope"),
    )
    layers = [layer for layer in range(decoder.num_layers) if named(layer) in _WITH_STATES]
    if layers:
        ssm = ssm_config(with_head_dim(config), MAMBA_FIELDS, layers, has_group_norms=False, eps=decoder.rms_norm_eps)
        decoder = with_states(decoder, ssm)
    if has_experts:
        decoder = with_shared(local_experts(config, decoder, experts=8, per_token=2), _shared_size(config))
    return scaled(config, decoder)


def _shared_size(config: HfConfig) -> int:
    return positive(config, "shared_intermediate_size", default=1024)


def with_shared(decoder: ModelConfig, size: int) -> ModelConfig:
    moe = decoder.moe
    assert moe is not None, "made so"
    return replace(decoder, moe=replace(moe, num_shared_experts=1, shared_expert_size=size))


def scaled(config: HfConfig, decoder: ModelConfig) -> GraniteConfig:
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


class GraniteMoe(Granite, MoeDecoder):
    mlp_name: ClassVar[str] = "block_sparse_moe"
    router_name: ClassVar[str] = "router.layer"

    def view(self, weights: Weights) -> Weights:
        return _JoinedExperts(weights)


class GraniteHybrid(StateSpaceDecoder, GraniteMoe):
    """All tokens go through a shared MLP, which is all there is where no experts are."""

    shared_name: ClassVar[str] = "shared_mlp"

    def view(self, weights: Weights) -> Weights:
        moe = self.config.moe
        size = self.config.intermediate_size if moe is None else moe.shared_size
        return SharedMlp(_JoinedExperts(weights), size)

    def load_mlp(self, layer: int, at: str) -> Any:
        return super().load_mlp(layer, at if self.config.moe else f"{at}{self.shared_name}.")


class _JoinedExperts(ExpertWeights):
    joined: ClassVar[tuple[str, str]] = ("input_linear.weight", "output_linear.weight")


class SharedMlp(WeightView):
    """What is asked for below a layer's experts, and a checkpoint has beside them, with gate above up."""

    def __init__(self, source: Weights, size: int) -> None:
        super().__init__(source)
        self._known = frozenset(source.names)
        self._parts = {
            "gate_proj": ("input_linear", 0),
            "up_proj": ("input_linear", size),
            "down_proj": ("output_linear", 0),
        }

    def read_rows(self, source: Reader, name: str, start: int, stop: int) -> NDArray[Any]:
        name, first = self._place(name)
        return super().read_rows(source, name, first + start, first + stop)

    def read_columns(self, source: Reader, name: str, start: int, stop: int) -> NDArray[Any]:
        return super().read_columns(source, self._place(name)[0], start, stop)

    def kept_rows(self, name: str, start: int, stop: int) -> Matrix | None:
        name, first = self._place(name)
        return self._source.kept_rows(name, first + start, first + stop)

    def kept_columns(self, name: str, start: int, stop: int) -> Matrix | None:
        return self._source.kept_columns(self._place(name)[0], start, stop)

    def _place(self, name: str) -> tuple[str, int]:
        """The name of the matrix, and the row there that the projection begins with."""
        name = name.replace(".block_sparse_moe.shared_mlp.", ".shared_mlp.")
        layer, _, last = name.rpartition(".")
        at, _, part = layer.rpartition(".")
        if name in self._known or not at.endswith(".shared_mlp") or part not in self._parts:
            return name, 0
        joined, first = self._parts[part]
        return f"{at}.{joined}.{last}", first
