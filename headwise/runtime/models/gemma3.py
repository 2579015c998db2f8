"""Gemma 3 (text): alternating sliding and full layers, normed queries and keys, norms around attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from headwise.errors import ModelError
from headwise.runtime.models.base import ModelConfig, RopeConfig
from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.hf_config import HfConfig, decoder_config, mapping, number, positive, rope
from headwise.runtime.models.values import shown
from headwise.runtime.ops.base import KernelArray, Tensor

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")

_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
"""Those of Hugging Face's ``Gemma3TextConfig``: the published multimodal models leave these fields out."""


def parse(config: HfConfig) -> ModelConfig:
    text = {**_DEFAULTS, **config, **mapping(config, "text_config")}
    kinds = text.get("layer_types")
    pattern = positive(text, "sliding_window_pattern", default=6)
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != text.get("num_hidden_layers")):
        raise ModelError(
            f"config.json: 'layer_types' must name {shown(text.get('num_hidden_layers'))} layers, got {shown(kinds)}"
        )

    def layer_type(layer: int) -> str:
        if kinds is not None:
            return str(kinds[layer])
        return "sliding_attention" if (layer + 1) % pattern else "full_attention"

    def layer_rope(kind: str) -> RopeConfig:
        if kind == "sliding_attention" and not text.get("rope_parameters"):
            return RopeConfig(number(text, "rope_local_base_freq", 10000.0))
        return rope(text, kind, default_theta=10000.0 if kind == "sliding_attention" else 1000000.0)

    return decoder_config(
        text,
        "Gemma3ForCausalLM",
        layer_types=layer_type,
        ropes=layer_rope,
        window=positive(text, "sliding_window", default=4096),
        tie_embeddings=bool(text.get("tie_word_embeddings", True)),
        activation="gelu_pytorch_tanh",
        attention_scale=number(text, "query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=number(text, "attn_logit_softcapping", optional=True),
        logit_softcap=number(text, "final_logit_softcapping", optional=True),
    )


class Gemma3(Decoder):
    norm_names: ClassVar[Mapping[str, str]] = {
        "before_attention": "input_layernorm",
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
        "query": "self_attn.q_norm",
        "key": "self_attn.k_norm",
    }
    activation = "gelu_tanh"
    norm_offset = 1.0

    def embed(self, token_ids: KernelArray) -> Tensor:
        return self.ops.embedding(self._embedding, token_ids, self.config.hidden_size**0.5)
