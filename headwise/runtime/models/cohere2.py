"""Command R7B and Command A: attention and MLP beside each other; the layers without windows rotate nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from headwise.kernels.fused import DecoderLayer
from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.hf_config import (
    HfConfig,
    check_served,
    decoder_config,
    flag,
    number,
    positive,
)
from headwise.runtime.models.layers import Layer, Residual
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.rope import pairs_first
from headwise.runtime.models.weight_view import rotated
from headwise.runtime.models.weights import Weights
from headwise.runtime.models.windows import full_every, rotated_in_windows
from headwise.runtime.ops.base import Tensor

ARCHITECTURE = "Cohere2ForCausalLM"

_SERVED_VALUES = {"use_qk_norm": (None, False), "use_parallel_block": (None, True), "rotary_pct": (None, 1)}


def parse(config: HfConfig) -> ModelConfig:
    check_served(config, _SERVED_VALUES)
    return decoder_config(
        config,
        ARCHITECTURE,
        layer_types=full_every(config, positive(config, "sliding_window_pattern", default=4)),
        ropes=rotated_in_windows(config),
        window=positive(config, "sliding_window", default=4096),
        rms_norm_eps=number(config, "layer_norm_eps", 1e-5),
        tie_embeddings=flag(config, "tie_word_embeddings", default=True),
        logit_scale=number(config, "logit_scale", 0.0625),
    )


class Cohere2(Decoder):
    """The shared decoder with the MLP beside attention, over neighbours that turn.

    Its norms take the mean off, and have no biases. Each reads the residual stream, so the stream is kept without its
    mean, and they are RMS norms of it.
    """

    norm_names: ClassVar[Mapping[str, str]] = {"before_attention": "input_layernorm"}

    def view(self, weights: Weights) -> Weights:
        return rotated(weights, pairs_first(self.config.ropes[0], self.config.head_dim, of_neighbours=True))

    def entering(self, x: Tensor) -> Tensor:
        rows = self.ops.kernel_array(x)
        wide = rows.astype(np.float32)
        return self.ops.from_kernel_array((wide - wide.mean(axis=1, keepdims=True)).astype(rows.dtype))

    def behind(self, layer: Layer, before: Residual, attended: Tensor, next_norm: Tensor | None) -> Residual:
        added = self.reduce(attended + self.feed_forward(layer.mlp, before.normed))
        bias = layer.attention.out.added
        return self.add(before.x, self.entering(added if bias is None else added + bias), next_norm)

    def fusible(self, index: int, layer: Layer) -> DecoderLayer | None:
        found = super().fusible(index, layer)
        return None if found is None else replace(found, is_parallel=True, is_centred=True)
