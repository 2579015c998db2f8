"""Qwen 2 and 2.5: Llama with biases of queries, keys and values. Qwen 3: with their norms. Some have experts.

dots.llm1 and Hunyuan 3 are a Qwen 3 with DeepSeek's experts, and MiMo is a Qwen 2 with a layer that drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from headwise.kernels.experts import NORM_MIN
from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.deepseek_routing import RoutedFields, ungrouped_moe
from headwise.runtime.models.drafting import BEHIND_THE_LAST, DraftingNames
from headwise.runtime.models.grouped_moe import GroupedMoeDecoder
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
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.moe_config import MoeConfig
from headwise.runtime.models.moe_decoder import MoeDecoder, check_routing

QWEN2, QWEN3, QWEN3_MOE = "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
QWEN2_MOE, DOTS1, HUNYUAN3 = "Qwen2MoeForCausalLM", "Dots1ForCausalLM", "HYV3ForCausalLM"
MIMO = "MiMoForCausalLM"

_QWEN2_MOE_DEFAULTS = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
_HUNYUAN3_DEFAULTS = {
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "router_scaling_factor": 2.826,
}
"""Those of Hugging Face's configs."""
_HUNYUAN3_FIELDS = RoutedFields("num_experts", shared="num_shared_experts", scale="router_scaling_factor")


def parse_qwen2(config: HfConfig) -> ModelConfig:
    return decoder_config(config, QWEN2, **_windows(config), attention_bias=True, out_bias=False)


def parse_mimo(config: HfConfig) -> ModelConfig:
    return replace(parse_qwen2(config), architecture=MIMO)


def parse_qwen3(config: HfConfig) -> ModelConfig:
    return decoder_config({"head_dim": 128, **config}, QWEN3, **_windows(config))


def parse_qwen3_moe(config: HfConfig) -> ModelConfig:
    window = config.get("sliding_window", 4096) if flag(config, "use_sliding_window") else None
    decoder = decoder_config(config, QWEN3_MOE, **window_everywhere({**config, "sliding_window": window}))
    return replace(decoder, moe=moe_config(config, decoder.num_layers))


def parse_qwen2_moe(config: HfConfig) -> ModelConfig:
    window = positive(config, "sliding_window", default=4096) if flag(config, "use_sliding_window") else 0
    most = integer(config, "max_window_layers", default=28)

    def default(layer: int) -> str:
        return "sliding_attention" if window and layer < most and layer % 2 == 0 else "full_attention"

    decoder = decoder_config(
        config,
        QWEN2_MOE,
        layer_types=named_layer_types(config, default),
        window=window,
        attention_bias=flag(config, "qkv_bias", default=True),
        out_bias=False,
    )
    moe = moe_config({**_QWEN2_MOE_DEFAULTS, **config}, decoder.num_layers)
    shared = positive(config, "shared_expert_intermediate_size", default=5632)
    return replace(decoder, moe=replace(moe, gated_shared_size=shared))


def parse_dots1(config: HfConfig) -> ModelConfig:
    window = 0 if config.get("sliding_window", 4096) is None else positive(config, "sliding_window", default=4096)
    first = integer(config, "max_window_layers", default=62)

    def default(layer: int) -> str:
        return "sliding_attention" if window and layer >= first else "full_attention"

    decoder = decoder_config(config, DOTS1, layer_types=named_layer_types(config, default), window=window)
    if config.get("n_routed_experts") is None:
        return decoder
    # Published with a way to choose experts in the place of what scores them, which is a sigmoid always.
    scores = {"scoring_func": "sigmoid"} if config.get("scoring_func") == "noaux_tc" else {}
    return replace(decoder, moe=ungrouped_moe({"norm_topk_prob": False, **config, **scores}, decoder.num_layers))


def parse_hunyuan3(config: HfConfig) -> ModelConfig:
    """Experts are in all layers but the first, if nothing else is said."""
    decoder = decoder_config({"head_dim": 128, "rms_norm_eps": 1e-5, **config}, HUNYUAN3)
    own = {**_HUNYUAN3_DEFAULTS, **config, "norm_topk_prob": True}
    return replace(decoder, moe=ungrouped_moe(own, decoder.num_layers, _HUNYUAN3_FIELDS))


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


class MiMo(Qwen2):
    """With a layer that drafts, by names of its own."""

    drafting_names: ClassVar[DraftingNames | None] = DraftingNames(
        is_nested=True,
        layer="mtp_layers.0.",
        embedding_norm="mtp_layers.0.token_layernorm",
        hidden_norm="mtp_layers.0.hidden_layernorm",
        join="mtp_layers.0.input_proj",
        final_norm="mtp_layers.0.final_layernorm",
        has_hidden_first=True,
    )


class Qwen3(Decoder):
    norm_names: ClassVar[Mapping[str, str]] = {
        **Decoder.norm_names,
        "query": "self_attn.q_norm",
        "key": "self_attn.k_norm",
    }


class Qwen3Moe(MoeDecoder, Qwen3):
    """Routed experts for the MLP in most layers."""


class Qwen2Moe(MoeDecoder):
    """Routed experts for the MLP, and one that all tokens go through as far as a gate lets them."""


class Dots1(GroupedMoeDecoder, Qwen3):
    """Routed and shared experts for the MLP in most layers."""


class Hunyuan3(GroupedMoeDecoder, Qwen3):
    """The same by other names."""

    router_name: ClassVar[str] = "router.gate"
    shared_name: ClassVar[str] = "shared_mlp"
    correction_name: ClassVar[str] = "expert_bias"
    drafting_names: ClassVar[DraftingNames | None] = replace(
        BEHIND_THE_LAST, final_norm="layers.{layer}.final_layernorm"
    )
