"""The towers of Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (2502.13923), Qwen3-VL (2511.21631) and Qwen 3.5.

Patches of an image of any aspect ratio, rotary positions by row and column, and a merger that makes one token of a
square of them. Qwen2.5-VL's layers see windows, but for a few; Qwen3-VL's and Qwen 3.5's patches have learned
positions, too, and layers of a Qwen3-VL's text are given what layers of its tower make (deepstack, 2406.04334).
A patch is of two frames, and an image is two equal ones: its weights for both are added up. Patches of a video see
those of their own two frames only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.models.towers.activations import activated
from headwise.runtime.models.towers.base import TowerParts
from headwise.runtime.models.towers.paired_frames import FramePatches, PairedFrames
from headwise.runtime.models.towers.patch_order import PatchOrder
from headwise.runtime.models.towers.qwen_videos import VIDEO_PLACE, QwenVideos
from headwise.runtime.models.towers.qwen_vision_config import (
    QWEN2_5_VL,
    QWEN2_VL,
    QWEN3_5,
    QWEN3_VL,
    Generation,
    QwenVisionConfig,
)
from headwise.runtime.models.towers.stretched import spanned
from headwise.runtime.models.towers.tower_layers import LayerNorm, Linear, Mlp, Norm, RmsNorm, TowerLayer
from headwise.runtime.models.towers.tower_weights import TowerWeights, control_tokens
from headwise.runtime.ops.base import Tensor, TensorOps

_EPS = 1e-6
"""Of all norms: no config has it."""
_AT, _PAD = "visual.", "<|image_pad|>"


class QwenVision(PairedFrames):
    """A `VideoTower`."""

    def __init__(self, parts: TowerParts, generation: Generation) -> None:
        self.config = config = QwenVisionConfig.of(generation, parts.config, parts.processor, parts.most)
        self._ops = ops = parts.ops
        source, hidden = TowerWeights(parts.weights, ops, (_AT,)), config.hidden
        self._patches = FramePatches(
            source, f"{_AT}patch_embed.proj", hidden, config.patch, has_bias=generation.has_places
        )
        self._places = source.array(f"{_AT}pos_embed.weight", config.grid**2, hidden) if config.grid else None
        self._layers = [_layer(source, index, generation, config) for index in range(config.layers)]
        self._merger = _Merger.read(source, f"{_AT}merger.", generation, config)
        self._level_mergers = {
            layer: _Merger.read(source, f"{_AT}deepstack_merger_list.{level}.", generation, config, is_behind=True)
            for level, layer in enumerate(config.levels)
        }
        has_videos = parts.token_id(VIDEO_PLACE) is not None
        videos = QwenVideos(parts, config, generation.seconds) if has_videos else None
        super().__init__(config, control_tokens(parts, (_PAD,))[_PAD], videos, VIDEO_PLACE)

    def _features(self, frames: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        ops, config = self._ops, self.config
        rows, columns = (size // config.patch for size in frames[0].shape[1:])
        order = PatchOrder.of(rows, columns, config.merge, config.window)
        angles = [ops.upload(each) for each in order.angles(config.head_dim, config.theta)]
        x = self._embedded(frames, order)
        added: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            x = layer.forward(ops, x, angles, () if index in self.config.whole else order.windows)
            if index in self._level_mergers:
                added.append(self._level_mergers[index].of(ops, x))
        made = (self._merger.of(ops, x), *added)
        found = np.concatenate([np.asarray(ops.numpy(each), np.float32) for each in made], axis=1)
        embeds = np.empty_like(found)
        embeds[order.squares] = found
        return embeds

    def _embedded(self, frames: Sequence[NDArray[np.float32]], order: PatchOrder) -> Tensor:
        """What the first layer gets, ``[T, hidden]``."""
        ops, patch, edge = self._ops, self.config.patch, self.config.grid
        x = self._patches.of(ops, frames, order)
        if self._places is None:
            return x
        places = spanned(self._places.reshape(edge, edge, -1), *(size // patch for size in frames[0].shape[1:]))
        return x + ops.tensor(places[order.rows, order.columns])


def build_qwen2_vl(parts: TowerParts) -> QwenVision:
    """A `BuildTower`, as the others are."""
    return QwenVision(parts, QWEN2_VL)


def build_qwen2_5_vl(parts: TowerParts) -> QwenVision:
    return QwenVision(parts, QWEN2_5_VL)


def build_qwen3_vl(parts: TowerParts) -> QwenVision:
    return QwenVision(parts, QWEN3_VL)


def build_qwen3_5(parts: TowerParts) -> QwenVision:
    return QwenVision(parts, QWEN3_5)


@dataclass(frozen=True, eq=False)
class _Merger:
    """Makes a token of a square.

    is_behind: whether the norm is of a whole square, behind joining its patches, and not of each of them before
    """

    norm: Norm
    into: Linear
    out: Linear
    square: int
    is_behind: bool

    @classmethod
    def read(
        cls, source: TowerWeights, at: str, generation: Generation, config: QwenVisionConfig, is_behind: bool = False
    ) -> _Merger:
        square = config.hidden * config.merge**2
        norm, into, out = generation.merger
        return cls(
            _norm(source, f"{at}{norm}", square if is_behind else config.hidden, generation),
            Linear.read(source, f"{at}{into}", square, square),
            Linear.read(source, f"{at}{out}", config.text_hidden, square),
            square,
            is_behind,
        )

    def of(self, ops: TensorOps, x: Tensor) -> Tensor:
        """Of ``x [T, hidden]``, in which a square's patches follow each other: ``[squares, hidden of the text]``."""
        joined = (x.shape[0] * x.shape[1] // self.square, self.square)
        normed = self.norm.of(ops, x.reshape(joined)) if self.is_behind else self.norm.of(ops, x).reshape(joined)
        return self.out.of(ops, activated(ops, self.into.of(ops, normed), "gelu"))


def _layer(source: TowerWeights, index: int, generation: Generation, config: QwenVisionConfig) -> TowerLayer:
    at, hidden, inner = f"{_AT}blocks.{index}.", config.hidden, config.inner
    gate, up, down = (f"{at}mlp.{name}" if name else "" for name in generation.mlp)
    return TowerLayer(
        _norm(source, f"{at}norm1", hidden, generation),
        _norm(source, f"{at}norm2", hidden, generation),
        *Linear.joined(source, f"{at}attn.qkv", hidden),
        Linear.read(source, f"{at}attn.proj", hidden, hidden),
        Mlp(
            Linear.read(source, gate, inner, hidden) if gate else None,
            Linear.read(source, up, inner, hidden),
            Linear.read(source, down, hidden, inner),
            generation.activation,
        ),
        config.heads,
    )


def _norm(source: TowerWeights, name: str, size: int, generation: Generation) -> Norm:
    return (LayerNorm if generation.has_means else RmsNorm).read(source, name, size, _EPS)
