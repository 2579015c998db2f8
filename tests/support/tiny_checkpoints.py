"""Tiny random models of many architectures, as Hugging Face directories.

What transformers makes of them is in `tests/references/tiny-NAME.json`, with each model's config and the shapes of its
weights. The weights themselves are drawn anew from a fixed seed, here and where the references were made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from support.tiny_models import byte_level_tokenizer, write_tokenizer_directory

from headwise.runtime.loader.safetensors_file import TensorForm, write_safetensors

_REFERENCES = Path(__file__).parent.parent / "references"
_BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 263,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


_ABSENT = "absent"


def _config(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    merged = {**_BASE, "architectures": [architecture], "model_type": model_type, **fields}
    return {key: value for key, value in merged.items() if value != _ABSENT}


_LONG = [1 + pair / 4 for pair in range(24)]

_GPT_OSS = _config(
    "GptOssForCausalLM",
    "gpt_oss",
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=24,
    rope_scaling={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 128,
    },
)

_DEEPSEEK: dict[str, Any] = {
    "head_dim": _ABSENT,
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "rms_norm_eps": 1e-6,
}

_CORRECTED: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
}

_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,  # the last of which has attention
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
}


_STATE_SPACE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "mamba_n_heads": 32,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 24,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
"""Eight members of four heads."""

_NEMOTRON: dict[str, Any] = {
    "hidden_act": _ABSENT,
    "rms_norm_eps": _ABSENT,
    "num_hidden_layers": _ABSENT,
    "rope_theta": _ABSENT,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 16,
    "mamba_head_dim": 16,
    "n_groups": 4,
    "ssm_state_size": 24,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "time_step_min": 1e-9,  # by which transformers alone bounds steps
}
"""Four members of four heads, each a group."""

_FACTORS: dict[str, Any] = {
    "head_dim": _ABSENT,
    "hidden_size": 256,
    "embedding_multiplier": 2.5,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.8,
}


def _yarn(mscale: float, mscale_all_dim: float) -> dict[str, Any]:
    lengths = {"factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 32, "beta_slow": 1}
    return {"type": "yarn", **lengths, "mscale": mscale, "mscale_all_dim": mscale_all_dim}


_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA4: dict[str, Any] = {
    "head_dim": 32,
    "global_head_dim": 64,
    "rope_theta": _ABSENT,
    "sliding_window": 24,
    "hidden_size_per_layer_input": 0,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "num_hidden_layers": 5,
    "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL],
    "final_logit_softcapping": 20.0,
}

TINY_CONFIGS: Mapping[str, dict[str, Any]] = {
    "qwen2": _config(
        "Qwen2ForCausalLM",
        "qwen2",
        hidden_size=256,
        head_dim=_ABSENT,  # it follows from the hidden size
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=1,
    ),
    "mimo": _config("MiMoForCausalLM", "mimo", attention_bias=True, hidden_size=256, head_dim=_ABSENT),
    "qwen3": _config("Qwen3ForCausalLM", "qwen3"),
    "qwen3-moe": _config(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
    "mixtral": _config(
        "MixtralForCausalLM",
        "mixtral",
        num_local_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        sliding_window=None,
    ),
    "qwen2-moe": _config(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[1],
    ),
    "dots1": _config("Dots1ForCausalLM", "dots1", **_CORRECTED, attention_bias=True, norm_topk_prob=True, n_group=2),
    "smollm3": _config("SmolLM3ForCausalLM", "smollm3", head_dim=_ABSENT, hidden_size=256, no_rope_layer_interval=3),
    "arcee": _config(
        "ArceeForCausalLM",
        "arcee",
        mlp_bias=True,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
        },
    ),
    "seed-oss": _config("SeedOssForCausalLM", "seed_oss", attention_bias=True, attention_out_bias=True),
    "ministral3": _config(
        "Ministral3ForCausalLM",
        "ministral3",
        rope_theta=_ABSENT,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    ),
    "mistral4": _config(
        "Mistral4ForCausalLM",
        "mistral4",
        **{**_DEEPSEEK, "n_shared_experts": 1},
        q_lora_rank=32,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        rope_theta=_ABSENT,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    ),
    "glm4": _config("Glm4ForCausalLM", "glm4", attention_bias=True, partial_rotary_factor=0.5),
    "glm4-moe": _config(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        **_CORRECTED,
        attention_bias=True,
        use_qk_norm=True,
        partial_rotary_factor=0.5,
        num_nextn_predict_layers=0,
    ),
    "phi3": _config("Phi3ForCausalLM", "phi3", hidden_size=256, head_dim=_ABSENT, sliding_window=24),
    "phi3-long": _config(
        "Phi3ForCausalLM",
        "phi3",
        hidden_size=256,
        head_dim=_ABSENT,
        num_hidden_layers=2,
        original_max_position_embeddings=128,
        partial_rotary_factor=0.75,
        rope_scaling={"type": "longrope", "short_factor": _LONG, "long_factor": _LONG},
    ),
    "gemma2": _config(
        "Gemma2ForCausalLM",
        "gemma2",
        num_hidden_layers=4,
        sliding_window=24,
        query_pre_attn_scalar=48,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=20.0,
    ),
    "gemma4": _config("Gemma4ForCausalLM", "gemma4_text", **_GEMMA4),
    "gemma4-shared": _config(
        "Gemma4ForCausalLM",
        "gemma4_text",
        **{
            **_GEMMA4,
            "num_key_value_heads": 2,
            "attention_k_eq_v": False,
            "num_hidden_layers": 7,
            "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _FULL],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 263,
        },
    ),
    "gemma4-moe": _config(
        "Gemma4ForCausalLM",
        "gemma4_text",
        **{
            **_GEMMA4,
            "num_hidden_layers": 3,
            "layer_types": [_SLIDING, _SLIDING, _FULL],
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "deepseek-v2": _config(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        **_DEEPSEEK,
        q_lora_rank=None,
        topk_method="greedy",
        scoring_func="softmax",
        routed_scaling_factor=1.0,
        norm_topk_prob=False,
        rope_scaling=_yarn(0.707, 0.707),
    ),
    "deepseek-v3": _config(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        **_DEEPSEEK,
        q_lora_rank=32,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        rope_scaling=_yarn(1.0, 0.6),
    ),
    "deepseek-v3-bias": _config(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        **_DEEPSEEK,
        q_lora_rank=32,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
        attention_bias=True,
        rope_interleave=False,
    ),
    "deepseek-v3.2": _config(
        "DeepseekV32ForCausalLM",
        "deepseek_v32",
        **_DEEPSEEK,
        q_lora_rank=32,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        rope_scaling=_yarn(1.0, 1.0),
        index_n_heads=16,  # with few of them many scores are exactly 0, and torch takes any of equal ones
        index_head_dim=32,
        index_topk=24,
    ),
    "deepseek-v4": _config(
        "DeepseekV4ForCausalLM",
        "deepseek_v4",
        head_dim=32,
        num_key_value_heads=1,
        num_hidden_layers=5,
        intermediate_size=_ABSENT,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=24,
        layer_types=[_SLIDING, *[f"{how}_attention" for how in ("compressed_sparse", "heavily_compressed")] * 2],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        sliding_window=24,
        partial_rotary_factor=0.5,
        compress_rope_theta=40000.0,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        index_n_heads=16,
        index_head_dim=32,
        index_topk=24,
        mlp_layer_types=["hash_moe", *["moe"] * 4],
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        routed_scaling_factor=1.5,
        hc_mult=4,
        rms_norm_eps=1e-6,
    ),
    "glm4-moe-lite": _config(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        **{key: value for key, value in _DEEPSEEK.items() if key != "first_k_dense_replace"},
        q_lora_rank=32,
        routed_scaling_factor=1.8,
    ),
    "glm5": _config(
        "GlmMoeDsaForCausalLM",
        "glm_moe_dsa",
        **_DEEPSEEK,
        q_lora_rank=32,
        routed_scaling_factor=2.5,
        index_n_heads=16,
        index_head_dim=32,
        index_topk=24,
    ),
    "glm5-shared": _config(
        "GlmMoeDsaForCausalLM",
        "glm_moe_dsa",
        **_DEEPSEEK,
        num_hidden_layers=4,
        q_lora_rank=32,
        routed_scaling_factor=2.5,
        index_n_heads=16,
        index_head_dim=32,
        index_topk=24,
        indexer_types=["full", "shared", "full", "shared"],
    ),
    "minimax-m2": _config(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        rotary_dim=32,
        intermediate_size=32,
        num_local_experts=8,
        num_experts_per_tok=3,
    ),
    "mimo-v2": _config(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        num_hidden_layers=4,
        head_dim=96,
        v_head_dim=64,
        num_key_value_heads=1,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        rope_theta=_ABSENT,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.334},
        },
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        sliding_window=24,
        rms_norm_eps=1e-5,
    ),
    "granite-swa": _config(
        "GraniteSWAForCausalLM",
        "granite_swa",
        num_hidden_layers=4,
        sliding_window=24,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        layer_rope_theta=[0, 10000, 20000, 10000],
        rms_norm_eps=1e-5,
        **_FACTORS,
    ),
    "granite-moe-swa": _config(
        "GraniteMoeSWAForCausalLM",
        "granitemoe_swa",
        num_hidden_layers=4,
        intermediate_size=32,
        shared_intermediate_size=64,
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=24,
        rms_norm_eps=1e-5,
        **_FACTORS,
    ),
    "laguna": _config(
        "LagunaForCausalLM",
        "laguna",
        num_hidden_layers=4,
        layer_types=[_FULL, _SLIDING, _SLIDING, _SLIDING],
        num_attention_heads_per_layer=[4, 6, 6, 6],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        sliding_window=24,
        gating="per-head",
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        moe_routed_scaling_factor=2.5,
        rope_theta=_ABSENT,
        rope_parameters={
            _FULL: {
                "rope_type": "yarn",
                "rope_theta": 50000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 64.0,
                "beta_slow": 1.0,
                "attention_factor": 1.3465735902799727,
                "partial_rotary_factor": 0.5,
            },
            _SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
    ),
    "laguna-elements": _config(
        "LagunaForCausalLM",
        "laguna",
        layer_types=[_FULL, _SLIDING, _SLIDING],
        sliding_window=24,
        gating="per-element",
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        rope_theta=_ABSENT,
    ),
    "step3": _config(
        "Step3p7ForConditionalGeneration",
        "step3p7",
        rope_theta=_ABSENT,
        text_config={
            **{
                key: value
                for key, value in _BASE.items()
                if key not in ("num_key_value_heads", "rope_theta", "pad_token_id")
            },
            "model_type": "step3p5",
            "num_hidden_layers": 4,
            "num_attention_groups": 2,
            "layer_types": [_FULL, _SLIDING, _SLIDING, _FULL, _SLIDING],
            "num_nextn_predict_layers": 1,
            "attention_other_setting": {"attention_type": _SLIDING, "num_attention_heads": 6},
            "sliding_window": 24,
            "rope_theta": [50000.0, 10000.0, 10000.0, 50000.0, 10000.0],
            "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 2.0,
                "original_max_position_embeddings": 128,
                "low_freq_factor": 1.0,
                "high_freq_factor": 32.0,
            },
            "yarn_only_types": [_FULL],
            "moe_layers_enum": "1,2,3,4",
            "moe_num_experts": 8,
            "moe_top_k": 3,
            "moe_intermediate_size": 32,
            "share_expert_dim": 48,
            "moe_router_scaling_factor": 2.5,
            "swiglu_limits": [0.0, 0.0, 7, 7, 0.0],
            "swiglu_limits_shared": [2.0, 0.0, 0.0, 2.0, 0.0],
            "rms_norm_eps": 1e-5,
        },
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
            "mlp_ratio": 2.0,
            "max_position_embeddings": 16,
        },
    ),
    "mellum": _config(
        "MellumForCausalLM",
        "mellum",
        num_hidden_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        mlp_layer_types=["dense"] + ["sparse"] * 3,
        rope_theta=_ABSENT,
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 512,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        sliding_window=24,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        rms_norm_eps=1e-6,
    ),
    "olmo2": _config("Olmo2ForCausalLM", "olmo2"),
    "olmo3": _config(
        "Olmo3ForCausalLM",
        "olmo3",
        num_hidden_layers=4,
        sliding_window=24,
        rope_theta=500000.0,  # transformers loses any other one for windows
        rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    ),
    "exaone4": _config("Exaone4ForCausalLM", "exaone4", num_hidden_layers=4, sliding_window=24),
    "exaone-moe": _config(
        "ExaoneMoeForCausalLM",
        "exaone_moe",
        **{key: value for key, value in _CORRECTED.items() if key not in ("n_routed_experts", "n_shared_experts")},
        num_experts=8,
        num_shared_experts=2,
        num_hidden_layers=4,
        sliding_window=24,
    ),
    "afmoe": _config(
        "AfmoeForCausalLM",
        "afmoe",
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=2,
        moe_intermediate_size=32,
        route_scale=2.5,
        num_hidden_layers=4,
        sliding_window=24,
        mup_enabled=True,
        rms_norm_eps=1e-6,
    ),
    "hunyuan3": _config(
        "HYV3ForCausalLM",
        "hy_v3",
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=1,
        moe_intermediate_size=32,
        rms_norm_eps=1e-6,
    ),
    "hunyuan-v1": _config(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        rope_scaling={"type": "dynamic", "alpha": 50.0, "factor": 1.0},
        rms_norm_eps=1e-5,
    ),
    "hunyuan-v1-moe": _config(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        intermediate_size=32,
        num_experts=8,
        moe_topk=[3, 3, 3],
        rms_norm_eps=1e-5,
    ),
    "hunyuan4": _config(
        "HYV4ForCausalLM",
        "hy_v4",
        **{key: value for key, value in _DEEPSEEK.items() if key not in ("rms_norm_eps", "first_k_dense_replace")},
        rms_norm_eps=1e-5,
        num_hidden_layers=4,
        q_lora_rank=32,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        routed_scaling_factor=2.5,
        index_n_heads=16,
        index_head_dim=32,
        index_topk=24,
        indexer_types=["full", "shared", "full", "shared"],
        hc_mult=4,
    ),
    "solar-open": _config(
        "SolarOpenForCausalLM",
        "solar_open",
        **{key: value for key, value in _CORRECTED.items() if key != "first_k_dense_replace"},
        intermediate_size=_ABSENT,
    ),
    "cohere2": _config(
        "Cohere2ForCausalLM",
        "cohere2",
        hidden_size=256,
        head_dim=_ABSENT,
        num_hidden_layers=4,
        sliding_window=24,
        logit_scale=0.3,
        tie_word_embeddings=True,
    ),
    "cohere2-moe": _config(
        "Cohere2MoeForCausalLM",
        "cohere2_moe",
        hidden_size=256,
        intermediate_size=32,
        num_hidden_layers=4,
        sliding_window=24,
        logit_scale=0.3,
        tie_word_embeddings=True,
        mlp_layer_types=["dense"] + ["sparse"] * 3,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        prefix_dense_intermediate_size=96,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=2,
        expert_selection_fn="sigmoid",
    ),
    "cohere2-moe-rms": _config(
        "Cohere2MoeForCausalLM",
        "cohere2_moe",
        hidden_size=256,
        intermediate_size=32,
        num_hidden_layers=4,
        sliding_window=24,
        sliding_window_pattern=2,
        logit_scale=0.3,
        rms_norm_eps=1e-5,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=1,
        shared_expert_combination_strategy="sum",
    ),
    "granite": _config("GraniteForCausalLM", "granite", **_FACTORS),
    "granite-moe": _config(
        "GraniteMoeForCausalLM", "granitemoe", **_FACTORS, num_local_experts=8, num_experts_per_tok=3
    ),
    "granite-hybrid": _config(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        **_FACTORS,
        layer_types=["attention"] * 3,
        num_local_experts=0,
        num_experts_per_tok=0,
        intermediate_size=32,  # of experts, of which there are none
        shared_intermediate_size=96,
        position_embedding_type="rope",
        mamba_d_state=16,
        mamba_n_heads=8,
    ),
    "granite-hybrid-ssm": _config(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        **_FACTORS,
        **_STATE_SPACE,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=96,
        position_embedding_type="nope",
    ),
    "granite-hybrid-moe": _config(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        **_FACTORS,
        **_STATE_SPACE,
        num_local_experts=8,
        num_experts_per_tok=3,
        intermediate_size=32,
        shared_intermediate_size=64,
        position_embedding_type="nope",
    ),
    "bamba": _config(
        "BambaForCausalLM",
        "bamba",
        **{key: value for key, value in _STATE_SPACE.items() if key != "layer_types"},
        hidden_size=256,
        head_dim=_ABSENT,
        attn_layer_indices=[1, 3],
    ),
    "nemotron-h": _config(
        "NemotronHForCausalLM",
        "nemotron_h",
        **_NEMOTRON,
        hybrid_override_pattern="M-MM-*-M*-",
        intermediate_size=160,
    ),
    "nemotron-h-moe": _config(
        "NemotronHForCausalLM",
        "nemotron_h",
        **_NEMOTRON,
        hybrid_override_pattern="MEM*EM*EM",
        intermediate_size=160,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=80,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        n_group=1,
        topk_group=1,
    ),
    "nemotron-h-latent": _config(
        "NemotronHForCausalLM",
        "nemotron_h",
        **_NEMOTRON,
        hybrid_override_pattern="ME*EM",
        intermediate_size=160,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        moe_latent_size=32,
        moe_shared_expert_intermediate_size=80,
        routed_scaling_factor=2.5,
    ),
    "qwen3-next": _config(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        **_DELTA_NET,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[1],
    ),
    "qwen3.5": _config("Qwen3_5ForCausalLM", "qwen3_5_text", **_DELTA_NET),
    "qwen3.5-moe": _config(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        **_DELTA_NET,
        intermediate_size=_ABSENT,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
    ),
    "kimi-linear": _config(
        "KimiLinearForCausalLM",
        "kimi_linear",
        num_hidden_layers=5,
        num_key_value_heads=4,
        head_dim=_ABSENT,
        rope_theta=_ABSENT,
        max_position_embeddings=_ABSENT,
        model_max_length=4096,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=32,
        mla_use_nope=True,
        linear_attn_config={
            "full_attn_layers": [3, 5],
            "kda_layers": [1, 2, 4],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        first_k_dense_replace=1,
        num_experts=8,
        num_experts_per_token=3,
        num_shared_experts=1,
        moe_intermediate_size=32,
        moe_renormalize=True,
        moe_router_activation_func="sigmoid",
        num_expert_group=1,
        topk_group=1,
        routed_scaling_factor=2.446,
        rms_norm_eps=1e-5,
    ),
    "llama4": _config(
        "Llama4ForCausalLM",
        "llama4_text",
        num_hidden_layers=4,  # the last of which sees all
        intermediate_size=48,
        intermediate_size_mlp=96,
        num_local_experts=4,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
        attention_chunk_size=64,
        floor_scale=32,
        attn_scale=0.3,
        rms_norm_eps=1e-5,
    ),
    "gpt-oss": _GPT_OSS,
    "gpt-oss-mxfp4": {**_GPT_OSS, "quantization_config": {"quant_method": "mxfp4"}},
}
"""Each model's ``config.json``."""


_NORMS_FROM_ONE = ("step3p7", "gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Model types whose norms are stored as distances from 1."""
_SMALL_BIASES = ("glm4", "glm4_moe", "glm4v_text", "glm4v_moe_text", "dots1", "seed_oss", "arcee")
"""Model types whose biases leave what is projected its say."""


_LIMITED = {"hy_v4": ("experts.gate_up_proj",), "step3p7": ("moe.gate_proj.weight", "moe.up_proj.weight")}
"""Weights whose products go into activations with limits, by `model_type`."""


def draw_weights(config: Mapping[str, Any], shapes: Mapping[str, list[int]], seed: int = 0) -> dict[str, np.ndarray]:
    """Weights of these names and shapes, whose activations neither vanish nor grow, and whose logits lie apart."""
    draw, found = np.random.default_rng(seed), {}
    from_one = config["model_type"] in _NORMS_FROM_ONE
    for name, shape in sorted(shapes.items()):
        if name.endswith(("_blocks", "_scales")):
            low, high = (0, 256) if name.endswith("_blocks") else (122, 125)
            found[name] = draw.integers(low, high, shape, dtype=np.uint8)
            continue
        if name.endswith("tid2eid"):
            found[name] = np.argsort(draw.random((shape[0], config["n_routed_experts"])), axis=1)[:, : shape[1]]
            continue
        values = draw.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            centre = 0 if from_one and not name.endswith("linear_attn.norm.weight") else 1
            values = values * np.float32(0.2) + np.float32(centre)
        elif name.endswith("layer_scalar"):
            values = values * np.float32(0.1) + np.float32(1)
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            values *= np.float32(3 / config["hidden_size"] ** 0.5)
        elif name.endswith(("put_min", "put_max")):  # limits, which some numbers are beyond
            values = np.abs(values) / 2 + np.float32(1)
            values = -values if name.endswith("min") else values
        elif name.endswith("A_log"):
            values -= np.float32(4)  # states forget slowly
        elif name.endswith("_proj.bias") and config["model_type"] in _SMALL_BIASES:
            values *= np.float32(0.2)
        elif name.endswith("gate_up_proj_bias"):
            values *= np.float32(5)  # some are beyond the limit of a clamped activation
        elif name.endswith(_LIMITED.get(config["model_type"], "")) and config["model_type"] in _LIMITED:
            values *= np.float32(6 / shape[1] ** 0.5)  # some are beyond its limit
        elif name.endswith(("mlp.gate.weight", "mlp.gate.weight_1")) and shape[0] == config["hidden_size"]:
            values *= np.float32(1.5 / shape[0] ** 0.5)  # inputs come first
        elif len(shape) > 1:
            values *= np.float32(1.5 / shape[1] ** 0.5)
        found[name] = values
    return found


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    shapes: Mapping[str, list[int]],
    weights: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """A model's directory, with a tokenizer. weights: where they are not drawn"""
    write_tokenizer_directory(directory, byte_level_tokenizer())
    (directory / "config.json").write_text(json.dumps(config))
    weights = draw_weights(config, shapes) if weights is None else weights
    kinds = {"float32": "F32", "uint8": "U8", "int64": "I64"}
    forms = {name: TensorForm(kinds[values.dtype.name], values.shape) for name, values in weights.items()}
    write_safetensors(directory / "model.safetensors", forms, iter(weights.values()))
    return directory


def reference(name: str) -> dict[str, Any]:
    """What was recorded of a tiny model: ``config``, ``shapes`` of its weights, and ``prompts``."""
    found: dict[str, Any] = json.loads((_REFERENCES / f"tiny-{name}.json").read_text())
    return found


@cache
def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="headwise-tiny-")


@cache
def checkpoint(name: str, seed: int = 0) -> Path:
    """The directory of a tiny model, written when it is first asked for and gone with this process. seed: of its
    weights; what was recorded is of those of 0"""
    known = reference(name)
    directory = Path(_scratch().name) / (f"{name}-{seed}" if seed else name)
    weights = draw_weights(known["config"], known["shapes"], seed)
    return write_checkpoint(directory, known["config"], known["shapes"], weights)
