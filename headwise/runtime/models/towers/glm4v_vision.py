"""The tower of GLM-4.1V to 4.6V (arXiv 2507.01006).

Patches of an image of any aspect ratio, learned positions that are stretched over its rows and columns, rotary ones by
row and column, RMS norms, gated MLPs, and every patch sees every other one of its image. A convolution makes one token
of a square of patches, and a gated merger follows. A patch is of two frames, and an image is two equal ones. Patches of
a video see those of their own two frames only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.models.hf_config import HfConfig, flag, mapping, number, positive
from headwise.runtime.models.towers.activations import activated
from headwise.runtime.models.towers.base import FRAMES, TowerParts
from headwise.runtime.models.towers.glm_videos import VIDEO_PLACE, GlmVideos
from headwise.runtime.models.towers.paired_frames import FramePatches, PairedFrames
from headwise.runtime.models.towers.patch_order import PatchOrder
from headwise.runtime.models.towers.pixels import PixelForm, pixel_form
from headwise.runtime.models.towers.stretched import stretched
from headwise.runtime.models.towers.tower_layers import LayerNorm, Linear, Mlp, RmsNorm, TowerLayer
from headwise.runtime.models.towers.tower_weights import TowerWeights, control_tokens
from headwise.runtime.models.towers.vision_fields import (
    CLIP_MEAN,
    CLIP_STD,
    check_processor,
    check_served,
    head_count,
    pixel_bounds,
    text_size,
)
from headwise.runtime.models.towers.whole_squares import check_shape, whole_squares
from headwise.runtime.ops.base import Tensor, TensorOps

_MERGER_EPS = 1e-5
"""Of the merger's norm: no config has it."""
_SERVED = {"hidden_act": "silu", "temporal_patch_size": FRAMES, "in_channels": 3}
_SIZE = {"shortest_edge": 112 * 112, "longest_edge": 15000 * 28 * 28}
"""Pixels of both frames, where the checkpoint has no others."""
_AT, _PAD = "visual.", "<|image|>"


@dataclass(frozen=True)
class Glm4vVisionConfig:
    """text_hidden: what MLPs of layers have inside, too
    merger:      what the merger has inside
    patch:       pixels of a patch's edge
    merge:       patches of the edge of a square that becomes one token
    grid:        rows, and columns, of learned positions
    has_bias:    of queries, keys and values
    eps:         of norms, but of the merger's
    least, most: pixels to which an image is scaled, of both frames together
    """

    hidden: int
    text_hidden: int
    merger: int
    heads: int
    layers: int
    patch: int
    merge: int
    grid: int
    has_bias: bool
    eps: float
    theta: float
    least: int
    most: int
    pixels: PixelForm

    @property
    def step(self) -> int:
        """Pixels of the edge of a square, which becomes one token."""
        return self.patch * self.merge

    @classmethod
    def of(cls, config: HfConfig, processor: HfConfig, most_numbers: int) -> Glm4vVisionConfig:
        """most_numbers: of an image's embeddings. Raises `ModelError` naming the field that cannot be served."""
        vision = mapping(config, "vision_config")
        check_served(vision, _SERVED)
        hidden = positive(vision, "hidden_size", default=1536, most=1 << 16)
        patch = positive(vision, "patch_size", default=14, most=256)
        merge = positive(vision, "spatial_merge_size", default=2, most=16)
        check_processor(processor, patch_size=patch, merge_size=merge, temporal_patch_size=FRAMES)
        text_hidden = text_size(config, "out_hidden_size")
        least, most = pixel_bounds(mapping(processor, "size") or _SIZE, None, None)
        most = min(most, FRAMES * max(1, most_numbers // text_hidden) * (patch * merge) ** 2)
        return cls(
            hidden,
            text_hidden,
            positive(vision, "intermediate_size", default=13696, most=1 << 20),
            head_count(vision, "hidden_size", hidden, 12),
            positive(vision, "depth", default=24, most=256),
            patch,
            merge,
            max(1, positive(vision, "image_size", default=336, most=1 << 14) // patch),
            flag(vision, "attention_bias"),
            number(vision, "rms_norm_eps", 1e-5),
            number(mapping(vision, "rope_parameters"), "rope_theta", 10000.0),
            min(least, most),
            most,
            pixel_form(processor, CLIP_MEAN, CLIP_STD),
        )

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """The size to which an image is scaled: one that is smaller than a square, to its edge before. Raises
        `InvalidRequestError` as `check_shape`."""
        check_shape(width, height)
        grown = max(1.0, self.step / width, self.step / height)
        size = int(width * grown), int(height * grown)
        return whole_squares(*size, self.step, self.least / FRAMES, self.most / FRAMES)


class Glm4vVision(PairedFrames):
    """A `VideoTower`."""

    def __init__(self, parts: TowerParts) -> None:
        self.config = config = Glm4vVisionConfig.of(parts.config, parts.processor, parts.most)
        self._ops = ops = parts.ops
        source, hidden = TowerWeights(parts.weights, ops, (_AT,)), config.hidden
        self._patches = FramePatches(source, f"{_AT}patch_embed.proj", hidden, config.patch)
        self._before = RmsNorm.read(source, f"{_AT}post_conv_layernorm", hidden, config.eps)
        places = source.array(f"{_AT}embeddings.position_embedding.weight", config.grid**2, hidden)
        self._places = places.reshape(config.grid, config.grid, hidden)
        self._layers = [_layer(source, index, config) for index in range(config.layers)]
        self._behind = RmsNorm.read(source, f"{_AT}post_layernorm", hidden, config.eps)
        self._merger = _Merger.read(source, config)
        has_videos = parts.token_id(VIDEO_PLACE) is not None
        videos = GlmVideos(parts, config.patch, config.merge, config.text_hidden) if has_videos else None
        super().__init__(config, control_tokens(parts, (_PAD,))[_PAD], videos, VIDEO_PLACE)

    def _features(self, frames: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        ops, config = self._ops, self.config
        rows, columns = (size // config.patch for size in frames[0].shape[1:])
        order = PatchOrder.of(rows, columns, config.merge, 0)
        places = stretched(self._places, rows, columns)[order.rows, order.columns]
        x = self._before.of(ops, self._patches.of(ops, frames, order))
        x = x + ops.tensor(places)
        angles = [ops.upload(each) for each in order.angles(config.hidden // config.heads, config.theta)]
        for layer in self._layers:
            x = layer.forward(ops, x, angles)
        made = self._merger.of(ops, self._behind.of(ops, x))
        return np.array(ops.numpy(made), np.float32)


def build(parts: TowerParts) -> Glm4vVision:
    """A `BuildTower`."""
    return Glm4vVision(parts)


@dataclass(frozen=True, eq=False)
class _Merger:
    """Makes a token of a square, by a convolution as wide as that, and what comes behind it.

    size: of a square's numbers
    """

    square: Linear
    into: Linear
    norm: LayerNorm
    mlp: Mlp
    size: int

    @classmethod
    def read(cls, source: TowerWeights, config: Glm4vVisionConfig) -> _Merger:
        name, at, size, inputs = f"{_AT}downsample", f"{_AT}merger.", config.text_hidden, config.hidden
        weight = source.array(f"{name}.weight", size, inputs, config.merge**2).swapaxes(1, 2)  # a patch's together
        return cls(
            Linear(source.matrix(weight.reshape(size, -1)), source.bias(f"{name}.bias", size)),
            Linear.read(source, f"{at}proj", size, size, has_bias=False),
            LayerNorm.read(source, f"{at}post_projection_norm", size, _MERGER_EPS),
            _mlp(source, at, size, config.merger),
            inputs * config.merge**2,
        )

    def of(self, ops: TensorOps, x: Tensor) -> Tensor:
        """Of ``x [T, hidden]``, in which a square's patches follow each other: ``[squares, hidden of the text]``."""
        squares = x.reshape((x.shape[0] * x.shape[1] // self.size, self.size))
        made = self.norm.of(ops, self.into.of(ops, self.square.of(ops, squares)))
        return self.mlp.of(ops, activated(ops, made, "gelu"))


def _layer(source: TowerWeights, index: int, config: Glm4vVisionConfig) -> TowerLayer:
    at, hidden = f"{_AT}blocks.{index}.", config.hidden
    return TowerLayer(
        RmsNorm.read(source, f"{at}norm1", hidden, config.eps),
        RmsNorm.read(source, f"{at}norm2", hidden, config.eps),
        *Linear.joined(source, f"{at}attn.qkv", hidden, has_bias=config.has_bias),
        Linear.read(source, f"{at}attn.proj", hidden, hidden, has_bias=False),
        _mlp(source, f"{at}mlp.", hidden, config.text_hidden),
        config.heads,
    )


def _mlp(source: TowerWeights, at: str, size: int, inner: int) -> Mlp:
    return Mlp(
        Linear.read(source, f"{at}gate_proj", inner, size, has_bias=False),
        Linear.read(source, f"{at}up_proj", inner, size, has_bias=False),
        Linear.read(source, f"{at}down_proj", size, inner, has_bias=False),
        "silu",
    )
