"""Llama 4 (text): most layers attend within chunks, every fourth to all tokens without positions; experts in some."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.errors import ModelError
from headwise.kernels.experts import Mixture
from headwise.kernels.fused import Besides, DecoderLayer, GroupedQueries
from headwise.runtime.models.attention.chunked import cut_into_chunks
from headwise.runtime.models.base import PagedCache
from headwise.runtime.models.hf_config import (
    MOST_EXPERTS,
    HfConfig,
    decoder_config,
    flag,
    integer,
    layer_list,
    mapping,
    named_layer_types,
    number,
    positive,
    rope,
    rotated_layers,
)
from headwise.runtime.models.layers import Layer
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.moe_config import MoeConfig
from headwise.runtime.models.moe_decoder import MoeDecoder, check_routing
from headwise.runtime.models.position_config import RopeConfig, TemperConfig
from headwise.runtime.models.rope import pairs_first
from headwise.runtime.models.tempered import TemperedDecoder
from headwise.runtime.models.values import shown
from headwise.runtime.models.weight_view import InputsFirstExperts, rotated
from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.base import KernelArray, Tensor

ARCHITECTURES = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")

_CHUNKED, _FULL = "chunked_attention", "full_attention"
_DEFAULTS = {
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 202048,
    "max_position_embeddings": 4096 * 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "attn_scale": 0.1,
    "use_qk_norm": True,
}
"""Those of Hugging Face's ``Llama4TextConfig``."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Llama4Config(ModelConfig):
    """has_qk_norm: queries and keys that are rotated are divided by their root mean square"""

    has_qk_norm: bool = True


def parse(config: HfConfig) -> Llama4Config:
    own = {**_DEFAULTS, **config, **mapping(config, "text_config")}
    chunk = positive(own, "attention_chunk_size") if own["attention_chunk_size"] is not None else 0
    decoder = decoder_config({**own, "intermediate_size": positive(own, "intermediate_size_mlp")}, ARCHITECTURES[0])
    layers = range(decoder.num_layers)
    rotated = rotated_layers(own, decoder.num_layers)
    kind_of = named_layer_types(own, lambda layer: _CHUNKED if rotated[layer] else _FULL)
    kinds = [kind_of(layer) for layer in layers]
    if not set(kinds) <= {_CHUNKED, _FULL}:
        raise ModelError(
            f"config.json: layer types {shown(sorted({*kinds} - {_CHUNKED, _FULL}))} are not supported; known are "
            f"{[_CHUNKED, _FULL]}"
        )
    policies = {_CHUNKED: HeadPolicy(window=chunk) if chunk else FULL, _FULL: FULL}
    turning = rope(own)
    values: dict[str, Any] = {
        **vars(decoder),
        "policies": tuple((policies[kind],) * decoder.num_kv_heads for kind in kinds),
        "ropes": tuple(turning if rotated[layer] else RopeConfig(turning.theta, is_none=True) for layer in layers),
        "moe": _experts(own, decoder),
        "chunk": chunk if _CHUNKED in kinds else 0,
        "has_qk_norm": flag(own, "use_qk_norm", default=True),
        "temper": _temper(own, frozenset(layer for layer in layers if not rotated[layer])),
    }
    return Llama4Config(**values)


def _temper(config: HfConfig, layers: frozenset[int]) -> TemperConfig | None:
    """Of queries that are not rotated."""
    step, factor = number(config, "floor_scale", 8192), number(config, "attn_scale", optional=True)
    return TemperConfig(factor, step, ahead=1, layers=layers) if factor and layers and _is_tuned(config) else None


def _is_tuned(config: HfConfig) -> bool:
    """Whether queries get a temperature: a flag, for which some published models have a number."""
    key = "attn_temperature_tuning"
    return integer(config, key, 0) > 0 if type(config.get(key)) is int else flag(config, key, default=True)


def _experts(config: HfConfig, decoder: ModelConfig) -> MoeConfig | None:
    step = positive(config, "interleave_moe_layer_step", default=1)
    named = layer_list(config, "moe_layers", decoder.num_layers)
    layers = list(range(step - 1, decoder.num_layers, step)) if named is None else named
    if not layers:
        return None
    experts = positive(config, "num_local_experts", default=16, most=MOST_EXPERTS)
    per_token = positive(config, "num_experts_per_tok", default=1)
    check_routing(config, {"num_experts_per_tok": per_token}, {"num_local_experts": experts})
    return MoeConfig(
        layers=tuple(sorted(set(layers))),
        num_experts=experts,
        experts_per_token=per_token,
        expert_size=positive(config, "intermediate_size"),
        num_shared_experts=1,
        norm_min=None,
    )


class Llama4(TemperedDecoder, MoeDecoder):
    """The shared decoder over `InputsFirstExperts`, which rotates neighbours of a head.

    Queries and keys are normed before they are rotated: that keeps their root mean square. An expert's input is what is
    weighted, not its result.
    """

    config: Llama4Config
    mlp_name: ClassVar[str] = "feed_forward"
    router_name: ClassVar[str] = "router"
    shared_name: ClassVar[str] = "shared_expert"
    attends_to_projected: ClassVar[bool] = False

    # ---- weights ----

    def view(self, weights: Weights) -> Weights:
        order = pairs_first(self.config.ropes[0], self.config.head_dim, of_neighbours=True)
        return rotated(InputsFirstExperts(weights), order)

    def mixture(self, moe: MoeConfig, correction: Floats | None) -> Mixture:
        return Mixture(replace(moe.routing, scored_by="sigmoid"), self.activation, correction, weighs_input=True)

    def load_more(self) -> None:
        self._ones = self.ops.norm_weight(np.ones(self.config.head_dim, np.float32))

    # ---- computation ----

    def fusible(self, index: int, layer: Layer) -> DecoderLayer | None:
        found, is_rotated = super().fusible(index, layer), not self.config.ropes[index].is_none
        if found is None or not isinstance(found.attention, GroupedQueries):
            return None
        is_chunked = bool(self.config.chunk and self.config.policies[index][0].window)
        norms, is_normed = found.norms, self.config.has_qk_norm and is_rotated
        return replace(
            found,
            attention=replace(found.attention, is_chunked=is_chunked),
            norms=replace(norms, query=self._ones, key=self._ones) if is_normed else norms,
        )

    def besides(self, token_ids: KernelArray, positions: KernelArray, x: Tensor, cache: PagedCache) -> Besides:
        chunk, block_size = self.config.chunk, cache.layouts[0].block_size
        is_cut = chunk and (cache.batch.seq_lens > chunk).any()
        chunks = cut_into_chunks(cache.batch, chunk, block_size) if is_cut else None
        return replace(super().besides(token_ids, positions, x, cache), chunks=chunks)

    def query_key_value(self, index: int, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        query, key, value = super().query_key_value(index, layer, x)
        if self.config.has_qk_norm and not self.config.ropes[index].is_none:
            query, key = self.norm(query, self._ones), self.norm(key, self._ones)
        return query, key, value
