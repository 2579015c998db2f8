"""The text of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, whose decoders are those of Qwen 2 and 3.

They give a token three positions, which are the same in text.
"""

from __future__ import annotations

from dataclasses import replace

from headwise.runtime.models.hf_config import HfConfig, text_of
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.qwen import Qwen3Moe
from headwise.runtime.models.qwen import parse_qwen2 as parse_plain_qwen2
from headwise.runtime.models.qwen import parse_qwen3 as parse_plain_qwen3
from headwise.runtime.models.qwen import parse_qwen3_moe as parse_plain_qwen3_moe
from headwise.runtime.models.weight_view import InputsFirstExperts
from headwise.runtime.models.weights import Weights

QWEN2 = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
QWEN3, QWEN3_MOE = "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"


def parse_qwen2(config: HfConfig) -> ModelConfig:
    return parse_plain_qwen2(text_of(config))


def parse_qwen3(config: HfConfig) -> ModelConfig:
    return parse_plain_qwen3(text_of(config))


def parse_qwen3_moe(config: HfConfig) -> ModelConfig:
    decoder = parse_plain_qwen3_moe({**text_of(config), "norm_topk_prob": True})
    return replace(decoder, architecture=QWEN3_MOE)


class Qwen3VlMoe(Qwen3Moe):
    """A layer's experts lie in two tensors, inputs before outputs."""

    def view(self, weights: Weights) -> Weights:
        return InputsFirstExperts(weights)
