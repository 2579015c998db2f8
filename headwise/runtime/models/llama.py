"""Llama 2 and 3, SmolLM2, and other models with the architecture ``LlamaForCausalLM``."""

from __future__ import annotations

from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.hf_config import HfConfig, decoder_config
from headwise.runtime.models.model_config import ModelConfig


def parse(config: HfConfig) -> ModelConfig:
    return decoder_config(config, "LlamaForCausalLM")


class Llama(Decoder):
    """The shared decoder, as it is."""
