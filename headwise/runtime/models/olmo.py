"""OLMo 2: norms of what attention and MLP add, none before them. OLMo 3: with windows in three of four layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from headwise.runtime.models.hf_config import (
    HfConfig,
    decoder_config,
    number,
    positive,
    rope,
)
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.models.whole_norms import WholeNormDecoder
from headwise.runtime.models.windows import full_every

OLMO2, OLMO3 = "Olmo2ForCausalLM", "Olmo3ForCausalLM"

NORMS_BEHIND: Mapping[str, str] = {
    "after_attention": "post_attention_layernorm",
    "after_mlp": "post_feedforward_layernorm",
    "query": "self_attn.q_norm",
    "key": "self_attn.k_norm",
}
"""`Decoder.norm_names` of models that norm what is added to the residual stream, and not what comes from it."""

_THETA = 500000.0
"""Default of Hugging Face's ``Olmo3Config``."""


def parse_olmo2(config: HfConfig) -> ModelConfig:
    return decoder_config({"rms_norm_eps": 1e-5, **config}, OLMO2)


def parse_olmo3(config: HfConfig) -> ModelConfig:
    """A ``rope_scaling`` is of full layers alone."""
    own = {"rms_norm_eps": 1e-5, **config}

    def layer_rope(kind: str) -> RopeConfig:
        if kind == "sliding_attention" and not own.get("rope_parameters"):
            return RopeConfig(number(own, "rope_theta", _THETA))
        return rope(own, kind, default_theta=_THETA)

    return decoder_config(
        own,
        OLMO3,
        layer_types=full_every(own, 4),
        ropes=layer_rope,
        window=positive(own, "sliding_window", default=4096),
    )


class Olmo(WholeNormDecoder):
    norm_names: ClassVar[Mapping[str, str]] = NORMS_BEHIND
