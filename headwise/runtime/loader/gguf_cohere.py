"""GGUF's ``cohere2``: Command R7B and Command A."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.runtime.loader.gguf_architecture import ATTENTION, DENSE, LAYER_NAMES, Architecture
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import integer, layer_types, shortest
from headwise.runtime.loader.gguf_rope import whole_rope
from headwise.runtime.models.model_config import ModelConfig

_PATTERN = 4


def _cohere2(source: GgufFile) -> dict[str, Any]:
    eps = shortest(source.require("cohere2.attention.layer_norm_epsilon"))
    return {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "hidden_act": "silu",
        "layer_norm_eps": eps,
        "rms_norm_eps": eps,  # of no norm, since all take the mean off
        "logit_scale": shortest(source.require("cohere2.logit_scale")),
        "sliding_window": integer(source, "cohere2.attention.sliding_window"),
        "layer_types": layer_types(source, "cohere2", _PATTERN),
        **whole_rope(source, "cohere2"),
    }


def _needed(config: ModelConfig, layer: int) -> tuple[str, ...]:
    return (*ATTENTION, *DENSE)


COHERE: Mapping[str, Architecture] = {"cohere2": Architecture(_cohere2, LAYER_NAMES, _needed)}
