"""Mistral: Llama, with a sliding window in every layer where the config gives one."""

from __future__ import annotations

from typing import Any

from headwise.runtime.models.base import ModelConfig
from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.hf_config import HfConfig, decoder_config, positive

ARCHITECTURES = ("MistralForCausalLM",)


def parse(config: HfConfig) -> ModelConfig:
    # Hugging Face's default is a window; only an explicit null means none.
    return decoder_config(config, "MistralForCausalLM", **window_everywhere({"sliding_window": 4096, **config}))


def window_everywhere(config: HfConfig) -> dict[str, Any]:
    """``layer_types`` and ``window`` for `decoder_config`: all layers slide if there is a ``sliding_window``."""
    window = 0 if config.get("sliding_window") is None else positive(config, "sliding_window")
    kind = "sliding_attention" if window else "full_attention"
    return {"layer_types": lambda layer: kind, "window": window}


class Mistral(Decoder):
    """The shared decoder, as it is."""
