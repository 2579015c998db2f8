"""What configs say of the vision towers of Qwen2-VL to Qwen 3.5: each generation by fields and weights of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

from headwise.errors import ModelError
from headwise.runtime.models.hf_config import HfConfig, layer_list, mapping, number, positive
from headwise.runtime.models.towers.base import FRAMES
from headwise.runtime.models.towers.pixels import PixelForm, pixel_form
from headwise.runtime.models.towers.vision_fields import (
    CLIP_MEAN,
    CLIP_STD,
    check_processor,
    check_served,
    head_count,
    processor_bounds,
    text_size,
)
from headwise.runtime.models.towers.whole_squares import check_shape, whole_squares
from headwise.runtime.models.values import shown

_LEAST_PIXELS, _MOST_PIXELS = 56 * 56, 1280 * 28 * 28


class Seconds(Enum):
    """How a model is told when a part of a video is."""

    WRITTEN = "written"
    """As text in front of each, which has a grid of its own then."""
    COUNTED = "counted"
    """By positions in time, as many a second as the config says."""
    IGNORED = "ignored"
    """By one position in time each."""


@dataclass(frozen=True)
class Generation:
    """hidden, output: fields of the tower's size and of the text's
    size, inner, depth, patch: where the config does not say; ``inner`` 0: a multiple of the size (``mlp_ratio``)
    mlp:         names of its products: gate, up and down; an empty one: there is none
    merger:      names of its norm and of its products
    has_means:   whether norms have means and biases
    has_windows: whether most layers see windows only
    has_places:  whether patches have learned positions, and a bias
    levels:      the tower's layers of which layers of the text are given something (deepstack), where the config does
                 not say; None: there may be none
    seconds:     of a video's parts: `Seconds.WRITTEN`, as text in front of each, or else as positions in time
    """

    hidden: str
    output: str
    size: int
    inner: int
    depth: int
    patch: int
    activation: str
    mlp: tuple[str, str, str]
    merger: tuple[str, str, str]
    has_means: bool = True
    has_windows: bool = False
    has_places: bool = False
    levels: tuple[int, ...] | None = None
    seconds: Seconds = Seconds.WRITTEN


QWEN2_VL = Generation(
    hidden="embed_dim",
    output="hidden_size",
    size=1280,
    inner=0,
    depth=32,
    patch=14,
    activation="quick_gelu",
    mlp=("", "fc1", "fc2"),
    merger=("ln_q", "mlp.0", "mlp.2"),
    seconds=Seconds.IGNORED,
)
QWEN2_5_VL = Generation(
    hidden="hidden_size",
    output="out_hidden_size",
    size=3584,
    inner=3420,
    depth=32,
    patch=14,
    activation="silu",
    mlp=("gate_proj", "up_proj", "down_proj"),
    merger=("ln_q", "mlp.0", "mlp.2"),
    has_means=False,
    has_windows=True,
    seconds=Seconds.COUNTED,
)
QWEN3_VL = Generation(
    hidden="hidden_size",
    output="out_hidden_size",
    size=1152,
    inner=4304,
    depth=27,
    patch=16,
    activation="gelu_pytorch_tanh",
    mlp=("", "linear_fc1", "linear_fc2"),
    merger=("norm", "linear_fc1", "linear_fc2"),
    has_places=True,
    levels=(8, 16, 24),
)
QWEN3_5 = replace(QWEN3_VL, levels=None)


@dataclass(frozen=True)
class QwenVisionConfig:
    """patch: pixels of a patch's edge
    merge:       patches of the edge of a square that becomes one token
    window:      squares of a window's edge; 0: there are no windows
    whole:       layers in which every patch sees every other one
    grid:        rows, and columns, of learned positions; 0: there are none
    levels:      as of `Generation`
    least, most: pixels to which an image is scaled
    """

    hidden: int
    inner: int
    text_hidden: int
    heads: int
    layers: int
    patch: int
    merge: int
    window: int
    whole: frozenset[int]
    grid: int
    levels: tuple[int, ...]
    theta: float
    least: int
    most: int
    pixels: PixelForm

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def step(self) -> int:
        """Pixels of the edge of a square, which becomes one token."""
        return self.patch * self.merge

    @classmethod
    def of(cls, generation: Generation, config: HfConfig, processor: HfConfig, most_numbers: int) -> QwenVisionConfig:
        """most_numbers: of an image's embeddings. Raises `ModelError` naming the field that cannot be served."""
        vision = mapping(config, "vision_config")
        served = {"hidden_act": generation.activation, "temporal_patch_size": FRAMES}
        check_served(vision, {**served, "in_channels": 3, "in_chans": 3})
        hidden = positive(vision, generation.hidden, default=generation.size, most=1 << 16)
        layers = positive(vision, "depth", default=generation.depth, most=256)
        patch = positive(vision, "patch_size", default=generation.patch, most=256)
        merge = positive(vision, "spatial_merge_size", default=2, most=16)
        check_processor(processor, patch_size=patch, merge_size=merge, temporal_patch_size=FRAMES)
        text_hidden = text_size(config, generation.output)
        levels = _levels(generation, vision, layers)
        tokens = max(1, most_numbers // (text_hidden * (1 + len(levels))))
        least, most = processor_bounds(processor, _LEAST_PIXELS, _MOST_PIXELS)
        most = min(most, tokens * (patch * merge) ** 2)
        return cls(
            hidden,
            _inner(generation, vision, hidden),
            text_hidden,
            head_count(vision, generation.hidden, hidden, 16),
            layers,
            patch,
            merge,
            _window(vision, patch * merge) if generation.has_windows else 0,
            frozenset(_whole(vision, layers) if generation.has_windows else range(layers)),
            _grid(vision) if generation.has_places else 0,
            levels,
            number(mapping(vision, "rope_parameters"), "rope_theta", 10000.0),
            min(least, most),
            most,
            pixel_form(processor, CLIP_MEAN, CLIP_STD),
        )

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """The size to which an image is scaled. Raises `InvalidRequestError` as `check_shape`."""
        check_shape(width, height)
        return whole_squares(width, height, self.step, self.least, self.most)


def _inner(generation: Generation, vision: HfConfig, hidden: int) -> int:
    if generation.inner:
        return positive(vision, "intermediate_size", default=generation.inner, most=1 << 20)
    return hidden * positive(vision, "mlp_ratio", default=4, most=64)


def _levels(generation: Generation, vision: HfConfig, layers: int) -> tuple[int, ...]:
    key = "deepstack_visual_indexes"
    found = layer_list({key: list(generation.levels or ()), **vision}, key, layers) or []
    if found != sorted(set(found)):
        raise ModelError(f"config.json: {key!r} must name each layer once, in their order, got {shown(found)}")
    if found and generation.levels is None:
        raise ModelError(f"config.json: {key!r} must be empty of this architecture, got {shown(found)}")
    return tuple(found)


def _window(vision: HfConfig, step: int) -> int:
    pixels = positive(vision, "window_size", default=112, most=1 << 16)
    if pixels < step:
        raise ModelError(
            f"config.json: 'window_size' must be a square of patches at least, {step} pixels, got {pixels}"
        )
    return pixels // step


def _whole(vision: HfConfig, layers: int) -> list[int]:
    found = layer_list(vision, "fullatt_block_indexes", layers)
    return [7, 15, 23, 31] if found is None else found


def _grid(vision: HfConfig) -> int:
    count = positive(vision, "num_position_embeddings", default=2304, most=1 << 20)
    if math.isqrt(count) ** 2 != count:
        raise ModelError(f"config.json: 'num_position_embeddings' must be those of a square grid, got {count}")
    return math.isqrt(count)
