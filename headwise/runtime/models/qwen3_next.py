"""Qwen3-Next and Qwen3.5: gated delta-nets in three of four layers, attention with gated heads in the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.policy import STATE
from headwise.errors import ModelError
from headwise.kernels.delta_base import DeltaProjected, DeltaWeights
from headwise.kernels.fused import Attention, DeltaNet
from headwise.kernels.state_layout import StateSizes
from headwise.runtime.models.base import AttentionLayer, Rotation
from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.drafting import APART, DraftingNames
from headwise.runtime.models.gated_heads import GatedHeadsDecoder
from headwise.runtime.models.hf_config import (
    MOST_HEAD_DIM,
    MOST_MEMBERS,
    HfConfig,
    decoder_config,
    mapping,
    named_layer_types,
    positive,
    rope,
    split_share,
)
from headwise.runtime.models.layers import Layer, Linear
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.moe_decoder import MoeDecoder
from headwise.runtime.models.mrope import with_axes
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.models.qwen import Qwen3, moe_config
from headwise.runtime.models.qwen3_next_weights import GatedHeadWeights, JoinedDeltaWeights
from headwise.runtime.models.rope import pairs_first
from headwise.runtime.models.states_config import DeltaConfig
from headwise.runtime.models.weight_view import ExpertWeights, rotated
from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.base import Tensor

NEXT = "Qwen3NextForCausalLM"
QWEN3_5 = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
QWEN3_5_MOE = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")

MOST_CONVOLUTION = 64
_LINEAR, _FULL = "linear_attention", "full_attention"
_NOT_OF_QWEN3_5 = ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
"""Fields of Qwen3-Next by which experts are weighted, or missing from some layers: Qwen3.5 always has them alike."""
_DEFAULTS = {"head_dim": 256, "hidden_act": "silu"}
_PAIRS = (11, 11, 10)
"""Turned by time, row and column, where a config does not say it."""

Floats = NDArray[np.float32]


def parse_next(config: HfConfig) -> ModelConfig:
    return _with_experts(_parse(config, NEXT), {"num_experts": 512, "num_experts_per_tok": 10, **config})


def parse_qwen3_5(config: HfConfig) -> ModelConfig:
    return _with_images(_parse(_text(config), QWEN3_5[0]), config)


def parse_qwen3_5_moe(config: HfConfig) -> ModelConfig:
    text = {key: value for key, value in _text(config).items() if key not in _NOT_OF_QWEN3_5}
    size = positive(text, "moe_intermediate_size", default=512)
    decoder = _parse({**text, "intermediate_size": size}, QWEN3_5_MOE[0])  # no layer has a dense MLP
    decoder = _with_images(decoder, config)
    return _with_experts(decoder, {"num_experts": 256, "moe_intermediate_size": size, **text})


def _with_images(decoder: ModelConfig, config: HfConfig) -> ModelConfig:
    """With three positions of a token, if the model takes images, here or with a tower elsewhere: they are the same in
    text."""
    is_told = any("mrope_section" in (rope.scaling or {}) for rope in decoder.ropes)
    if config.get("vision_config") is None and not is_told:
        return decoder
    return with_axes(decoder, _PAIRS, interleaved=True)


def _text(config: HfConfig) -> HfConfig:
    """The decoder's part of a multimodal model's config."""
    return {**config, **mapping(config, "text_config")}


def _with_experts(decoder: ModelConfig, config: HfConfig) -> ModelConfig:
    moe = moe_config({"norm_topk_prob": True, **config}, decoder.num_layers)
    shared = positive(config, "shared_expert_intermediate_size", default=512)
    return replace(decoder, moe=replace(moe, gated_shared_size=shared))


def _parse(config: HfConfig, architecture: str) -> ModelConfig:
    own, share = split_share({**_DEFAULTS, **config}, default=0.25)
    interval = positive(config, "full_attention_interval", default=4)
    kind_of = named_layer_types(own, lambda layer: _LINEAR if (layer + 1) % interval else _FULL)

    def layer_rope(kind: str) -> RopeConfig:
        return replace(rope(own), share=share)

    decoder = decoder_config(
        own,
        architecture,
        layer_types=lambda layer: _FULL if kind_of(layer) == _LINEAR else kind_of(layer),
        ropes=layer_rope,
    )
    delta = _delta(own, tuple(layer for layer in range(decoder.num_layers) if kind_of(layer) == _LINEAR))
    if len(delta.layers) == decoder.num_layers:
        raise ModelError(
            f"config.json: none of {decoder.num_layers} layers has attention, by 'layer_types' or "
            "'full_attention_interval'; at least one must, as states alone are not served"
        )
    policies = [
        (STATE,) * delta.members if layer in delta.layers else row for layer, row in enumerate(decoder.policies)
    ]
    return replace(decoder, policies=tuple(policies), states=delta)


def _delta(config: HfConfig, layers: tuple[int, ...]) -> DeltaConfig:
    key_heads = positive(config, "linear_num_key_heads", default=16)
    value_heads = positive(config, "linear_num_value_heads", default=32)
    if value_heads % key_heads:
        raise ModelError(f"config.json: {value_heads} value heads cannot share {key_heads} key heads evenly")
    if len(layers) * value_heads > MOST_MEMBERS:
        raise ModelError(
            f"config.json: {len(layers)} delta-nets of {value_heads} heads make {len(layers) * value_heads}; "
            f"at most {MOST_MEMBERS} can be served"
        )
    sizes = StateSizes(
        key_dim=positive(config, "linear_key_head_dim", default=128, most=MOST_HEAD_DIM),
        value_dim=positive(config, "linear_value_head_dim", default=128, most=MOST_HEAD_DIM),
        share=value_heads // key_heads,
        convolution=positive(config, "linear_conv_kernel_dim", default=4, most=MOST_CONVOLUTION),
    )
    return DeltaConfig(layers, key_heads, sizes)


@dataclass(frozen=True)
class DeltaProjections:
    """One rank's part of a gated delta-net.

    into:    to `DeltaProjected.numbers`
    between: what is computed with before `out`
    """

    into: Linear
    between: DeltaWeights
    out: Linear


class Qwen3_5(GatedHeadsDecoder, Qwen3):  # noqa: N801
    """The shared decoder with two kinds of layers."""

    gate_name: ClassVar[str] = "q_gate"
    drafting_names: ClassVar[DraftingNames | None] = APART
    norm_offset = 1.0

    def view(self, weights: Weights) -> Weights:
        return self.gated_heads(JoinedDeltaWeights(weights, self._delta))

    def gated_heads(self, weights: Weights) -> Weights:
        """Weights with heads' gates apart, and what is rotated in pairs."""
        config = self.config
        return rotated(GatedHeadWeights(weights, config), pairs_first(config.ropes[0], config.head_dim))

    @property
    def _delta(self) -> DeltaConfig:
        assert isinstance(self.config.states, DeltaConfig), "parsed so"
        return self.config.states

    def norms_of(self, layer: int) -> Mapping[str, str]:
        return Decoder.norm_names if layer in self._delta.layers else self.norm_names

    # ---- weights ----

    def load_attention(self, layer: int, at: str) -> Any:
        if layer in self._delta.layers:
            return self._load_delta(self._shard.kv_heads[layer], at.replace("self_attn", "linear_attn"))
        return super().load_attention(layer, at)

    def _load_delta(self, heads: tuple[int, ...], at: str) -> DeltaProjections:
        delta, source, upload = self._delta, self._weights, self.ops.upload
        sizes = delta.sizes
        values = sizes.share * sizes.value_dim

        def ranges(each: int) -> list[tuple[int, int]]:
            return [(head * each, (head + 1) * each) for head in heads]

        def of_value_heads(name: str) -> Floats:
            every = self._shaped(f"{at}{name}", source.tensor(f"{at}{name}"), (delta.members * sizes.share,))
            return np.ascontiguousarray(every.reshape(delta.members, sizes.share)[list(heads)])

        convolution = source.tensor(f"{at}conv1d.weight")
        self._shaped(f"{at}conv1d.weight", convolution, (delta.members * sizes.channels, 1, sizes.convolution))
        return DeltaProjections(
            into=self._split_rows(
                [(f"{at}in_proj_qkvz", ranges(sizes.channels + values)), (f"{at}in_proj_ba", ranges(2 * sizes.share))],
                has_bias=False,
            ),
            between=DeltaWeights(
                convolution=upload(_by_key_head(convolution[:, 0], delta)[list(heads)].transpose(0, 2, 1).copy()),
                speed=upload(np.exp(of_value_heads("A_log"))),
                bias=upload(of_value_heads("dt_bias")),
                norm=upload(self._shaped(f"{at}norm.weight", source.tensor(f"{at}norm.weight"), (sizes.value_dim,))),
                eps=self.config.rms_norm_eps,
            ),
            out=self._split_columns(f"{at}out_proj", ranges(values), has_bias=False),
        )

    def _shaped(self, name: str, array: Floats, shape: tuple[int, ...]) -> Floats:
        if array.shape != shape:
            raise ModelError(
                f"{name} has the shape {array.shape}, config.json says {shape}: weights and config.json do not belong "
                "together"
            )
        return np.ascontiguousarray(array, np.float32)

    # ---- computation ----

    def fusible_attention(self, index: int, attention: Any) -> Attention | None:
        if isinstance(attention, DeltaProjections):
            return DeltaNet(attention.into.weight, attention.between, attention.out.weight)
        return super().fusible_attention(index, attention)

    def attend(
        self,
        index: int,
        layer: Layer,
        x: Tensor,
        rotation: Rotation,
        attention: AttentionLayer,
        wanted: NDArray[np.int64] | None = None,
    ) -> Tensor:
        if index in self._delta.layers:
            numbers = self.ops.kernel_array(self._linear(x, layer.attention.into))
            seen = attention(index, DeltaProjected(numbers, layer.attention.between), wanted=wanted)
            return self.projected(seen, layer.attention.out)
        return super().attend(index, layer, x, rotation, attention, wanted)


class Qwen3Next(MoeDecoder, Qwen3_5):
    """Routed experts for the MLP in most layers, and one that all tokens go through as far as a gate lets them."""

    def view(self, weights: Weights) -> Weights:
        return self.gated_heads(weights)


class Qwen3_5Moe(Qwen3Next):  # noqa: N801
    """The same by Qwen3.5's names, with a layer's experts in two tensors or one by one."""

    def view(self, weights: Weights) -> Weights:
        return Qwen3_5.view(self, ExpertWeights(weights))


def _by_key_head(rows: Floats, delta: DeltaConfig) -> Floats:
    """``[key_heads, channels, ...]`` of rows that are ``[all queries | all keys | all values]``."""
    sizes, heads = delta.sizes, delta.members
    query, key, values = np.split(rows, [heads * sizes.key_dim, 2 * heads * sizes.key_dim])
    return np.concatenate([part.reshape(heads, -1, *rows.shape[1:]) for part in (query, key, values)], axis=1)
