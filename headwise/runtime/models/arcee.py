"""Arcee's AFM: Llama whose MLPs have no gate, ``down(relu(up(x)) ** 2)``."""

from __future__ import annotations

from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.hf_config import HfConfig, decoder_config
from headwise.runtime.models.model_config import ModelConfig

ARCHITECTURE = "ArceeForCausalLM"

_DEFAULTS = {"rms_norm_eps": 1e-5}
"""Of Hugging Face's ``ArceeConfig``, which differ from others'."""


def parse(config: HfConfig) -> ModelConfig:
    return decoder_config({**_DEFAULTS, **config}, ARCHITECTURE, activation="relu2")


class Arcee(Decoder):
    """The shared decoder without gates."""

    activation = "relu2"
