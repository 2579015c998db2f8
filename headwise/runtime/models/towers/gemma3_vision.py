"""Gemma 3's tower: SigLIP (arXiv 2303.15343) over images of one size, and a projector that takes squares' means.

Patches with learned positions, layer norms, MLPs without a gate, and every patch sees every other one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.models.hf_config import HfConfig, mapping, number, positive, text_of
from headwise.runtime.models.towers.base import EncodedImage, TowerParts
from headwise.runtime.models.towers.pixels import PixelForm, normalised, pixel_form
from headwise.runtime.models.towers.tower_layers import LayerNorm, Linear, Mlp, TowerLayer
from headwise.runtime.models.towers.tower_weights import TowerWeights, control_tokens
from headwise.runtime.models.values import shown

if TYPE_CHECKING:
    from PIL.Image import Image

_START, _IMAGE, _END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
_SERVED = {"model_type": "siglip_vision_model", "num_channels": 3, "hidden_act": "gelu_pytorch_tanh"}
_MEAN = _STD = (0.5, 0.5, 0.5)
_BILINEAR = 2


@dataclass(frozen=True)
class Gemma3VisionConfig:
    """edge: pixels of an image's edge, whatever it is scaled from
    patch:  of a patch's
    tokens: of an image's edge: each is the mean of a square of patches
    """

    hidden: int
    inner: int
    heads: int
    layers: int
    edge: int
    patch: int
    tokens: int
    text_hidden: int
    eps: float
    pixels: PixelForm

    @property
    def side(self) -> int:
        """Patches of an image's edge."""
        return self.edge // self.patch

    @classmethod
    def of(cls, config: HfConfig, processor: HfConfig) -> Gemma3VisionConfig:
        """Raises `ModelError` naming the field that cannot be served."""
        vision, size = mapping(config, "vision_config"), mapping(processor, "size")
        for name, value in _SERVED.items():
            if vision.get(name, value) != value:
                raise ModelError(f"config.json: {name!r} of 'vision_config' must be {value}, got {shown(vision[name])}")
        if processor.get("do_pan_and_scan"):
            raise ModelError("the checkpoint's image processor has do_pan_and_scan true: false is served")
        hidden = positive(vision, "hidden_size", default=768, most=1 << 16)
        heads = positive(vision, "num_attention_heads", default=12, most=256)
        edge, patch = positive(vision, "image_size", default=224, most=4096), positive(vision, "patch_size", default=16)
        every = positive(config, "mm_tokens_per_image", default=256, most=1 << 16)
        tokens = isqrt(every)
        if hidden % heads or edge % patch or tokens**2 != every or edge // patch % tokens:
            raise ModelError(
                f"config.json: 'vision_config' has 'hidden_size' {hidden} for {heads} heads, which must be a multiple, "
                f"and 'image_size' {edge}, which must be one of patches of {patch}, and of the {tokens} squares of "
                f"these whose square 'mm_tokens_per_image' {every} must be"
            )
        if {positive(size, name, default=edge) for name in ("height", "width")} != {edge}:
            raise ModelError(f"the checkpoint's image processor has size {shown(size)}, its tower images of {edge}")
        return cls(
            hidden,
            positive(vision, "intermediate_size", default=3072, most=1 << 20),
            heads,
            positive(vision, "num_hidden_layers", default=12, most=256),
            edge,
            patch,
            tokens,
            positive(text_of(config), "hidden_size", default=2304, most=1 << 20),
            number(vision, "layer_norm_eps", 1e-6),
            pixel_form({"resample": _BILINEAR, **processor}, _MEAN, _STD),
        )


class Gemma3Vision:
    """A `Tower`. What stands around an image's tokens is text: see `headwise.runtime.models.image_text`."""

    def __init__(self, parts: TowerParts) -> None:
        self.config = config = Gemma3VisionConfig.of(parts.config, parts.processor)
        self._ops = ops = parts.ops
        beginnings = ("embeddings.", "encoder.layers.", "post_layernorm.", "multi_modal_projector.")
        source, hidden = TowerWeights(parts.weights, ops, beginnings), config.hidden
        self._patches = Linear.read(source, "embeddings.patch_embedding", hidden, 3 * config.patch**2)
        self._positions = ops.tensor(source.array("embeddings.position_embedding.weight", config.side**2, hidden))
        self._layers = [_layer(source, f"encoder.layers.{index}.", config) for index in range(config.layers)]
        self._behind = LayerNorm.read(source, "post_layernorm", hidden, config.eps)
        at = "multi_modal_projector."
        self._norm = ops.norm_weight(source.array(f"{at}mm_soft_emb_norm.weight", hidden) + 1)
        projection = source.array(f"{at}mm_input_projection_weight", hidden, config.text_hidden)
        self._projection = source.matrix(projection.T)
        self._token = control_tokens(parts, (_START, _IMAGE, _END))[_IMAGE]

    def encode(self, image: Image) -> EncodedImage:
        config = self.config
        pixels = normalised(image, (config.edge, config.edge), config.pixels)
        embeds = self._projected(self._features(pixels))
        return EncodedImage(np.full(len(embeds), self._token, np.int32), embeds)

    def _features(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the last layer makes of ``pixels [3, edge, edge]``: ``float32 [side, side, hidden]``."""
        ops, side, patch = self._ops, self.config.side, self.config.patch
        cut = pixels.reshape(3, side, patch, side, patch).transpose(1, 3, 0, 2, 4).reshape(side**2, -1)
        x = self._patches.of(ops, ops.tensor(np.ascontiguousarray(cut))) + self._positions
        for layer in self._layers:
            x = layer.forward(ops, x)
        found = ops.numpy(self._behind.of(ops, x))
        return np.asarray(found, np.float32).reshape(side, side, -1)

    def _projected(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """``float32 [tokens * tokens, hidden of the text]``: of the means of squares of patches."""
        ops, tokens = self._ops, self.config.tokens
        square = self.config.side // tokens
        means = features.reshape(tokens, square, tokens, square, -1).mean(axis=(1, 3)).reshape(tokens**2, -1)
        normed = ops.rms_norm(ops.tensor(np.ascontiguousarray(means)), self._norm, self.config.eps)
        return np.array(ops.numpy(ops.linear(normed, self._projection)), np.float32)


def build(parts: TowerParts) -> Gemma3Vision:
    """A `BuildTower`."""
    return Gemma3Vision(parts)


def _layer(source: TowerWeights, at: str, config: Gemma3VisionConfig) -> TowerLayer:
    hidden, attention = config.hidden, f"{at}self_attn."
    query, key, value, out = (
        Linear.read(source, f"{attention}{name}_proj", hidden, hidden) for name in ("q", "k", "v", "out")
    )
    return TowerLayer(
        LayerNorm.read(source, f"{at}layer_norm1", hidden, config.eps),
        LayerNorm.read(source, f"{at}layer_norm2", hidden, config.eps),
        query,
        key,
        value,
        out,
        Mlp(
            None,
            Linear.read(source, f"{at}mlp.fc1", config.inner, hidden),
            Linear.read(source, f"{at}mlp.fc2", hidden, config.inner),
            "gelu_pytorch_tanh",
        ),
        config.heads,
    )
