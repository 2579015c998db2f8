"""Pixtral's tower as Mistral Small 3.1 and later, and Ministral 3 have it: a patch merger and a projector behind it.

Of Pixtral 12B (arXiv 2410.07073): patches of an image of any aspect ratio, RMS norms, rotary embedding over rows and
columns, gated MLPs, and every patch sees every other one of its image. The merger joins squares of patches. Rows of an
image end with [IMG_BREAK], the last one with [IMG_END].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.models.hf_config import HfConfig, flag, mapping, number, positive, text_of
from headwise.runtime.models.towers.activations import activated
from headwise.runtime.models.towers.base import EncodedImage, TowerParts
from headwise.runtime.models.towers.pixels import CLIP_MEAN, CLIP_STD, PixelForm, normalised, pixel_form
from headwise.runtime.models.towers.tower_layers import Linear, Mlp, RmsNorm, TowerLayer
from headwise.runtime.models.towers.tower_weights import TowerWeights, control_tokens
from headwise.runtime.models.values import shown
from headwise.runtime.ops.base import Tensor, TensorOps, Weight

if TYPE_CHECKING:
    from PIL.Image import Image

_EPS = 1e-5
"""Of the tower's norms: no config has it."""
_MOST_LAYERS, _MOST_HEADS, _MOST_EDGE = 256, 256, 8192


@dataclass(frozen=True)
class PixtralConfig:
    """patch: pixels of a patch's edge
    merge:    patches of the edge of a square that becomes one token
    longest:  most pixels of an image's edge; larger ones are scaled down
    layers:   those that are computed: up to the one whose output is projected
    """

    hidden: int
    inner: int
    text_hidden: int
    heads: int
    layers: int
    patch: int
    merge: int
    longest: int
    theta: float
    activation: str
    projector_activation: str
    projector_bias: bool
    projector_eps: float
    pixels: PixelForm

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @classmethod
    def of(cls, config: HfConfig, processor: HfConfig) -> PixtralConfig:
        """Raises `ModelError` naming the field that cannot be served."""
        vision = mapping(config, "vision_config")
        if vision.get("model_type", "pixtral") != "pixtral":
            raise ModelError(
                f"config.json: the vision tower is served as 'pixtral' only, got 'model_type' "
                f"{shown(vision['model_type'])} of its 'vision_config'"
            )
        hidden = positive(vision, "hidden_size", default=1024, most=1 << 16)
        heads = positive(vision, "num_attention_heads", default=16, most=_MOST_HEADS)
        if hidden % heads or hidden // heads % 4:
            raise ModelError(
                f"config.json: 'hidden_size' {hidden} of 'vision_config' must be a multiple of four times its "
                f"'num_attention_heads' {heads}: heads are rotated by rows and by columns"
            )
        if positive(vision, "num_channels", default=3) != 3:
            raise ModelError(f"config.json: 'num_channels' must be 3, got {shown(vision['num_channels'])}")
        size = mapping(processor, "size")
        image_size = positive(vision, "image_size", default=1024, most=_MOST_EDGE)
        return cls(
            hidden,
            positive(vision, "intermediate_size", default=4096, most=1 << 20),
            positive(text_of(config), "hidden_size", most=1 << 20),
            heads,
            _layers(config, positive(vision, "num_hidden_layers", default=24, most=_MOST_LAYERS)),
            positive(vision, "patch_size", default=16, most=256),
            positive(config, "spatial_merge_size", default=2, most=16),
            positive(size, "longest_edge", default=image_size, most=_MOST_EDGE),
            number(mapping(vision, "rope_parameters"), "rope_theta", number(vision, "rope_theta", 10000.0)),
            _activation(vision, "hidden_act"),
            _activation(config, "projector_hidden_act"),
            flag(config, "multimodal_projector_bias"),
            number(text_of(config), "rms_norm_eps", 1e-6),
            pixel_form(processor, CLIP_MEAN, CLIP_STD),
        )

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """The size to which an image is scaled: at most `longest`, and then up to whole squares of patches."""
        ratio = max(width, height) / self.longest
        if ratio > 1:
            width, height = max(1, int(width / ratio)), max(1, int(height / ratio))
        step = self.patch * self.merge
        return -(-width // step) * step, -(-height // step) * step


class Pixtral:
    """A `Tower`."""

    def __init__(self, parts: TowerParts) -> None:
        self.config = config = PixtralConfig.of(parts.config, parts.processor)
        self._ops = ops = parts.ops
        source = TowerWeights(parts.weights, ops, ("vision_tower.", "multi_modal_projector."))
        self._patches = source.linear("vision_tower.patch_conv.weight", config.hidden, 3 * config.patch**2)
        self._norm = source.norm("vision_tower.ln_pre.weight", config.hidden)
        self._layers = [_layer(source, index, config) for index in range(config.layers)]
        self._projector = _Projector.read(source, config)
        self._tokens = control_tokens(parts, ("[IMG]", "[IMG_BREAK]", "[IMG_END]"))
        self._ends = {name: source.text_embedding(token) for name, token in self._tokens.items()}

    def encode(self, image: Image) -> EncodedImage:
        config = self.config
        width, height = config.fitted(*image.size)
        pixels = normalised(image, (width, height), config.pixels)
        rows, columns = height // config.patch, width // config.patch
        grid = self._projector.project(self._ops, self._features(pixels, rows, columns), (rows, columns), config)
        return self._with_breaks(grid.reshape(rows // config.merge, columns // config.merge, -1))

    def _features(self, pixels: NDArray[np.float32], rows: int, columns: int) -> Tensor:
        """What the last layer makes of ``pixels [3, height, width]``: ``[rows * columns, hidden]``."""
        ops, patch = self._ops, self.config.patch
        cut = pixels.reshape(3, rows, patch, columns, patch).transpose(1, 3, 0, 2, 4)
        x = ops.linear(ops.tensor(np.ascontiguousarray(cut.reshape(rows * columns, -1))), self._patches)
        x = ops.rms_norm(x, self._norm, _EPS)
        angles = [ops.upload(each) for each in _angles(self.config, rows, columns)]
        for layer in self._layers:
            x = layer.forward(ops, x, angles)
        return x

    def _with_breaks(self, grid: NDArray[np.float32]) -> EncodedImage:
        """Of ``grid [rows, columns, hidden]``: the image's tokens, with one more behind each row."""
        rows, columns, hidden = grid.shape
        tokens = np.full((rows, columns + 1), self._tokens["[IMG]"], np.int32)
        embeds = np.empty((rows, columns + 1, hidden), np.float32)
        embeds[:, :columns] = grid
        for row in range(rows):
            end = "[IMG_END]" if row == rows - 1 else "[IMG_BREAK]"
            tokens[row, columns], embeds[row, columns] = self._tokens[end], self._ends[end]
        return EncodedImage(tokens.reshape(-1), embeds.reshape(-1, hidden))


def build(parts: TowerParts) -> Pixtral:
    """A `BuildTower`."""
    return Pixtral(parts)


def _layer(source: TowerWeights, index: int, config: PixtralConfig) -> TowerLayer:
    at, hidden, inner = f"vision_tower.transformer.layers.{index}.", config.hidden, config.inner

    def linear(name: str, outputs: int, inputs: int) -> Linear:
        return Linear.read(source, f"{at}{name}_proj", outputs, inputs, has_bias=False)

    query, key, value, out = (linear(f"attention.{name}", hidden, hidden) for name in "qkvo")
    return TowerLayer(
        RmsNorm.read(source, f"{at}attention_norm", hidden, _EPS),
        RmsNorm.read(source, f"{at}ffn_norm", hidden, _EPS),
        query,
        key,
        value,
        out,
        Mlp(
            linear("feed_forward.gate", inner, hidden),
            linear("feed_forward.up", inner, hidden),
            linear("feed_forward.down", hidden, inner),
            config.activation,
        ),
        config.heads,
    )


@dataclass(frozen=True, eq=False)
class _Projector:
    norm: Tensor
    merger: Weight
    first: Weight
    second: Weight
    first_bias: Tensor | None
    second_bias: Tensor | None

    @classmethod
    def read(cls, source: TowerWeights, config: PixtralConfig) -> _Projector:
        at, hidden, size = "multi_modal_projector.", config.hidden, config.text_hidden
        biases = [source.bias(f"{at}linear_{n}.bias", size) if config.projector_bias else None for n in (1, 2)]
        return cls(
            source.norm(f"{at}norm.weight", hidden),
            source.linear(f"{at}patch_merger.merging_layer.weight", hidden, hidden * config.merge**2),
            source.linear(f"{at}linear_1.weight", size, hidden),
            source.linear(f"{at}linear_2.weight", size, size),
            *biases,
        )

    def project(self, ops: TensorOps, x: Tensor, grid: tuple[int, int], config: PixtralConfig) -> NDArray[np.float32]:
        """Of ``x [rows * columns, hidden]``, squares of patches as ``float32 [tokens, hidden of the text]``.

        A square's numbers are in the order of its channels, then of its rows and columns.
        """
        (rows, columns), merge = grid, config.merge
        normed = ops.numpy(ops.rms_norm(x, self.norm, config.projector_eps))
        squares = normed.reshape(rows // merge, merge, columns // merge, merge, -1).transpose(0, 2, 4, 1, 3)
        merged = ops.linear(
            ops.tensor(np.ascontiguousarray(squares.reshape(-1, config.hidden * merge**2), np.float32)), self.merger
        )
        inner = activated(ops, ops.linear(merged, self.first, self.first_bias), config.projector_activation)
        return np.asarray(ops.numpy(ops.linear(inner, self.second, self.second_bias)), np.float32)


def _angles(config: PixtralConfig, rows: int, columns: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines, ``float32 [T, 1, D / 2]``: every other frequency turns by the row, those between by the
    column."""
    frequencies = (1.0 / config.theta ** (np.arange(0, config.head_dim, 2) / config.head_dim)).astype(np.float32)
    row, column = np.divmod(np.arange(rows * columns, dtype=np.float32), np.float32(columns))
    turned = np.concatenate((row[:, None] * frequencies[0::2], column[:, None] * frequencies[1::2]), axis=1)
    return np.cos(turned)[:, None], np.sin(turned)[:, None]


def _activation(config: Mapping[str, Any], key: str) -> str:
    found = config.get(key) or "gelu"
    if found not in ("gelu", "silu"):
        raise ModelError(f"config.json: {key!r} of a vision tower must be gelu or silu, got {shown(found)}")
    return str(found)


def _layers(config: HfConfig, num_layers: int) -> int:
    """How many layers are computed, by ``vision_feature_layer``: -1 is the last one, 0 what the first one gets."""
    found = config.get("vision_feature_layer", -1)
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, int) or isinstance(found, bool) or not -num_layers - 1 <= found <= num_layers:
        raise ModelError(
            f"config.json: 'vision_feature_layer' must be one of the tower's {num_layers} layers, got {shown(found)}"
        )
    return found if found >= 0 else num_layers + 1 + found
