"""Seed-OSS: Llama with biases of queries, keys and values."""

from __future__ import annotations

from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.hf_config import HfConfig, decoder_config, flag
from headwise.runtime.models.model_config import ModelConfig

ARCHITECTURE = "SeedOssForCausalLM"


def parse(config: HfConfig) -> ModelConfig:
    own = {"head_dim": 128, "attention_bias": True, **config}
    return decoder_config(own, ARCHITECTURE, out_bias=flag(own, "attention_out_bias"))


class SeedOss(Decoder):
    """The shared decoder, as it is."""
