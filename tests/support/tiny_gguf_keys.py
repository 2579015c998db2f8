"""Keys of the tiny models' GGUF files, as llama.cpp's converter would write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]


def model_keys(config: Config, architecture: str) -> dict[str, Any]:
    """What llama.cpp's converter writes of a model, without the architecture's name before it."""
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    base = {
        "block_count": layers_of(config),
        "context_length": config.get("max_position_embeddings", config.get("model_max_length")),
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps", _EPS.get(architecture, 1e-6))),
        "attention.key_length": dim,
        "attention.value_length": dim,
        "rope.freq_base": float(config["rope_theta"]) if "rope_theta" in config else None,
        "expert_used_count": config.get("num_experts_per_tok", config.get("moe_k", config.get("top_k_experts"))),
        "expert_count": next((config[key] for key in _EXPERT_COUNTS if key in config), None),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        **_scaling(config.get("rope_scaling")),
    }
    return {**base, **_OWN_KEYS.get(architecture, lambda config: {})(config)}


_EPS = {
    **dict.fromkeys(
        ("llama", "gpt-oss", "ernie4_5", "ernie4_5-moe", "olmo2", "exaone4", "mistral3", "cohere2", "arcee"), 1e-5
    ),
    "glm4": 1.5625e-7,
}
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def layers_of(config: Config) -> int:
    """Numbered ones."""
    pattern = config.get("hybrid_override_pattern", "")
    return len(pattern) or int(config["num_hidden_layers"])


def _scaling(scaling: Config | None) -> dict[str, Any]:
    if not scaling or scaling.get("rope_type") == "llama3":
        return {}
    found = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(scaling["factor"]),
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": scaling.get("beta_fast"),
        "rope.scaling.yarn_beta_slow": scaling.get("beta_slow"),
    }
    if "mscale_all_dim" in scaling:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling["mscale_all_dim"]
    return found


def _llama(config: Config) -> dict[str, Any]:
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {"rope.dimension_count": dim, "vocab_size": config["vocab_size"]}


def _gpt_oss(config: Config) -> dict[str, Any]:
    return {
        "attention.sliding_window": config["sliding_window"],
        "expert_feed_forward_length": config["intermediate_size"],
    }


def _deepseek(config: Config) -> dict[str, Any]:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config["q_lora_rank"],
        "rope.dimension_count": rotated,
        "vocab_size": config["vocab_size"],
        "leading_dense_block_count": config.get("first_k_dense_replace", 1),
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config.get("norm_topk_prob", True),
        "expert_gating_func": 1 if config.get("scoring_func") == "softmax" else 2,
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "attention.indexer.head_count": config.get("index_n_heads"),
        "attention.indexer.key_length": config.get("index_head_dim"),
        "attention.indexer.top_k": config.get("index_topk"),
    }


def _kimi(config: Config) -> dict[str, Any]:
    own, rank, rotated = config["linear_attn_config"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    layers = range(1, config["num_hidden_layers"] + 1)
    return {
        "attention.head_count_kv": [int(layer in own["full_attn_layers"]) for layer in layers],
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config["q_lora_rank"],
        "rope.dimension_count": rotated,
        "vocab_size": config["vocab_size"],
        "ssm.conv_kernel": own["short_conv_kernel_size"],
        "kda.head_dim": own["head_dim"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_used_count": config["num_experts_per_token"],
        "expert_shared_count": config["num_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["moe_renormalize"],
        "expert_gating_func": 2,
    }


def _ernie_moe(config: Config) -> dict[str, Any]:
    return {
        "interleave_moe_layer_step": config["moe_layer_interval"],
        "leading_dense_block_count": config["moe_layer_start_index"],
        "expert_shared_count": config["moe_num_shared_experts"],
        "expert_shared_feed_forward_length": config["moe_num_shared_experts"] * config["moe_intermediate_size"],
    }


def _gemma4(config: Config) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    shared, layers, inner = config.get("num_kv_shared_layers", 0), len(slides), config["intermediate_size"]
    wide = [inner * (2 if layer >= layers - shared else 1) for layer in range(layers)]
    kinds = {True: config["num_key_value_heads"], False: config["num_global_key_value_heads"]}
    full = kinds if config["attention_k_eq_v"] else dict.fromkeys(kinds, config["num_key_value_heads"])
    return {
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.sliding_window_pattern": slides,
        "attention.sliding_window": config["sliding_window"],
        "attention.key_length": config["global_head_dim"],
        "attention.value_length": config["global_head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "feed_forward_length": wide if config.get("use_double_wide_mlp") else inner,
        "attention.head_count_kv": [full[each] for each in slides],
        "rope.dimension_count": config["global_head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base": 1_000_000.0,
        "rope.freq_base_swa": 10_000.0,
        "final_logit_softcapping": config["final_logit_softcapping"],
    }


def _delta(config: Config) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        "full_attention_interval": config.get("full_attention_interval", 4),
        "rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"]),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }


def _qwen35(config: Config) -> dict[str, Any]:
    return {**_delta(config), "rope.dimension_sections": [11, 11, 10, 0]}


def _llama4(config: Config) -> dict[str, Any]:
    return {
        **_llama(config),
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
        "expert_feed_forward_length": config["intermediate_size"],
        "feed_forward_length": config["intermediate_size_mlp"],
    }


def _corrected(config: Config) -> dict[str, Any]:
    """Of experts that are chosen by sigmoids."""
    shared = config.get("n_shared_experts", config.get("num_shared_experts", 0))
    return {
        "leading_dense_block_count": config.get("first_k_dense_replace", config.get("num_dense_layers", 1)),
        "expert_shared_count": shared,
        "expert_weights_scale": config.get("routed_scaling_factor", config.get("route_scale")),
        "expert_weights_norm": config.get("norm_topk_prob", True),
        "expert_gating_func": 2,
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group", config.get("n_group") and 1),
        "expert_shared_feed_forward_length": shared * config["moe_intermediate_size"],
    }


def _windows(config: Config) -> dict[str, Any]:
    layers = range(config["num_hidden_layers"])
    window = config.get("sliding_window")
    slides = [kind == "sliding_attention" for kind in config.get("layer_types") or ()]
    return {
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": (slides or [(layer + 1) % 4 != 0 for layer in layers]) if window else None,
    }


def _part_rotated(config: Config) -> dict[str, Any]:
    share = config.get("partial_rotary_factor", 1.0)
    return {"rope.dimension_count": config.get("rotary_dim") or int(config["head_dim"] * share)}


def _glm4_moe(config: Config) -> dict[str, Any]:
    return {**_corrected(config), **_part_rotated(config), "nextn_predict_layers": config["num_nextn_predict_layers"]}


def _qwen2_moe(config: Config) -> dict[str, Any]:
    return {"expert_shared_feed_forward_length": config["shared_expert_intermediate_size"]}


def _minimax(config: Config) -> dict[str, Any]:
    size = config["intermediate_size"]
    return {**_part_rotated(config), "expert_feed_forward_length": size, "expert_gating_func": 2}


def _exaone_moe(config: Config) -> dict[str, Any]:
    return {**_corrected(config), **_windows(config), "rope.scaling.type": "none", "nextn_predict_layers": 0}


def _cohere2(config: Config) -> dict[str, Any]:
    return {
        **_llama(config),
        "attention.layer_norm_rms_epsilon": None,
        "attention.layer_norm_epsilon": float(config.get("layer_norm_eps", 1e-5)),
        "attention.sliding_window": config["sliding_window"],
        "logit_scale": config["logit_scale"],
        "rope.scaling.type": "none",
    }


def _afmoe(config: Config) -> dict[str, Any]:
    return {**_llama(config), **_corrected(config), "attention.sliding_window": config["sliding_window"]}


def _mistral3(config: Config) -> dict[str, Any]:
    ropes = config.get("rope_parameters") or {}
    if "llama_4_scaling_beta" not in ropes:
        return _llama(config)
    return {
        **_llama(config),
        **_scaling(ropes),
        "rope.freq_base": ropes["rope_theta"],
        "rope.scaling.yarn_log_multiplier": ropes["mscale_all_dim"],
        "attention.temperature_scale": ropes["llama_4_scaling_beta"],
    }


def _granite(config: Config) -> dict[str, Any]:
    return {
        **_llama(config),
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "attention.scale": config["attention_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def _granite_moe(config: Config) -> dict[str, Any]:
    return {**_granite(config), "expert_shared_feed_forward_length": config.get("shared_intermediate_size")}


def _granite_hybrid(config: Config) -> dict[str, Any]:
    """Only head dimensions that follow from others are written, and lengths that states alone would have."""
    kinds = config["layer_types"]
    return {
        **_granite_moe(config),
        "attention.key_length": None,
        "attention.value_length": None,
        "attention.head_count_kv": [config["num_key_value_heads"] * (kind == "attention") for kind in kinds],
        "context_length": 1 << 20,
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.time_step_rank": config["mamba_n_heads"],
    }


def _nemotron(config: Config) -> dict[str, Any]:
    pattern, routed = config["hybrid_override_pattern"], config.get("moe_intermediate_size")
    inner = routed or config["intermediate_size"]
    return {
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "attention.head_count_kv": [config["num_key_value_heads"] * (letter == "*") for letter in pattern],
        "feed_forward_length": [inner * (letter in "-E") for letter in pattern],
        "rope.dimension_count": config["head_dim"],
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "ssm.time_step_rank": config["mamba_num_heads"],
    }


def _nemotron_moe(config: Config) -> dict[str, Any]:
    return {
        **_nemotron(config),
        "expert_shared_count": config["n_shared_experts"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_weights_norm": config.get("norm_topk_prob", True),
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_group_count": config.get("n_group", 1),
        "expert_group_used_count": config.get("topk_group", 1),
        "moe_latent_size": config.get("moe_latent_size"),
    }


_OWN_KEYS: Mapping[str, Callable[[Config], dict[str, Any]]] = {
    "llama": _llama,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek,
    "deepseek32": _deepseek,
    "kimi-linear": _kimi,
    "ernie4_5-moe": _ernie_moe,
    "gemma4": _gemma4,
    "qwen3next": _delta,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "llama4": _llama4,
    "glm4": _part_rotated,
    "glm4moe": _glm4_moe,
    "qwen2moe": _qwen2_moe,
    "smollm3": _llama,
    "arcee": _llama,
    "minimax-m2": _minimax,
    "olmo2": _windows,
    "exaone4": _windows,
    "exaone-moe": _exaone_moe,
    "cohere2": _cohere2,
    "dots1": _corrected,
    "afmoe": _afmoe,
    "mistral3": _mistral3,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "granitehybrid": _granite_hybrid,
    "nemotron_h": _nemotron,
    "nemotron_h_moe": _nemotron_moe,
}
