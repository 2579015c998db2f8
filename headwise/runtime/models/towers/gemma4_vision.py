"""Gemma 4's tower: patches of an image of any aspect ratio, whose squares' means become tokens.

Learned positions and rotary ones by column and row, norms around attention and MLP, normed queries, keys and values,
gated MLPs, and every patch sees every other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.models.hf_config import HfConfig, flag, integer, mapping, number, positive, text_of
from headwise.runtime.models.towers.activations import activated
from headwise.runtime.models.towers.base import EncodedImage, TowerParts
from headwise.runtime.models.towers.dense_attention import dense_attention
from headwise.runtime.models.towers.pixels import PixelForm, normalised, pixel_form
from headwise.runtime.models.towers.tower_weights import TowerWeights, control_tokens
from headwise.runtime.models.values import shown
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps, Weight

if TYPE_CHECKING:
    from PIL.Image import Image

_START, _IMAGE, _END = "<|image>", "<|image|>", "<image|>"
_ACTIVATION = "gelu_pytorch_tanh"
_HALVES = (0.5, 0.5, 0.5)
_PER_LAYER = 256
"""Of ``hidden_size_per_layer_input``, where a config has none."""


def lacking(config: HfConfig) -> str:
    """What of a ``config.json`` its images need besides a tower that is not served, in words; empty: nothing."""
    per_layer = integer(text_of(config), "hidden_size_per_layer_input", default=_PER_LAYER)
    return "an embedding of its own in every layer (E2B, E4B)" if per_layer else ""


@dataclass(frozen=True)
class Gemma4VisionConfig:
    """patch: pixels of a patch's edge
    square:  patches of the edge of a square that becomes a token
    most:    tokens of an image
    places:  columns, and rows, that have a learned position
    clips:   whether what goes into linear layers and comes out of them has limits
    standardises: whether tokens are shifted and scaled
    """

    hidden: int
    inner: int
    heads: int
    head_dim: int
    layers: int
    patch: int
    square: int
    most: int
    places: int
    text_hidden: int
    eps: float
    theta: float
    clips: bool
    standardises: bool
    pixels: PixelForm

    @classmethod
    def of(cls, config: HfConfig, processor: HfConfig) -> Gemma4VisionConfig:
        """Raises `ModelError` naming the field that cannot be served."""
        vision = mapping(config, "vision_config")
        heads = positive(vision, "num_attention_heads", default=12, most=256)
        head_dim = positive(vision, "head_dim", default=64, most=1024)
        served = {"model_type": "gemma4_vision", "hidden_activation": _ACTIVATION, "num_key_value_heads": heads}
        for name, value in served.items():
            if vision.get(name, value) != value:
                raise ModelError(f"config.json: {name!r} of 'vision_config' must be {value}, got {shown(vision[name])}")
        if head_dim % 4:
            raise ModelError(
                f"config.json: 'head_dim' {head_dim} of 'vision_config' must be a multiple of four: heads are rotated "
                "by columns and by rows"
            )
        patch = positive(vision, "patch_size", default=16, most=256)
        square = positive(vision, "pooling_kernel_size", default=3, most=16)
        for name, value in (("patch_size", patch), ("pooling_kernel_size", square)):
            if positive(processor, name, default=value) != value:
                raise ModelError(
                    f"the checkpoint's image processor has {name} {shown(processor[name])}, its tower {value}"
                )
        ropes = mapping(vision, "rope_parameters")
        return cls(
            positive(vision, "hidden_size", default=768, most=1 << 16),
            positive(vision, "intermediate_size", default=3072, most=1 << 20),
            heads,
            head_dim,
            positive(vision, "num_hidden_layers", default=16, most=256),
            patch,
            square,
            positive(processor, "max_soft_tokens", default=280, most=1 << 14),
            positive(vision, "position_embedding_size", default=10 * 1024, most=1 << 20),
            positive(text_of(config), "hidden_size", default=2304, most=1 << 20),
            number(vision, "rms_norm_eps", 1e-6),
            number(ropes, "rope_theta", 100.0),
            flag(vision, "use_clipped_linears"),
            flag(vision, "standardize"),
            _pixels(processor),
        )

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """The size to which an image is scaled: of whole squares of patches, as many as fit into `most`, in about its
        proportions; of a very long one a row or a column of them."""
        step = self.patch * self.square
        factor = sqrt(self.most * self.square**2 * self.patch**2 / (width * height))
        columns, rows = int(factor * width / step), int(factor * height / step)
        if rows == 0:
            columns, rows = min(max(1, width // height), self.most), 1
        elif columns == 0:
            columns, rows = 1, min(height // width, self.most)
        return columns * step, rows * step


class Gemma4Vision:
    """A `Tower`. What stands around an image's tokens is text: see `headwise.runtime.models.image_text`."""

    def __init__(self, parts: TowerParts) -> None:
        self.config = config = Gemma4VisionConfig.of(parts.config, parts.processor)
        self._ops = ops = parts.ops
        source = TowerWeights(parts.weights, ops, ("patch_embedder.", "encoder.layers.", "embed_vision.", "std_"))
        self._patches = source.linear("patch_embedder.input_proj.weight", config.hidden, 3 * config.patch**2)
        self._places = source.array("patch_embedder.position_embedding_table", 2, config.places, config.hidden)
        self._layers = [_Layer.read(source, f"encoder.layers.{index}.", config) for index in range(config.layers)]
        self._standard: list[NDArray[np.float32]] = []
        if config.standardises:
            self._standard = [source.array(f"std_{name}", config.hidden) for name in ("bias", "scale")]
        self._norm = ops.norm_weight(np.ones(config.hidden, np.float32))
        projection = "embed_vision.embedding_projection.weight"
        self._projection = source.linear(projection, config.text_hidden, config.hidden)
        self._token = control_tokens(parts, (_START, _IMAGE, _END))[_IMAGE]

    def encode(self, image: Image) -> EncodedImage:
        config = self.config
        size = config.fitted(*image.size)
        pixels = normalised(image, size, config.pixels)
        columns, rows = (edge // config.patch for edge in size)
        embeds = self._projected(self._features(pixels, rows, columns))
        return EncodedImage(np.full(len(embeds), self._token, np.int32), embeds)

    def _features(self, pixels: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
        """What the last layer makes of ``pixels [3, height, width]``: ``float32 [rows, columns, hidden]``."""
        ops, patch = self._ops, self.config.patch
        cut = pixels.reshape(3, rows, patch, columns, patch).transpose(1, 3, 2, 4, 0).reshape(rows * columns, -1)
        places = self._places[1, :rows, None] + self._places[0, None, :columns]
        x = ops.linear(ops.tensor(np.ascontiguousarray(cut)), self._patches)
        x = x + ops.tensor(np.ascontiguousarray(places.reshape(rows * columns, -1)))
        angles = [ops.upload(each) for each in _angles(self.config, rows, columns)]
        for layer in self._layers:
            x = layer.forward(ops, x, angles)
        return np.asarray(ops.numpy(x), np.float32).reshape(rows, columns, -1)

    def _projected(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """``float32 [tokens, hidden of the text]``: of the means of squares of patches, row by row."""
        ops, config = self._ops, self.config
        rows, columns, hidden = features.shape
        square = config.square
        cut = features.reshape(rows // square, square, columns // square, square, hidden)
        means = cut.mean(axis=(1, 3)).reshape(-1, hidden) * np.float32(sqrt(hidden))
        if self._standard:
            bias, scale = self._standard
            means = (means - bias) * scale
        normed = ops.rms_norm(ops.tensor(np.ascontiguousarray(means)), self._norm, config.eps)
        return np.array(ops.numpy(ops.linear(normed, self._projection)), np.float32)


def build(parts: TowerParts) -> Gemma4Vision:
    """A `BuildTower`."""
    return Gemma4Vision(parts)


@dataclass(frozen=True, eq=False)
class _Product:
    """A product without a bias. limits: least and most of what goes in, then of what comes out; empty: none"""

    weight: Weight
    limits: tuple[float, ...]

    @classmethod
    def read(
        cls, source: TowerWeights, name: str, shape: tuple[int, int], clips: bool, order: Any = slice(None)
    ) -> _Product:
        """order: in which outputs come"""
        names = [f"{name}.{end}" for end in ("input_min", "input_max", "output_min", "output_max")] if clips else []
        limits = tuple(source.number(each) for each in names)
        return cls(source.matrix(source.array(f"{name}.linear.weight", *shape)[order]), limits)

    def of(self, ops: TensorOps, x: Tensor) -> Tensor:
        """Of ``x [T, inputs]``: ``[T, outputs]``."""
        if not self.limits:
            return ops.linear(x, self.weight)
        return _clipped(ops, ops.linear(_clipped(ops, x, self.limits[:2]), self.weight), self.limits[2:])


def _clipped(ops: TensorOps, x: Tensor, limits: Sequence[float]) -> Tensor:
    given = ops.kernel_array(x)
    return ops.from_kernel_array(given.clip(*limits).astype(given.dtype, copy=False))


@dataclass(frozen=True, eq=False)
class _Layer:
    norms: tuple[Tensor, Tensor, Tensor, Tensor]
    of_heads: tuple[Tensor, Tensor, Tensor]
    query: _Product
    key: _Product
    value: _Product
    out: _Product
    gate: _Product
    up: _Product
    down: _Product
    config: Gemma4VisionConfig

    @classmethod
    def read(cls, source: TowerWeights, at: str, config: Gemma4VisionConfig) -> _Layer:
        hidden, inner, clips = config.hidden, config.inner, config.clips
        dim, width = config.head_dim, config.heads * config.head_dim
        quarters = np.arange(dim).reshape(4, dim // 4)
        turned = quarters[[0, 2, 1, 3]].ravel()  # pairs are half of a half apart; here half a head, as `TensorOps.rope`
        order = (np.arange(0, width, dim)[:, None] + turned).ravel()
        attention, mlp, ops = f"{at}self_attn.", f"{at}mlp.", source.ops
        query, key = (source.array(f"{attention}{name}_norm.weight", dim)[turned] for name in "qk")
        before, behind = "input_layernorm", "post_attention_layernorm"
        names = before, behind, "pre_feedforward_layernorm", "post_feedforward_layernorm"
        first, second, third, fourth = (source.norm(f"{at}{name}.weight", hidden) for name in names)
        return cls(
            (first, second, third, fourth),
            (ops.norm_weight(query), ops.norm_weight(key), ops.norm_weight(np.ones(dim, np.float32))),
            _Product.read(source, f"{attention}q_proj", (width, hidden), clips, order),
            _Product.read(source, f"{attention}k_proj", (width, hidden), clips, order),
            _Product.read(source, f"{attention}v_proj", (width, hidden), clips),
            _Product.read(source, f"{attention}o_proj", (hidden, width), clips),
            _Product.read(source, f"{mlp}gate_proj", (inner, hidden), clips),
            _Product.read(source, f"{mlp}up_proj", (inner, hidden), clips),
            _Product.read(source, f"{mlp}down_proj", (hidden, inner), clips),
            config,
        )

    def forward(self, ops: TensorOps, x: Tensor, angles: Sequence[KernelArray]) -> Tensor:
        """Of ``x [T, hidden]``, the patches of one image."""
        eps, heads = self.config.eps, (x.shape[0], self.config.heads, self.config.head_dim)
        before, behind, before_mlp, behind_mlp = self.norms
        given = ops.rms_norm(x, before, eps)
        projected = (each.of(ops, given).reshape(heads) for each in (self.query, self.key, self.value))
        query, key, value = (ops.rms_norm(each, norm, eps) for each, norm in zip(projected, self.of_heads, strict=True))
        query, key = (ops.rope(each, *angles) for each in (query, key))
        seen = dense_attention(ops, query, key, value, 1.0)
        x = x + ops.rms_norm(self.out.of(ops, seen.reshape((heads[0], heads[1] * heads[2]))), behind, eps)
        given = ops.rms_norm(x, before_mlp, eps)
        inner = activated(ops, self.gate.of(ops, given), _ACTIVATION) * self.up.of(ops, given)
        return x + ops.rms_norm(self.down.of(ops, inner), behind_mlp, eps)


def _angles(config: Gemma4VisionConfig, rows: int, columns: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines, ``float32 [T, 1, D / 2]``: half of a head turns by the column, half by the row."""
    half = config.head_dim // 2
    frequencies = (1.0 / config.theta ** (np.arange(0, half, 2) / half)).astype(np.float32)
    row, column = np.divmod(np.arange(rows * columns, dtype=np.float32), np.float32(columns))
    turned = np.concatenate([each[:, None] * frequencies for each in (column, row)], axis=1)
    return np.cos(turned)[:, None], np.sin(turned)[:, None]


def _pixels(processor: HfConfig) -> PixelForm:
    """Numbers from -1 to 1: the tower's own doing, whose processor leaves those from 0 to 1 as they are."""
    mean, std = processor.get("image_mean", [0.0] * 3), processor.get("image_std", [1.0] * 3)
    if processor.get("do_normalize") and (mean, std) != ([0.0] * 3, [1.0] * 3):
        raise ModelError("the checkpoint's image processor has do_normalize true: false is served")
    named = {"resample": 3, **processor, "do_normalize": True, "image_mean": _HALVES, "image_std": _HALVES}
    return pixel_form(named, _HALVES, _HALVES)
