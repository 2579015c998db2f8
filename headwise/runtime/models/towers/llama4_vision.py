"""Llama 4's tower: tiles of an image, each encoded by itself, and the whole image once more behind them.

Patches and a class token, learned positions and rotary ones by column and row, layer norms, and MLPs without a gate. An
adapter joins squares of two by two patches, and a projector leads to the text's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.models.hf_config import HfConfig, flag, mapping, number, positive, text_of
from headwise.runtime.models.towers.activations import activated
from headwise.runtime.models.towers.base import EncodedImage, TowerParts
from headwise.runtime.models.towers.pixels import PixelForm, pixel_form
from headwise.runtime.models.towers.tiles import tiles_of
from headwise.runtime.models.towers.tower_layers import LayerNorm, Linear, Mlp, TowerLayer
from headwise.runtime.models.towers.tower_weights import TowerWeights, control_tokens
from headwise.runtime.models.values import shown

if TYPE_CHECKING:
    from PIL.Image import Image

_EPS = 1e-5
"""Of the norms, whatever ``norm_eps`` says: that is what transformers computes with."""
_START, _END, _IMAGE, _PATCH = "<|image_start|>", "<|image_end|>", "<|image|>", "<|patch|>"
_NEXT_COLUMN, _NEXT_ROW = "<|tile_x_separator|>", "<|tile_y_separator|>"
_SERVED = {"pixel_shuffle_ratio": 0.5, "num_channels": 3, "hidden_act": "gelu", "multi_modal_projector_bias": False}
_MEAN = _STD = (0.5, 0.5, 0.5)
_BILINEAR = 2


@dataclass(frozen=True)
class Llama4VisionConfig:
    """edge: pixels of a tile's edge
    patch:   of a patch's
    most:    tiles of an image, the one of the whole image not counted
    largest: whether images are enlarged to the canvas
    output:  numbers of a square of patches, as the adapter gives it
    """

    hidden: int
    inner: int
    heads: int
    layers: int
    edge: int
    patch: int
    adapter: int
    output: int
    text_hidden: int
    theta: float
    most: int
    largest: bool
    pixels: PixelForm

    @property
    def side(self) -> int:
        """Patches of a tile's edge."""
        return self.edge // self.patch

    @classmethod
    def of(cls, config: HfConfig, processor: HfConfig) -> Llama4VisionConfig:
        """Raises `ModelError` naming the field that cannot be served."""
        vision, size = mapping(config, "vision_config"), mapping(processor, "size")
        edge, patch = positive(vision, "image_size", default=448, most=4096), positive(vision, "patch_size", default=14)
        hidden = positive(vision, "hidden_size", default=768, most=1 << 16)
        heads = positive(vision, "num_attention_heads", default=16, most=256)
        if hidden % heads or hidden // heads % 4 or edge % (2 * patch):
            raise ModelError(
                f"config.json: 'vision_config' has 'hidden_size' {hidden} for {heads} heads, which must be a multiple "
                f"of four times as many, and 'image_size' {edge}, which must be one of two patches of {patch}"
            )
        for name, value in _SERVED.items():
            if vision.get(name, value) != value:
                raise ModelError(f"config.json: {name!r} of 'vision_config' must be {value}, got {shown(vision[name])}")
        if {positive(size, name, default=edge) for name in ("height", "width")} != {edge}:
            raise ModelError(f"the checkpoint's image processor has size {shown(size)}, its tower tiles of {edge}")
        return cls(
            hidden,
            positive(vision, "intermediate_size", default=5632, most=1 << 20),
            heads,
            positive(vision, "num_hidden_layers", default=34, most=256),
            edge,
            patch,
            positive(vision, "projector_input_dim", default=4096, most=1 << 20),
            positive(vision, "projector_output_dim", default=4096, most=1 << 20),
            positive(text_of(config), "hidden_size", default=5120, most=1 << 20),
            number(mapping(vision, "rope_parameters"), "rope_theta", number(vision, "rope_theta", 10000.0)),
            positive(processor, "max_patches", default=16, most=64),
            flag(processor, "resize_to_max_canvas"),
            pixel_form({"resample": _BILINEAR, **processor}, _MEAN, _STD),
        )


class Llama4Vision:
    """A `Tower`."""

    def __init__(self, parts: TowerParts) -> None:
        self.config = config = Llama4VisionConfig.of(parts.config, parts.processor)
        self._ops = ops = parts.ops
        source, hidden = TowerWeights(parts.weights, ops, ("vision_model.", "multi_modal_projector.")), config.hidden
        at = "vision_model."
        self._patches = source.linear(f"{at}patch_embedding.linear.weight", hidden, 3 * config.patch**2)
        self._class = source.array(f"{at}class_embedding", hidden)
        self._positions = source.array(f"{at}positional_embedding_vlm", config.side**2 + 1, hidden)
        self._before = LayerNorm.read(source, f"{at}layernorm_pre", hidden, _EPS)
        self._behind = LayerNorm.read(source, f"{at}layernorm_post", hidden, _EPS)
        self._layers = [_layer(source, f"{at}model.layers.{index}.", config) for index in range(config.layers)]
        self._adapter = (
            source.linear(f"{at}vision_adapter.mlp.fc1.weight", config.adapter, 4 * hidden),
            source.linear(f"{at}vision_adapter.mlp.fc2.weight", config.output, config.output),
        )
        self._projector = source.linear("multi_modal_projector.linear_1.weight", config.text_hidden, config.output)
        self._angles = [ops.upload(each) for each in _angles(config)]
        self._tokens = control_tokens(parts, (_START, _END, _IMAGE, _PATCH, _NEXT_COLUMN, _NEXT_ROW))
        self._own = {name: source.text_embedding(token) for name, token in self._tokens.items()}

    def encode(self, image: Image) -> EncodedImage:
        config = self.config
        tiles, (rows, columns) = tiles_of(image, config.edge, config.most, config.pixels, config.largest)
        made = [self._tile(tile) for tile in tiles]
        tokens: list[int] = []
        embeds: list[NDArray[np.float32]] = []

        def add(name: str, values: NDArray[np.float32] | None = None) -> None:
            values = self._own[name][None] if values is None else values
            tokens.extend([self._tokens[name]] * len(values))
            embeds.append(values)

        add(_START)
        for row in range(rows if rows * columns > 1 else 0):
            for column in range(columns):
                add(_PATCH, made[row * columns + column])
                if column < columns - 1:
                    add(_NEXT_COLUMN)
            add(_NEXT_ROW)
        add(_IMAGE)
        add(_PATCH, made[-1])
        add(_END)
        return EncodedImage(np.array(tokens, np.int32), np.concatenate(embeds))

    def _tile(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """Of ``pixels [3, edge, edge]``, squares of patches: ``float32 [side / 2 * side / 2, hidden of the text]``."""
        ops, side, patch = self._ops, self.config.side, self.config.patch
        cut = pixels.reshape(3, side, patch, side, patch).transpose(1, 3, 0, 2, 4).reshape(side**2, -1)
        patches = ops.numpy(ops.linear(ops.tensor(np.ascontiguousarray(cut)), self._patches))
        given = np.concatenate((np.asarray(patches, np.float32), self._class[None])) + self._positions
        x = self._before.of(ops, ops.tensor(given))
        for layer in self._layers:
            x = layer.forward(ops, x, self._angles)
        found = np.asarray(ops.numpy(self._behind.of(ops, x)), np.float32)[:-1]
        squares = found.reshape(side // 2, 2, side // 2, 2, -1).transpose(0, 2, 1, 3, 4).reshape(side**2 // 4, -1)
        y = ops.tensor(np.ascontiguousarray(squares))
        for weight in self._adapter:
            y = activated(ops, ops.linear(y, weight), "gelu")
        return np.array(ops.numpy(ops.linear(y, self._projector)), np.float32)


def build(parts: TowerParts) -> Llama4Vision:
    """A `BuildTower`."""
    return Llama4Vision(parts)


def _layer(source: TowerWeights, at: str, config: Llama4VisionConfig) -> TowerLayer:
    hidden, inner, attention = config.hidden, config.inner, f"{at}self_attn."
    return TowerLayer(
        LayerNorm.read(source, f"{at}input_layernorm", hidden, _EPS),
        LayerNorm.read(source, f"{at}post_attention_layernorm", hidden, _EPS),
        _rotated(source, f"{attention}q_proj", config),
        _rotated(source, f"{attention}k_proj", config),
        Linear.read(source, f"{attention}v_proj", hidden, hidden),
        Linear.read(source, f"{attention}o_proj", hidden, hidden),
        Mlp(
            None,
            Linear.read(source, f"{at}mlp.fc1", inner, hidden),
            Linear.read(source, f"{at}mlp.fc2", hidden, inner),
            "gelu",
        ),
        config.heads,
    )


def _rotated(source: TowerWeights, name: str, config: Llama4VisionConfig) -> Linear:
    hidden = config.hidden
    weight, bias = source.array(f"{name}.weight", hidden, hidden), source.array(f"{name}.bias", hidden)
    return Linear.rotated(source, weight, bias, hidden // config.heads)


def _angles(config: Llama4VisionConfig) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines, ``float32 [T, 1, D / 2]``: half of a head turns by the column, half by the row, each counted
    from 1. The class token, the last one, is not turned."""
    half = config.hidden // config.heads // 2
    frequencies = (1.0 / config.theta ** (np.arange(0, half, 2) / half)).astype(np.float32)
    row, column = np.divmod(np.arange(config.side**2, dtype=np.float32), np.float32(config.side))
    turned = np.concatenate([(each + 1)[:, None] * frequencies for each in (column, row)], axis=1)
    turned = np.concatenate((turned, np.zeros_like(turned[:1])))
    return np.cos(turned)[:, None], np.sin(turned)[:, None]
