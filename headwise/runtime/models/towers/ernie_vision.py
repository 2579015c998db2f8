"""ERNIE-4.5-VL's tower, for images, and what makes tokens of its patches.

Patches of an image of any aspect ratio, rotary positions by row and column, layer norms, MLPs without a gate, and every
patch sees every other one of its image, as in Qwen2-VL's (arXiv 2409.12191). Behind it squares of patches are joined,
then two frames: an image is two equal ones, so that the weights for both are added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.models.hf_config import HfConfig, mapping, number, positive, text_of
from headwise.runtime.models.towers.activations import activated
from headwise.runtime.models.towers.base import FRAMES, EncodedImage, TowerParts
from headwise.runtime.models.towers.patch_order import PatchOrder
from headwise.runtime.models.towers.pixels import PixelForm, normalised, pixel_form
from headwise.runtime.models.towers.tower_layers import LayerNorm, Linear, Mlp, RmsNorm, TowerLayer
from headwise.runtime.models.towers.tower_weights import TowerWeights, control_tokens
from headwise.runtime.models.towers.vision_fields import (
    CLIP_MEAN,
    CLIP_STD,
    check_processor,
    check_served,
    head_count,
    processor_bounds,
)
from headwise.runtime.models.towers.whole_squares import check_shape, whole_squares
from headwise.runtime.models.values import shown
from headwise.runtime.ops.base import Tensor, TensorOps

if TYPE_CHECKING:
    from PIL.Image import Image

_ACTIVATION = "quick_gelu"
_LEAST_PIXELS, _MOST_PIXELS = 56 * 56, 28 * 28 * 6177
_AT, _RESAMPLER = "vision_model.", "resampler_model."
_START, _PAD, _END = "<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>"


@dataclass(frozen=True)
class ErnieVisionConfig:
    """patch: pixels of a patch's edge
    merge:       patches of the edge of a square that becomes one token
    eps:         of layer norms; text_eps: of the norm behind all
    least, most: pixels to which an image is scaled
    """

    hidden: int
    inner: int
    text_hidden: int
    heads: int
    layers: int
    patch: int
    merge: int
    theta: float
    eps: float
    text_eps: float
    least: int
    most: int
    pixels: PixelForm

    @property
    def step(self) -> int:
        """Pixels of the edge of a square, which becomes one token."""
        return self.patch * self.merge

    @property
    def square(self) -> int:
        """Numbers of a square's patches."""
        return self.hidden * self.merge**2

    @classmethod
    def of(cls, config: HfConfig, processor: HfConfig, most_numbers: int) -> ErnieVisionConfig:
        """Of fields as published, or as transformers writes them. most_numbers: of an image's embeddings. Raises
        `ModelError` naming the field that cannot be served."""
        vision = mapping(config, "vision_config")
        hidden = positive(vision, "hidden_size", default=1280, most=1 << 16)
        heads = head_count(vision, "hidden_size", hidden, 16)
        patch = positive(vision, "patch_size", default=14, most=256)
        merge = positive(vision, "spatial_merge_size", default=2, most=16)
        _check(config, vision, hidden, merge)
        check_processor(processor, patch_size=patch, merge_size=merge)
        text = text_of(config)
        text_hidden = positive(text, "hidden_size", most=1 << 20)
        least, most = processor_bounds(processor, _LEAST_PIXELS, _MOST_PIXELS)
        most = min(most, max(1, most_numbers // text_hidden - 2) * (patch * merge) ** 2)  # two stand around
        return cls(
            hidden,
            _inner(vision, hidden),
            text_hidden,
            heads,
            positive(vision, "depth", default=32, most=256),
            patch,
            merge,
            number(mapping(vision, "rope_parameters"), "rope_theta", 10000.0),
            number(vision, "rms_norm_eps", 1e-6),
            number(text, "rms_norm_eps", 1e-5),
            min(least, most),
            most,
            pixel_form(processor, CLIP_MEAN, CLIP_STD),
        )


class ErnieVision:
    """A `Tower`."""

    def __init__(self, parts: TowerParts) -> None:
        self.config = config = ErnieVisionConfig.of(parts.config, parts.processor, parts.most)
        self._ops = ops = parts.ops
        source = TowerWeights(parts.weights, ops, (_AT, _RESAMPLER))
        self._patches = Linear.read(
            source, f"{_AT}patch_embed.proj", config.hidden, 3 * config.patch**2, has_bias=False
        )
        self._layers = [_layer(source, f"{_AT}blocks.{index}.", config) for index in range(config.layers)]
        self._norm = LayerNorm.read(source, f"{_AT}ln", config.hidden, config.eps)
        self._joins = [_Join.read(source, f"{_RESAMPLER}{name}", config, frames) for name, frames in _JOINS]
        self._out = Linear.read(source, f"{_RESAMPLER}mlp", config.text_hidden, config.square)
        self._behind = RmsNorm.read(source, f"{_RESAMPLER}after_norm", config.text_hidden, config.text_eps)
        tokens = control_tokens(parts, (_START, _PAD, _END))
        self._start, self._token, self._end = tokens[_START], tokens[_PAD], tokens[_END]
        self._around = [source.text_embedding(token)[None] for token in (self._start, self._end)]

    def encode(self, image: Image) -> EncodedImage:
        config = self.config
        check_shape(*image.size)
        width, height = whole_squares(*image.size, config.step, config.least, config.most)
        pixels = normalised(image, (width, height), config.pixels)
        order = PatchOrder.of(height // config.patch, width // config.patch, config.merge, window=0)
        first, last = self._around
        embeds = np.concatenate([first, self._features(pixels, order), last])
        tokens = np.array([self._start, *[self._token] * (len(embeds) - 2), self._end], np.int32)
        return EncodedImage(tokens, embeds, width // config.step, is_framed=True)

    def _features(self, pixels: NDArray[np.float32], order: PatchOrder) -> NDArray[np.float32]:
        """Of ``pixels [3, height, width]``, squares of patches as ``float32 [tokens, hidden of the text]``."""
        ops, config = self._ops, self.config
        angles = [ops.upload(each) for each in order.angles(config.hidden // config.heads, config.theta)]
        x = self._patches.of(ops, ops.tensor(order.cut(pixels, config.patch)))
        for layer in self._layers:
            x = layer.forward(ops, x, angles)
        x = self._norm.of(ops, x).reshape((len(order.squares), config.square))
        for join in self._joins:
            x = join.of(ops, x)
        return np.asarray(ops.numpy(self._behind.of(ops, self._out.of(ops, x))), np.float32)


def build(parts: TowerParts) -> ErnieVision:
    """A `BuildTower`."""
    return ErnieVision(parts)


_JOINS = (("spatial_linear", 1), ("temporal_linear", FRAMES))
"""Names of what joins a square's patches, and what joins frames; and of how many equal inputs each is."""


@dataclass(frozen=True, eq=False)
class _Join:
    into: Linear
    out: Linear
    norm: LayerNorm

    @classmethod
    def read(cls, source: TowerWeights, at: str, config: ErnieVisionConfig, frames: int) -> _Join:
        size = config.square
        weight = source.array(f"{at}.0.weight", size, frames, size).sum(axis=1)
        return cls(
            Linear(source.matrix(weight), source.bias(f"{at}.0.bias", size)),
            Linear.read(source, f"{at}.2", size, size),
            LayerNorm.read(source, f"{at}.3", size, config.eps),
        )

    def of(self, ops: TensorOps, x: Tensor) -> Tensor:
        """Of ``x [T, size]``: as large."""
        return self.norm.of(ops, self.out.of(ops, activated(ops, self.into.of(ops, x), "gelu")))


def _layer(source: TowerWeights, at: str, config: ErnieVisionConfig) -> TowerLayer:
    hidden, inner = config.hidden, config.inner
    return TowerLayer(
        LayerNorm.read(source, f"{at}norm1", hidden, config.eps),
        LayerNorm.read(source, f"{at}norm2", hidden, config.eps),
        *Linear.joined(source, f"{at}attn.qkv", hidden),
        Linear.read(source, f"{at}attn.proj", hidden, hidden),
        Mlp(
            None,
            Linear.read(source, f"{at}mlp.fc1", inner, hidden),
            Linear.read(source, f"{at}mlp.fc2", hidden, inner),
            _ACTIVATION,
        ),
        config.heads,
    )


def _check(config: HfConfig, vision: HfConfig, hidden: int, merge: int) -> None:
    """Raise ModelError for what is served otherwise, or said twice and unlike: published configs say some beside."""
    served = {"hidden_act": _ACTIVATION, "in_channels": 3, "in_chans": 3, "embed_dim": hidden}
    check_served(vision, {**served, "temporal_merge_size": FRAMES})
    sizes = {"temporal_conv_size": FRAMES, "spatial_conv_size": merge, "pixel_hidden_size": hidden}
    for name, value in {"use_temporal_conv": True, **sizes}.items():
        if config.get(name, value) not in (None, value):
            raise ModelError(f"config.json: {name!r} must be {value}, got {shown(config[name])}")


def _inner(vision: HfConfig, hidden: int) -> int:
    if "intermediate_size" not in vision:
        return hidden * positive(vision, "mlp_ratio", default=4, most=64)
    return positive(vision, "intermediate_size", most=1 << 20)
