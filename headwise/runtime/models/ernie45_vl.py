"""ERNIE-4.5-VL's decoder: ERNIE 4.5 with experts and three positions a token, and experts for images' tokens alone.

An image's tokens are routed among experts of their own, smaller ones; what is shared all tokens go through. Which
tokens are an image's is told by the embeddings that came with them: its tower gives those of the tokens around it, too,
which the model computes with as with the image's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.kernels.fused import DenseLayer, MixedLayer
from headwise.runtime.models.base import AttentionLayer, Embeds, PagedCache, Rotation
from headwise.runtime.models.deepseek_routing import named_sparse_layers
from headwise.runtime.models.ernie45 import Ernie45Moe, moe_of, parse_decoder
from headwise.runtime.models.hf_config import HfConfig, check_served, integer, mapping, text_of
from headwise.runtime.models.layers import Layer, Residual
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.moe import MoeMlp
from headwise.runtime.models.mrope import axes_of_rows_first, with_axes_by
from headwise.runtime.models.values import shown
from headwise.runtime.models.weight_view import RenamedWeights
from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.base import KernelArray, Tensor

ARCHITECTURE = "Ernie4_5_VLMoeForConditionalGeneration"

_SERVED_VALUES: dict[str, tuple[Any, ...]] = {
    "compression_ratio": (None, 1),
    "mm_vocab_size": (None, 0),
    "moe_fuse_experts": (None, False),
    "moe_group_experts": (None, False),
    "moe_norm_gate_logits": (None, True),
    "moe_num_attn_experts": (None, False),
    "moe_use_hard_gate": (None, True),
    "moe_use_token_type_bias": (None, False),
    "rope_3d": (None, True),
}
"""Of checkpoints with code of their own, whose fields ask for more than was published."""
_PAIRED = {
    "moe_num_experts": (64, 64),
    "moe_intermediate_size": (1536, 512),
    "moe_layer_start_index": (1, 1),
    "moe_layer_end_index": (-1, -1),
}
"""Fields of two numbers, of text and of images, and Hugging Face's defaults."""
_OF_TIME = 20
"""Pairs that turn by time, where a config does not say it: ``freq_allocation``."""
_IMAGES = "images."
"""What stands behind a layer's MLP in names of experts for images' tokens, as they are called here."""


def parse(config: HfConfig) -> ModelConfig:
    """Of fields as published, or as transformers writes them."""
    is_nested = "text_config" in config
    text = {**text_of(config), "tie_word_embeddings": config.get("tie_word_embeddings", is_nested)}
    if not is_nested:
        text["moe_num_shared_experts"] = config.get("moe_num_shared_experts") or 0
    check_served(text, _SERVED_VALUES)
    time = integer(text, "freq_allocation", default=integer(mapping(text, "rope_scaling"), "freq_allocation", _OF_TIME))
    if mapping(text, "rope_scaling").get("rope_type") == "ernie_3d":  # no scaling: it says again that there are axes
        text = {**text, "rope_scaling": None}
    of_text, of_images = ({**text, **{key: _of(text, key, kind) for key in _PAIRED}} for kind in (0, 1))
    decoder = parse_decoder(of_text, ARCHITECTURE)
    moe, images = (moe_of(each, decoder.num_layers) for each in (of_text, of_images))
    layers = named_sparse_layers(text, moe.layers, decoder.num_layers)
    if moe.layers != images.layers:
        raise ModelError(
            "config.json: 'moe_layer_start_index' and 'moe_layer_end_index' must give experts for text and for images "
            f"to the same layers, got {list(moe.layers)} and {list(images.layers)}"
        )
    if moe.num_experts != images.num_experts:
        raise ModelError(
            "config.json: 'moe_num_experts' must be as many for text as for images, got "
            f"{shown(text['moe_num_experts'])}"
        )
    pairs = decoder.head_dim // 2
    each = (pairs - min(time, pairs)) // 2
    placed = with_axes_by(axes_of_rows_first, decoder, (each, each, pairs - 2 * each))
    return replace(placed, moe=replace(moe, layers=layers, image_expert_size=images.expert_size))


def _of(text: HfConfig, key: str, kind: int) -> Any:
    """A field's number for one kind of token. Raises ModelError where it is not one number for all, or two."""
    value = text.get(key)
    if value is None:
        return _PAIRED[key][kind]
    if not isinstance(value, list | tuple):
        return value
    if len(value) != 2:
        raise ModelError(f"config.json: {key!r} must be two numbers, of text and of images, got {shown(value)}")
    return value[kind]


@dataclass(frozen=True)
class KindsMlp:
    """One rank's experts of a layer: those of text, and those of images' tokens. Both have the shared ones, too."""

    text: MoeMlp
    images: MoeMlp


class Ernie45Vl(Ernie45Moe):
    """Experts by kind of token.

    A step of text alone is what it is without images: all layers in one call, or by graphs. One that has embeddings
    goes layer by layer, and its rows to their experts by kind.
    """

    _of_images: NDArray[np.bool_] | None = None
    """Of the rows that layers compute in this pass, which are images' tokens; None: none."""

    def view(self, weights: Weights) -> Weights:
        return super().view(_KindsOfExperts(weights, self.config))

    def load_mlp(self, layer: int, at: str) -> Any:
        moe = self.config.moe
        assert moe is not None, "its config has experts"
        if layer not in moe.layers:
            return super().load_mlp(layer, at)
        shared = self._shared(at, moe)
        of_images = replace(moe, expert_size=moe.image_expert_size)
        return KindsMlp(
            text=self.routed_mlp(moe, layer, at, shared),
            images=self.routed_mlp(of_images, layer, f"{at}{_IMAGES}", shared),
        )

    def correction(self, layer: int, at: str) -> NDArray[np.float32]:
        name = f"{at.removesuffix(_IMAGES)}moe_statics.e_score_correction_bias"
        both = self._weights.tensor(name)
        if len(both) != 2:
            raise ModelError(f"{name} has the shape {both.shape}: it must be one row for text and one for images")
        return np.ascontiguousarray(both[int(at.endswith(_IMAGES))])

    def forward(
        self,
        token_ids: KernelArray,
        positions: KernelArray,
        attention: AttentionLayer,
        embeds: Embeds | None = None,
        wanted: NDArray[np.int64] | None = None,
        stream: Tensor | None = None,
    ) -> Tensor:
        self._of_images = None
        if embeds is not None:
            self._of_images = np.zeros(len(token_ids), np.bool_)
            self._of_images[embeds[0]] = True
        return super().forward(token_ids, positions, attention, embeds, wanted, stream)

    def fused_over(self, attention: AttentionLayer) -> PagedCache | None:
        return super().fused_over(attention) if self._of_images is None else None

    def fusible_mlp(self, mlp: Any) -> DenseLayer | MixedLayer | None:
        return super().fusible_mlp(mlp.text if isinstance(mlp, KindsMlp) else mlp)

    def _through(
        self,
        index: int,
        layer: Layer,
        residual: Residual,
        rotations: Sequence[Rotation],
        attention: AttentionLayer,
        rows: NDArray[np.int64] | None,
        next_norm: Tensor | None,
    ) -> Residual:
        if rows is not None and self._of_images is not None:  # the last layer's MLP has these alone
            self._of_images = self._of_images[rows]
        return super()._through(index, layer, residual, rotations, attention, rows, next_norm)

    def feed_forward(self, mlp: Any, x: Tensor) -> Tensor:
        if not isinstance(mlp, KindsMlp):
            return super().feed_forward(mlp, x)
        of_images = self._of_images
        if of_images is None or not of_images.any():
            return super().feed_forward(mlp.text, x)
        if of_images.all():
            return super().feed_forward(mlp.images, x)
        whole: KernelArray = None
        for kind, is_own in ((mlp.text, ~of_images), (mlp.images, of_images)):
            rows = is_own.nonzero()[0]
            made = self.ops.kernel_array(super().feed_forward(kind, self.ops.take_rows(x, rows)))
            whole = self.ops.empty_like(made, tuple(x.shape)) if whole is None else whole
            whole[self.ops.upload(rows)] = made
        return self.ops.from_kernel_array(whole)


class _KindsOfExperts(RenamedWeights):
    """Experts by kind, as two mixtures. A checkpoint has those of images behind those of text, with numbers that go on,
    and their router, too, inputs before outputs."""

    _EXPERT = re.compile(r"(?P<at>.*\.mlp\.)experts\.(?P<expert>\d+)\.(?P<rest>.*)")

    def __init__(self, source: Weights, config: ModelConfig) -> None:
        assert config.moe is not None
        self._experts = config.moe.num_experts
        super().__init__(source, {name: self._here(name) for name in source.names})

    def tensor(self, name: str) -> NDArray[np.float32]:
        found = super().tensor(name)
        return np.ascontiguousarray(found.T) if name.endswith(".gate.weight") else found

    def _here(self, name: str) -> str:
        if name.endswith(".mlp.gate.weight_1"):
            return f"{name.removesuffix('gate.weight_1')}{_IMAGES}gate.weight"
        found = self._EXPERT.fullmatch(name)
        expert = -1 if found is None else int(found["expert"]) - self._experts
        return name if found is None or expert < 0 else f"{found['at']}{_IMAGES}experts.{expert}.{found['rest']}"
