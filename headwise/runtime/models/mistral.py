"""Mistral: Llama, with a sliding window in every layer where the config gives one. Ministral 3 tempers its queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headwise.errors import ModelError
from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.hf_config import HfConfig, decoder_config, mapping, positive, text_of
from headwise.runtime.models.mistral4 import parse as parse_mistral4
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.tempered import TemperedDecoder, temper_of_scaling
from headwise.runtime.models.values import shown

MINISTRAL3, MULTIMODAL = "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"

_MINISTRAL3_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "head_dim": 128,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
"""Those of Hugging Face's ``Ministral3Config``."""


def parse(config: HfConfig) -> ModelConfig:
    # Hugging Face's default is a window; only an explicit null means none.
    return decoder_config(config, "MistralForCausalLM", **window_everywhere({"sliding_window": 4096, **config}))


def parse_ministral3(config: HfConfig) -> ModelConfig:
    """With queries that count more the further they are beyond the length that YaRN has lengthened."""
    own = {**_MINISTRAL3_DEFAULTS, **config}
    decoder = decoder_config(own, MINISTRAL3, **window_everywhere(own))
    return replace(decoder, temper=temper_of_scaling(mapping(own, "rope_parameters"), decoder.num_layers))


def parse_multimodal(config: HfConfig) -> ModelConfig:
    """Mistral Small 3.1 and later, and Ministral 3: the text's decoder is a Mistral, a Ministral 3, or a Mistral 4."""
    kind = mapping(config, "text_config").get("model_type", "mistral")
    parsers = {"mistral": parse, "ministral3": parse_ministral3, "mistral4": parse_mistral4}
    if kind not in parsers:
        raise ModelError(
            f"config.json: {MULTIMODAL} is served around one of {', '.join(map(repr, parsers))}, got 'model_type' "
            f"{shown(kind)} of its 'text_config'"
        )
    return parsers[kind]({"sliding_window": None, **text_of(config)})


def window_everywhere(config: HfConfig) -> dict[str, Any]:
    """``layer_types`` and ``window`` for `decoder_config`: all layers slide if there is a ``sliding_window``."""
    window = 0 if config.get("sliding_window") is None else positive(config, "sliding_window")
    kind = "sliding_attention" if window else "full_attention"
    return {"layer_types": lambda layer: kind, "window": window}


class Mistral(Decoder):
    """The shared decoder, as it is."""


class Ministral3(TemperedDecoder):
    """The same, tempered."""
