"""Gemma 2: alternating sliding and full layers, softcaps of attention's scores and of logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.hf_config import HfConfig, decoder_config, flag, named_layer_types, number, positive
from headwise.runtime.models.model_config import ModelConfig

ARCHITECTURE = "Gemma2ForCausalLM"

_DEFAULTS = {"head_dim": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""Those of Hugging Face's ``Gemma2Config``."""


def parse(config: HfConfig) -> ModelConfig:
    own = {**_DEFAULTS, **config}

    def default(layer: int) -> str:
        return "full_attention" if layer % 2 else "sliding_attention"

    return decoder_config(
        own,
        ARCHITECTURE,
        layer_types=named_layer_types(own, default),
        window=positive(own, "sliding_window", default=4096),
        **gemma_fields(own),
    )


def gemma_fields(config: HfConfig) -> dict[str, Any]:
    """Arguments of `decoder_config` that Gemma 2 and 3 have in common."""
    return {
        "tie_embeddings": flag(config, "tie_word_embeddings", default=True),
        "activation": "gelu_pytorch_tanh",
        "attention_scale": number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_softcap": number(config, "attn_logit_softcapping", optional=True),
        "logit_softcap": number(config, "final_logit_softcapping", optional=True),
    }


class Gemma2(Decoder):
    norm_names: ClassVar[Mapping[str, str]] = {
        "before_attention": "input_layernorm",
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    }
    activation = "gelu_tanh"
    norm_offset = 1.0

    @property
    def embedding_scale(self) -> float:
        return float(self.config.hidden_size**0.5)
