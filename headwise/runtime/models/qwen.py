"""Qwen 2 and 2.5: Llama with biases of queries, keys and values. Qwen 3: with their norms; some have experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from headwise.kernels.experts import NORM_MIN
from headwise.runtime.models.base import ModelConfig, MoeConfig
from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.hf_config import (
    MOST_EXPERTS,
    HfConfig,
    decoder_config,
    flag,
    integer,
    layer_list,
    named_layer_types,
    positive,
)
from headwise.runtime.models.mistral import window_everywhere
from headwise.runtime.models.moe_decoder import MoeDecoder, check_routing

QWEN2, QWEN3, QWEN3_MOE = "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"


def parse_qwen2(config: HfConfig) -> ModelConfig:
    return decoder_config(config, QWEN2, **_windows(config), attention_bias=True, out_bias=False)


def parse_qwen3(config: HfConfig) -> ModelConfig:
    return decoder_config({"head_dim": 128, **config}, QWEN3, **_windows(config))


def parse_qwen3_moe(config: HfConfig) -> ModelConfig:
    window = config.get("sliding_window", 4096) if flag(config, "use_sliding_window") else None
    decoder = decoder_config(config, QWEN3_MOE, **window_everywhere({**config, "sliding_window": window}))
    return replace(decoder, moe=moe_config(config, decoder.num_layers))


def _windows(config: HfConfig) -> dict[str, Any]:
    """``layer_types`` and ``window`` for `decoder_config`: layers from ``max_window_layers`` on slide, if any do."""
    window = positive(config, "sliding_window", default=4096) if flag(config, "use_sliding_window") else 0
    first = integer(config, "max_window_layers", default=28)

    def default(layer: int) -> str:
        return "sliding_attention" if window and layer >= first else "full_attention"

    return {"layer_types": named_layer_types(config, default), "window": window}


def moe_config(config: HfConfig, num_layers: int) -> MoeConfig:
    """Layers have experts whose number, from 1 on, ``decoder_sparse_step`` divides, but for ``mlp_only_layers``."""
    step, dense = positive(config, "decoder_sparse_step", default=1), layer_list(config, "mlp_only_layers", num_layers)
    experts = positive(config, "num_experts", default=128, most=MOST_EXPERTS)
    per_token = positive(config, "num_experts_per_tok", default=8)
    check_routing(config, {"num_experts_per_tok": per_token}, {"num_experts": experts})
    return MoeConfig(
        layers=tuple(layer for layer in range(num_layers) if layer not in (dense or ()) and (layer + 1) % step == 0),
        num_experts=experts,
        experts_per_token=per_token,
        expert_size=positive(config, "moe_intermediate_size", default=768),
        num_shared_experts=0,
        norm_min=NORM_MIN if flag(config, "norm_topk_prob") else None,
    )


class Qwen2(Decoder):
    """The shared decoder, as it is."""


class Qwen3(Decoder):
    norm_names: ClassVar[Mapping[str, str]] = {
        **Decoder.norm_names,
        "query": "self_attn.q_norm",
        "key": "self_attn.k_norm",
    }


class Qwen3Moe(MoeDecoder, Qwen3):
    """Routed experts for the MLP in most layers."""
