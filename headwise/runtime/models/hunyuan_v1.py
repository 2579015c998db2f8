"""Hunyuan (first version), dense or with experts: queries and keys are normed once they are rotated.

A norm's weights do not turn with a head's elements, so its rotation is done before attention is given queries and keys,
which turns them no more: layers are computed one by one on a CPU, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.kernels.experts import NORM_MIN
from headwise.kernels.fused import Attention
from headwise.runtime.models.base import AttentionLayer, Rotation
from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.hf_config import (
    MOST_EXPERTS,
    HfConfig,
    check_served,
    decoder_config,
    mapping,
    number,
    positive,
)
from headwise.runtime.models.layers import Layer
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.moe_config import MoeConfig
from headwise.runtime.models.moe_decoder import MoeDecoder
from headwise.runtime.models.values import shown
from headwise.runtime.models.weight_view import ExpertWeights
from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.base import KernelArray, Tensor

DENSE, MOE = "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM"

_SERVED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "use_qk_norm": (None, True),
    "use_cla": (None, False),
    "attention_bias": (None, False),
    "use_mla": (None, False),
}
_MOE_SERVED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "use_mixed_mlp_moe": (None, True),
    "moe_layer_num_skipped": (None, 0),
    "norm_topk_prob": (None, True),
    "routed_scaling_factor": (None, False, 1.0),
}
_DEFAULTS = {"rms_norm_eps": 1e-5}
"""Those of Hugging Face's configs."""


def parse(config: HfConfig) -> ModelConfig:
    check_served(config, _SERVED_VALUES)
    return decoder_config({**_DEFAULTS, **_with_theta(config)}, DENSE)


def parse_moe(config: HfConfig) -> ModelConfig:
    check_served(config, {**_SERVED_VALUES, **_MOE_SERVED_VALUES})
    decoder = decoder_config({**_DEFAULTS, **_with_theta(config)}, MOE)
    size, layers = decoder.intermediate_size, decoder.num_layers
    experts = _of_all_layers(config, "num_experts", layers, default=1, most=MOST_EXPERTS)
    chosen = _of_all_layers(config, "moe_topk", layers, default=1, most=experts)
    for key, same in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
        if _of_all_layers(config, key, layers, default=same) != same:
            raise ModelError(f"config.json: {key!r} is {shown(config[key])}, and {same} in each layer is served")
    every = tuple(range(layers))
    return replace(decoder, moe=MoeConfig(every, experts, chosen, size, num_shared_experts=1, norm_min=NORM_MIN))


def _of_all_layers(config: HfConfig, key: str, layers: int, **limits: int) -> int:
    """A positive integer that may be given once for all layers, or for each, the same."""
    found = config.get(key)
    if not isinstance(found, list):
        return positive(config, key, **limits)
    if len(found) < layers or any(each != found[0] for each in found[:layers]):
        raise ModelError(
            f"config.json: {key!r} must be the same number for each of {layers} layers, got {shown(found)}"
        )
    return positive({key: found[0]}, key, **limits)


def _with_theta(config: HfConfig) -> HfConfig:
    """With the scaling ``alpha``, that makes a larger theta for all lengths (NTK-aware), as part of that."""
    key = next((name for name in ("rope_parameters", "rope_scaling") if config.get(name)), "rope_scaling")
    scaling = mapping(config, key)
    if scaling.get("alpha") is None or scaling.get("rope_type", scaling.get("type")) != "dynamic":
        return config
    theta = number(scaling, "rope_theta", number(config, "rope_theta", 1e4))
    heads, hidden = positive(config, "num_attention_heads"), positive(config, "hidden_size")
    dim = positive(config, "head_dim", default=hidden // heads)
    if dim < 4:
        raise ModelError(f"config.json: a scaling by 'alpha' needs a 'head_dim' of at least 4, got {dim}")
    larger = theta * number(scaling, "alpha", 1.0) ** (dim / (dim - 2))
    return {**config, key: None, "rope_theta": larger}


class HunyuanV1(Decoder):
    norm_names: ClassVar[Mapping[str, str]] = {
        **Decoder.norm_names,
        "query": "self_attn.query_layernorm",
        "key": "self_attn.key_layernorm",
    }

    def load_more(self) -> None:
        self._unturned = self.ops.upload(np.zeros(self.config.head_dim // 2, np.float32))

    def rotations(self, positions: KernelArray) -> list[Rotation]:
        self._still = self.ops.rotation(positions, self._unturned)  # for the layers of this pass
        return super().rotations(positions)

    def fusible_attention(self, index: int, attention: Any) -> Attention | None:
        return None

    def normed_heads(self, layer: Layer, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query, key  # not yet

    def attend(
        self,
        index: int,
        layer: Layer,
        x: Tensor,
        rotation: Rotation,
        attention: AttentionLayer,
        wanted: NDArray[np.int64] | None = None,
    ) -> Tensor:
        query, key, value = self.query_key_value(index, layer, x)
        turned = (self.ops.rope(heads, *rotation) for heads in (query, key))
        query, key = super().normed_heads(layer, *turned)
        heads = attention(index, query, key, value, self._still, wanted=wanted)
        return self.projected(heads, layer.attention.out)


class HunyuanV1Moe(HunyuanV1, MoeDecoder):
    """Routed experts for every MLP, and one that all tokens go through."""

    router_name: ClassVar[str] = "gate.wg"
    shared_name: ClassVar[str] = "shared_mlp"

    def view(self, weights: Weights) -> Weights:
        return ExpertWeights(weights)
