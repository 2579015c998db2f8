"""The decoders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: those of Qwen 2 and 3, which give a token three positions.

Behind each of Qwen3-VL's first layers something is added to an image's tokens, too, that its tower makes.
"""

from __future__ import annotations

from dataclasses import replace

from headwise.errors import ModelError
from headwise.runtime.models.hf_config import HfConfig, mapping, text_of
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.mrope import with_axes
from headwise.runtime.models.qwen import Qwen3Moe
from headwise.runtime.models.qwen import parse_qwen2 as parse_plain_qwen2
from headwise.runtime.models.qwen import parse_qwen3 as parse_plain_qwen3
from headwise.runtime.models.qwen import parse_qwen3_moe as parse_plain_qwen3_moe
from headwise.runtime.models.values import shown
from headwise.runtime.models.weight_view import InputsFirstExperts
from headwise.runtime.models.weights import Weights

QWEN3_MOE = "Qwen3VLMoeForConditionalGeneration"

_PAIRS2, _PAIRS3 = (16, 24, 24), (24, 20, 20)
"""Turned by time, row and column, where a config does not say it: Hugging Face's defaults."""
_DEEPSTACK = "deepstack_visual_indexes"


def parse_qwen2(config: HfConfig) -> ModelConfig:
    return with_axes(parse_plain_qwen2(text_of(config)), _PAIRS2, interleaved=False)


def parse_qwen3(config: HfConfig) -> ModelConfig:
    return _with_levels(parse_plain_qwen3(text_of(config)), config)


def parse_qwen3_moe(config: HfConfig) -> ModelConfig:
    decoder = parse_plain_qwen3_moe({**text_of(config), "norm_topk_prob": True})
    return _with_levels(replace(decoder, architecture=QWEN3_MOE), config)


def _with_levels(decoder: ModelConfig, config: HfConfig) -> ModelConfig:
    placed = with_axes(decoder, _PAIRS3, interleaved=True)
    if config.get("vision_config") is None:
        return placed
    found = mapping(config, "vision_config").get(_DEEPSTACK, [8, 16, 24])
    if not isinstance(found, list) or len(found) >= decoder.num_layers:
        raise ModelError(
            f"config.json: {_DEEPSTACK!r} must be a list of fewer layers than the decoder's {decoder.num_layers}, got "
            f"{shown(found)}"
        )
    return replace(placed, embed_levels=len(found))


class Qwen3VlMoe(Qwen3Moe):
    """A layer's experts lie in two tensors, inputs before outputs."""

    def view(self, weights: Weights) -> Weights:
        return InputsFirstExperts(weights)
