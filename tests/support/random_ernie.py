"""Configs of tiny ERNIE models, with random weights."""

from __future__ import annotations

from typing import Any

import numpy as np

DENSE = {
    "architectures": ["Ernie4_5ForCausalLM"],
    "model_type": "ernie4_5",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 40,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "use_bias": False,
}
MOE = {
    **{key: value for key, value in DENSE.items() if key != "head_dim"},
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "moe_k": 3,
    "moe_num_experts": 8,
    "moe_num_shared_experts": 2,
    "moe_intermediate_size": 12,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}


def has_experts(config: dict[str, Any], layer: int) -> bool:
    if "moe_k" not in config:
        return False
    end = config["moe_layer_end_index"]
    inside = config["moe_layer_start_index"] <= layer <= (config["num_hidden_layers"] if end == -1 else end)
    return inside and (layer + 1) % config["moe_layer_interval"] == 0


def draw_weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random weights by their published names, drawn in a fixed order: the references were computed with the same."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}

    def mlp(at: str, size: int) -> None:
        shapes.update(dict.fromkeys((f"{at}.gate_proj.weight", f"{at}.up_proj.weight"), (size, hidden)))
        shapes[f"{at}.down_proj.weight"] = (hidden, size)

    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, shape in {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}.items():
            shapes[f"{at}.self_attn.{name}_proj.weight"] = shape
        shapes |= {f"{at}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        if not has_experts(config, layer):
            mlp(f"{at}.mlp", inner)
            continue
        shapes[f"{at}.mlp.gate.weight"] = (config["moe_num_experts"], hidden)
        shapes[f"{at}.mlp.moe_statics.e_score_correction_bias"] = (1, config["moe_num_experts"])
        for expert in range(config["moe_num_experts"]):
            mlp(f"{at}.mlp.experts.{expert}", config["moe_intermediate_size"])
        if config["moe_num_shared_experts"]:
            mlp(f"{at}.mlp.shared_experts", config["moe_num_shared_experts"] * config["moe_intermediate_size"])
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    draw = np.random.default_rng(0)
    drawn = {name: draw.standard_normal(shape, dtype=np.float32) * np.float32(0.2) for name, shape in shapes.items()}
    return {name: 1 + values if name.endswith("norm.weight") else values for name, values in drawn.items()}
