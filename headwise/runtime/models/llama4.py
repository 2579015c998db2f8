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
from headwise.runtime.models.base import AttentionLayer, Embeds, ModelConfig, MoeConfig, PagedCache, RopeConfig
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
)
from headwise.runtime.models.layers import Layer
from headwise.runtime.models.moe_decoder import MoeDecoder, check_routing
from headwise.runtime.models.values import shown
from headwise.runtime.models.weight_view import InterleavedWeights
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
    """What other decoders have not.

    has_qk_norm: queries and keys that are rotated are divided by their root mean square
    temperature: queries that are not rotated, at position ``p``, are multiplied with
                 ``1 + temperature * log(1 + floor((p + 1) / floor_scale))``
    """

    has_qk_norm: bool = True
    temperature: float = 0.0
    floor_scale: float = 1.0


def parse(config: HfConfig) -> Llama4Config:
    own = {**_DEFAULTS, **config, **mapping(config, "text_config")}
    chunk = positive(own, "attention_chunk_size") if own["attention_chunk_size"] is not None else 0
    decoder = decoder_config({**own, "intermediate_size": positive(own, "intermediate_size_mlp")}, ARCHITECTURES[0])
    layers = range(decoder.num_layers)
    rotated = _rotated_layers(own, decoder.num_layers)
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
        "temperature": number(own, "attn_scale", optional=True) if _is_tuned(own) else 0.0,
        "floor_scale": number(own, "floor_scale", 8192),
    }
    return Llama4Config(**values)


def _is_tuned(config: HfConfig) -> bool:
    """Whether queries get a temperature: a flag, for which some published models have a number."""
    key = "attn_temperature_tuning"
    return integer(config, key, 0) > 0 if type(config.get(key)) is int else flag(config, key, default=True)


def _rotated_layers(config: HfConfig, num_layers: int) -> list[bool]:
    """Which layers rotate queries and keys: ``no_rope_layers`` has a 1 for each that does."""
    interval, found = positive(config, "no_rope_layer_interval", default=4), config.get("no_rope_layers")
    if not found:
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(found, list) or len(found) < num_layers or not {*map(shown, found)} <= {"0", "1"}:
        raise ModelError(f"config.json: 'no_rope_layers' must be a 0 or 1 for {num_layers} layers, got {shown(found)}")
    return [bool(each) for each in found[:num_layers]]


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


class Llama4Weights(InterleavedWeights):
    """A layer's experts lie in two tensors, inputs before outputs."""

    has_inputs_first: ClassVar[bool] = True


@dataclass(frozen=True)
class TemperedAttention:
    """`AttentionLayer` by which queries of some layers count more the further behind they are.

    scales: float32 ``[T, 1, 1]``
    layers: those
    """

    attention: AttentionLayer
    model: Llama4
    scales: KernelArray
    layers: frozenset[int]

    def __call__(self, layer: int, *projected: Any, wanted: NDArray[np.int64] | None = None) -> Tensor:
        if layer in self.layers:
            query, *others = projected
            ops = self.model.ops
            rows = ops.kernel_array(query)
            projected = (ops.from_kernel_array((rows * self.scales).astype(rows.dtype, copy=False)), *others)
        return self.attention(layer, *projected, wanted=wanted)


class Llama4(MoeDecoder):
    """The shared decoder over `Llama4Weights`.

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
        return Llama4Weights(weights, self.config.head_dim)

    def mixture(self, moe: MoeConfig, correction: Floats | None) -> Mixture:
        return Mixture(replace(moe.routing, is_sigmoid=True), self.activation, correction, weighs_input=True)

    def load_more(self) -> None:
        self._ones = self.ops.norm_weight(np.ones(self.config.head_dim, np.float32))

    # ---- computation ----

    def forward(
        self,
        token_ids: KernelArray,
        positions: KernelArray,
        attention: AttentionLayer,
        embeds: Embeds | None = None,
        wanted: NDArray[np.int64] | None = None,
    ) -> Tensor:
        if self.fused_over(attention) is None:
            scales = self._query_scales(positions)
            if scales is not None:
                unrotated = frozenset(layer for layer, rope in enumerate(self.config.ropes) if rope.is_none)
                attention = TemperedAttention(attention, self, scales.reshape(-1, 1, 1), unrotated)
        return super().forward(token_ids, positions, attention, embeds, wanted)

    def _query_scales(self, positions: KernelArray) -> KernelArray | None:
        """What queries of layers that do not rotate them are multiplied with, ``[T]``; None: nothing."""
        config = self.config
        if not config.temperature or not any(rope.is_none for rope in config.ropes):
            return None
        steps = np.floor((positions.astype(np.float32) + np.float32(1)) / np.float32(config.floor_scale))
        return np.log1p(steps) * np.float32(config.temperature) + np.float32(1)

    def fusible(self, index: int, layer: Layer) -> DecoderLayer | None:
        found, is_rotated = super().fusible(index, layer), not self.config.ropes[index].is_none
        if found is None or not isinstance(found.attention, GroupedQueries):
            return None
        is_chunked = bool(self.config.chunk and self.config.policies[index][0].window)
        is_scaled = bool(self.config.temperature) and not is_rotated
        norms, is_normed = found.norms, self.config.has_qk_norm and is_rotated
        return replace(
            found,
            attention=replace(found.attention, is_chunked=is_chunked, is_scaled=is_scaled),
            norms=replace(norms, query=self._ones, key=self._ones) if is_normed else norms,
        )

    def besides(self, token_ids: KernelArray, positions: KernelArray, x: Tensor, cache: PagedCache) -> Besides:
        chunk, block_size = self.config.chunk, cache.layouts[0].block_size
        is_cut = chunk and (cache.batch.seq_lens > chunk).any()
        return Besides(
            query_scales=self._query_scales(positions),
            chunks=cut_into_chunks(cache.batch, chunk, block_size) if is_cut else None,
        )

    def query_key_value(self, index: int, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        query, key, value = super().query_key_value(index, layer, x)
        if self.config.has_qk_norm and not self.config.ropes[index].is_none:
            query, key = self.norm(query, self._ones), self.norm(key, self._ones)
        return query, key, value
