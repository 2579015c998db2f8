"""MoonViT as Kimi-K2.5 has it for images, and the projector behind it.

Of Kimi-VL (arXiv 2504.07491): patches of an image of any aspect ratio, learned positions that are stretched over its
rows and columns, rotary ones by column and row, layer norms, MLPs without a gate, and every patch sees every other one
of its image. The projector joins squares of patches. What is for videos alone is not read: an image is one frame.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.models.hf_config import HfConfig, mapping, number, positive, text_of
from headwise.runtime.models.towers.activations import activated
from headwise.runtime.models.towers.base import EncodedImage, TowerParts
from headwise.runtime.models.towers.pixels import PixelForm, normalised, pixel_form
from headwise.runtime.models.towers.stretched import stretched
from headwise.runtime.models.towers.tower_layers import LayerNorm, Linear, Mlp, TowerLayer
from headwise.runtime.models.towers.tower_weights import TowerWeights, control_tokens
from headwise.runtime.models.towers.vision_fields import check_processor, check_served
from headwise.runtime.models.values import shown
from headwise.runtime.ops.base import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

_EPS = 1e-5
"""Of the tower's norms: no config has it."""
_PAD = "<|media_pad|>"
_MEAN = _STD = (0.5, 0.5, 0.5)
_SERVED = {
    "hidden_act": "gelu_pytorch_tanh",
    "projector_hidden_act": "gelu",
    "mm_projector_type": "patchmerger",
    "merge_type": "sd2_tpool",
    "pos_emb_type": "divided_fixed",
}
_AT, _PROJECTOR = "vision_tower.", "mm_projector."


@dataclass(frozen=True)
class MoonVitConfig:
    """patch: pixels of a patch's edge
    merge:    patches of the edge of a square that becomes one token
    grid:     rows and columns of learned positions
    most:     patches to which an image is scaled down; what fills its last squares is not counted
    side:     most patches of an edge
    """

    hidden: int
    inner: int
    text_hidden: int
    heads: int
    layers: int
    patch: int
    merge: int
    grid: tuple[int, int]
    most: int
    side: int
    theta: float
    projector_eps: float
    pixels: PixelForm

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @classmethod
    def of(cls, config: HfConfig, processor: HfConfig) -> MoonVitConfig:
        """Of fields as published, or as transformers writes them. Raises `ModelError` naming what is not served."""
        vision, form = mapping(config, "vision_config"), _processor_fields(processor)
        check_served(vision, _SERVED)
        hidden = _positive(vision, ("vt_hidden_size", "hidden_size"), 1152, 1 << 16)
        heads = _positive(vision, ("vt_num_attention_heads", "num_attention_heads"), 16, 256)
        if hidden % heads or hidden // heads % 4:
            raise ModelError(
                f"config.json: the hidden size {hidden} of 'vision_config' must be a multiple of four times its "
                f"{heads} attention heads: heads are rotated by rows and by columns"
            )
        patch, merge = positive(vision, "patch_size", default=14, most=256), _merge_size(vision)
        check_processor(form, patch_size=patch, merge_size=merge)
        return cls(
            hidden,
            _positive(vision, ("vt_intermediate_size", "intermediate_size"), 4304, 1 << 20),
            positive(text_of(config), "hidden_size", default=7168, most=1 << 20),
            heads,
            _positive(vision, ("vt_num_hidden_layers", "num_hidden_layers"), 27, 256),
            patch,
            merge,
            (
                _positive(vision, ("init_pos_emb_height", "pos_emb_height"), 64, 1024),
                _positive(vision, ("init_pos_emb_width", "pos_emb_width"), 64, 1024),
            ),
            positive(form, "max_patches", default=16384, most=1 << 18),
            positive(form, "side", default=512, most=1 << 13),
            number(mapping(vision, "rope_parameters"), "rope_theta", 10000.0),
            number(vision, "projector_ln_eps", number(config, "projection_layer_norm_eps", 1e-5)),
            pixel_form(form, _MEAN, _STD),
        )

    def fitted(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The size to which an image is scaled, down only, and the one to which it is filled: whole squares."""
        patches = max(1, width // self.patch) * max(1, height // self.patch)
        longest, step = self.side * self.patch, self.patch * self.merge
        scale = min(1.0, math.sqrt(self.most / patches), longest / width, longest / height)
        scaled = [min(max(1, int(edge * scale)), longest) for edge in (width, height)]
        filled = [-(-edge // step) * step for edge in scaled]
        return (scaled[0], scaled[1]), (filled[0], filled[1])


class MoonVit:
    """A `Tower`."""

    def __init__(self, parts: TowerParts) -> None:
        self.config = config = MoonVitConfig.of(parts.config, parts.processor)
        self._ops = ops = parts.ops
        source, hidden = TowerWeights(parts.weights, ops, (_AT, _PROJECTOR)), config.hidden
        self._patches = Linear.read(source, f"{_AT}patch_embed.proj", hidden, 3 * config.patch**2)
        self._positions = source.array(f"{_AT}patch_embed.pos_emb.weight", *config.grid, hidden)
        self._layers = [_layer(source, index, config) for index in range(config.layers)]
        self._norm = LayerNorm.read(source, f"{_AT}encoder.final_layernorm", hidden, _EPS)
        self._before = LayerNorm.read(source, f"{_PROJECTOR}pre_norm", hidden, config.projector_eps)
        square = hidden * config.merge**2
        self._into = Linear.read(source, f"{_PROJECTOR}proj.0", square, square)
        self._out = Linear.read(source, f"{_PROJECTOR}proj.2", config.text_hidden, square)
        self._token = control_tokens(parts, (_PAD,))[_PAD]

    def encode(self, image: Image) -> EncodedImage:
        config = self.config
        scaled, (width, height) = config.fitted(*image.size)
        pixels = normalised(image, scaled, config.pixels, (width, height))
        embeds = self._projected(*self._features(pixels, height // config.patch, width // config.patch))
        return EncodedImage(np.full(len(embeds), self._token, np.int32), embeds)

    def _features(self, pixels: NDArray[np.float32], rows: int, columns: int) -> tuple[Tensor, int, int]:
        """What the tower makes of ``pixels [3, height, width]``: ``[rows * columns, hidden]``, and their numbers."""
        ops, patch = self._ops, self.config.patch
        cut = pixels.reshape(3, rows, patch, columns, patch).transpose(1, 3, 0, 2, 4).reshape(rows * columns, -1)
        places = stretched(self._positions, rows, columns).reshape(rows * columns, -1)
        x = self._patches.of(ops, ops.tensor(np.ascontiguousarray(cut))) + ops.tensor(places)
        angles = [ops.upload(each) for each in _angles(self.config, rows, columns)]
        for layer in self._layers:
            x = layer.forward(ops, x, angles)
        return self._norm.of(ops, x), rows, columns

    def _projected(self, x: Tensor, rows: int, columns: int) -> NDArray[np.float32]:
        """Of ``x [rows * columns, hidden]``, squares of patches as ``float32 [tokens, hidden of the text]``."""
        ops, merge = self._ops, self.config.merge
        normed = np.asarray(ops.numpy(self._before.of(ops, x)), np.float32)
        squares = normed.reshape(rows // merge, merge, columns // merge, merge, -1).transpose(0, 2, 1, 3, 4)
        given = ops.tensor(np.ascontiguousarray(squares.reshape(-1, self.config.hidden * merge**2)))
        inner = activated(ops, self._into.of(ops, given), "gelu")
        return np.array(ops.numpy(self._out.of(ops, inner)), np.float32)


def build(parts: TowerParts) -> MoonVit:
    """A `BuildTower`."""
    return MoonVit(parts)


def _layer(source: TowerWeights, index: int, config: MoonVitConfig) -> TowerLayer:
    at, hidden, inner = f"{_AT}encoder.blocks.{index}.", config.hidden, config.inner
    weights = np.split(source.array(f"{at}wqkv.weight", 3 * hidden, hidden), 3)
    biases = np.split(source.array(f"{at}wqkv.bias", 3 * hidden), 3)
    return TowerLayer(
        LayerNorm.read(source, f"{at}norm0", hidden, _EPS),
        LayerNorm.read(source, f"{at}norm1", hidden, _EPS),
        Linear.rotated(source, weights[0], biases[0], config.head_dim),
        Linear.rotated(source, weights[1], biases[1], config.head_dim),
        Linear(source.matrix(weights[2]), source.vector(biases[2])),
        Linear.read(source, f"{at}wo", hidden, hidden),
        Mlp(
            None,
            Linear.read(source, f"{at}mlp.fc0", inner, hidden),
            Linear.read(source, f"{at}mlp.fc1", hidden, inner),
            "gelu_pytorch_tanh",
        ),
        config.heads,
    )


def _angles(config: MoonVitConfig, rows: int, columns: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines, ``float32 [T, 1, D / 2]``: by the column and by the row in turn, with each frequency."""
    frequencies = (1.0 / config.theta ** (np.arange(0, config.head_dim, 4) / config.head_dim)).astype(np.float32)
    row, column = np.divmod(np.arange(rows * columns, dtype=np.float32), np.float32(columns))
    turned = np.stack((column[:, None] * frequencies, row[:, None] * frequencies), axis=2)
    turned = turned.reshape(rows * columns, -1)
    return np.cos(turned)[:, None], np.sin(turned)[:, None]


def _positive(config: HfConfig, keys: tuple[str, str], default: int, most: int) -> int:
    """A field that is published under the first of two names, and that transformers writes under the second one."""
    return positive(config, next((key for key in keys if key in config), keys[0]), default=default, most=most)


def _merge_size(vision: HfConfig) -> int:
    given = vision.get("merge_kernel_size", 2)
    edges = [given, given] if not isinstance(given, list | tuple) else list(given)
    if len(edges) != 2 or edges[0] != edges[1]:
        raise ModelError(f"config.json: 'merge_kernel_size' must be a square of patches, got {shown(given)}")
    return positive({"merge_kernel_size": edges[0]}, "merge_kernel_size", most=16)


def _processor_fields(processor: HfConfig) -> dict[str, Any]:
    """What is published in ``media_proc_cfg``, or what transformers writes, by one set of names: those of
    transformers, but ``side`` for the most patches of an edge."""
    given = mapping(processor, "media_proc_cfg") or processor
    if given.get("fixed_output_tokens") is not None:
        raise ModelError(
            f"the checkpoint's image processor has fixed_output_tokens {shown(given['fixed_output_tokens'])}: null is "
            "served"
        )
    size = mapping(given, "size")
    if size.get("max_height") != size.get("max_width"):
        raise ModelError(f"the checkpoint's image processor has size {shown(size)}: its two numbers must be equal")
    return {
        **given,
        "merge_size": given.get("merge_kernel_size", given.get("merge_size")),
        "max_patches": given.get("in_patch_limit", given.get("max_patches")),
        "side": given.get("patch_limit_on_one_side", size.get("max_height")),
    }
