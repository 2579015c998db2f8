"""Command with experts: they stand beside attention as its MLPs do; the first layers may have MLPs, and no windows.

Where shared experts are averaged with routed ones, each counts half: weights of routed ones are halved when they are
chosen, and the last matrix of shared ones is, which changes no digit of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.kernels.fused import DecoderLayer
from headwise.runtime.models.cohere2 import Cohere2
from headwise.runtime.models.deepseek_routing import GroupedMoeConfig, named_sparse_layers
from headwise.runtime.models.grouped_moe import GroupedMoeDecoder
from headwise.runtime.models.hf_config import (
    MOST_EXPERTS,
    MOST_LAYERS,
    HfConfig,
    check_served,
    decoder_config,
    flag,
    integer,
    named_layer_types,
    number,
    positive,
    rope,
)
from headwise.runtime.models.layers import Layer
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.models.weight_view import ExpertWeights, Reader
from headwise.runtime.models.weights import Weights
from headwise.runtime.models.windows import FULL, SLIDING
from headwise.runtime.ops.base import Tensor
from headwise.runtime.ops.quantised import GroupQuantised, Matrix

ARCHITECTURE = "Cohere2MoeForCausalLM"

_SERVED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "expert_selection_fn": (None, "softmax", "sigmoid"),
    "shared_expert_combination_strategy": (None, "average", "sum"),
    "use_qk_norm": (None, False),
    "use_parallel_block": (None, True),
}
_CHOSEN = "num_experts_per_tok"
_DEFAULTS = {"head_dim": 128, "tie_word_embeddings": True}
"""Those of Hugging Face's ``Cohere2MoeConfig``."""


@dataclass(frozen=True)
class Cohere2MoeModelConfig(ModelConfig):
    """is_centred: norms take the mean off; else they are RMS norms. halves_shared: shared experts count half"""

    is_centred: bool = True
    halves_shared: bool = False


def parse(config: HfConfig) -> Cohere2MoeModelConfig:
    check_served(config, _SERVED_VALUES)
    own = {**_DEFAULTS, **config}
    layers = positive(own, "num_hidden_layers", most=MOST_LAYERS)
    first = integer(own, "first_k_dense_replace", default=0)
    sparse = named_sparse_layers(own, tuple(range(first, layers)), layers)
    kinds = list(map(_layer_types(own, first), range(layers)))
    expert_size, is_centred = positive(own, "intermediate_size"), own.get("rms_norm_eps") is None
    dense_size = expert_size if len(sparse) == layers else positive(own, "prefix_dense_intermediate_size")
    decoder = decoder_config(
        {**own, "intermediate_size": dense_size, "rms_norm_eps": None},
        ARCHITECTURE,
        layer_types=kinds.__getitem__,
        window=positive(own, "sliding_window", default=4096),
        rms_norm_eps=number(own, "layer_norm_eps", 1e-5) if is_centred else number(own, "rms_norm_eps", 1e-5),
        logit_scale=number(own, "logit_scale", 0.0625),
    )
    turning, of_dense = rope(own), positive(own, "prefix_dense_sliding_window_pattern", default=1) == 1
    turns = [kind == SLIDING or (of_dense and layer not in sparse) for layer, kind in enumerate(kinds)]
    moe = _moe(own, sparse, expert_size)
    return Cohere2MoeModelConfig(
        **vars(decoder)
        | {"moe": moe, "ropes": tuple(turning if turn else RopeConfig(turning.theta, is_none=True) for turn in turns)},
        is_centred=is_centred,
        halves_shared=moe.scale != 1.0,
    )


def _layer_types(config: HfConfig, first: int) -> Callable[[int], str]:
    """The first layers have a pattern of their own, behind which the others' begins."""
    of_first = positive(config, "prefix_dense_sliding_window_pattern", default=1)
    every = positive(config, "sliding_window_pattern", default=4)

    def default(layer: int) -> str:
        place, pattern = (layer, of_first) if layer < first else (layer - first, every)
        return SLIDING if (place + 1) % pattern else FULL

    return named_layer_types(config, default)


def _moe(config: HfConfig, layers: tuple[int, ...], size: int) -> GroupedMoeConfig:
    experts = positive(config, "num_experts", default=8, most=MOST_EXPERTS)
    chosen = positive(config, _CHOSEN, default=2)
    shared = integer(config, "num_shared_experts", default=0)
    if chosen > experts:
        raise ModelError(f"config.json: {_CHOSEN!r} {chosen} is more than 'num_experts' {experts}")
    is_sigmoid = config.get("expert_selection_fn") == "sigmoid"
    is_averaged = config.get("shared_expert_combination_strategy") != "sum"
    return GroupedMoeConfig(
        layers=layers,
        num_experts=experts,
        experts_per_token=chosen,
        expert_size=size,
        num_shared_experts=shared,
        norm_min=None,
        scored_by="sigmoid" if is_sigmoid else "softmax",
        has_correction=False,
        groups=1,
        groups_per_token=1,
        best_of_group=1,
        is_normed=not is_sigmoid or flag(config, "norm_topk_prob", default=True),
        scale=0.5 if shared and is_averaged else 1.0,
    )


class _HalvedShared(ExpertWeights):
    """The last matrix of shared experts, halved."""

    _HALVED = "shared_experts.down_proj.weight"

    def read_columns(self, source: Reader, name: str, start: int, stop: int) -> NDArray[Any]:
        found = super().read_columns(source, name, start, stop)
        return found * found.dtype.type(0.5) if name.endswith(self._HALVED) else found

    def kept_columns(self, name: str, start: int, stop: int) -> Matrix | None:
        if not name.endswith(self._HALVED):
            return super().kept_columns(name, start, stop)
        found = self._source.kept_columns(name, start, stop)
        if not isinstance(found, GroupQuantised):
            return None if found is None else found * found.dtype.type(0.5)
        half = np.float32(0.5)
        minimum = None if found.minimum is None else found.minimum * half
        return replace(found, scale=found.scale * half, minimum=minimum)


class Cohere2Moe(Cohere2, GroupedMoeDecoder):
    """Routed and shared experts for the MLP in most layers."""

    config: Cohere2MoeModelConfig

    def view(self, weights: Weights) -> Weights:
        halved = _HalvedShared(weights) if self.config.halves_shared else ExpertWeights(weights)
        return super().view(halved)

    def entering(self, x: Tensor) -> Tensor:
        return super().entering(x) if self.config.is_centred else x

    def fusible(self, index: int, layer: Layer) -> DecoderLayer | None:
        found = super().fusible(index, layer)
        return None if found is None else replace(found, is_centred=self.config.is_centred)
