"""The decoders of GLM-4.1V to 4.6V: those of GLM-4, and with experts of GLM-4.5, which give a token three positions."""

from __future__ import annotations

from headwise.runtime.models.glm4 import parse_glm4, parse_moe
from headwise.runtime.models.hf_config import HfConfig, text_of
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.mrope import with_axes

_PAIRS = (8, 12, 12)
"""Turned by time, row and column, where a config does not say it: Hugging Face's default."""
_DENSE_DEFAULTS = {"rms_norm_eps": 1e-5, "head_dim": None, "partial_rotary_factor": 1.0}
_MOE_DEFAULTS = {"attention_bias": True}
"""Where Hugging Face's configs differ from those of the text alone."""


def parse_dense(config: HfConfig) -> ModelConfig:
    own = {**_DENSE_DEFAULTS, **text_of(config), "attention_bias": True}  # whatever the config says
    return with_axes(parse_glm4(own), _PAIRS, interleaved=False)


def parse_with_experts(config: HfConfig) -> ModelConfig:
    return with_axes(parse_moe({**_MOE_DEFAULTS, **text_of(config)}), _PAIRS, interleaved=False)
