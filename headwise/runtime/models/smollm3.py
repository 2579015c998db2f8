"""SmolLM3: Llama, in which every fourth layer rotates nothing."""

from __future__ import annotations

from dataclasses import replace

from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.hf_config import (
    HfConfig,
    decoder_config,
    flag,
    named_layer_types,
    positive,
    rope,
    rotated_layers,
)
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.position_config import RopeConfig

ARCHITECTURE = "SmolLM3ForCausalLM"

_THETA = 2e6
"""Default of Hugging Face's ``SmolLM3Config``."""


def parse(config: HfConfig) -> ModelConfig:
    has_windows = flag(config, "use_sliding_window") and config.get("sliding_window") is not None
    is_rotated = rotated_layers(config, positive(config, "num_hidden_layers"))

    def layer_rope(kind: str) -> RopeConfig:
        return rope(config, default_theta=_THETA)

    decoder = decoder_config(
        config,
        ARCHITECTURE,
        layer_types=named_layer_types(
            config, lambda layer: "sliding_attention" if has_windows and not is_rotated[layer] else "full_attention"
        ),
        ropes=layer_rope,
        window=positive(config, "sliding_window") if has_windows else 0,
        tie_embeddings=flag(config, "tie_word_embeddings", default=True),
    )
    ropes = zip(decoder.ropes, is_rotated, strict=True)
    return replace(
        decoder, ropes=tuple(each if turns else RopeConfig(each.theta, is_none=True) for each, turns in ropes)
    )


class SmolLM3(Decoder):
    """The shared decoder, as it is."""
