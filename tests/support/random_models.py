"""Configs of tiny models, with random weights."""

from __future__ import annotations

import numpy as np
from support.engine.dense_oracle import DictWeights

from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.moe_config import MoeConfig

BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    "llama": {**BASE, "architectures": ["LlamaForCausalLM"]},
    "llama_biased_tied": {
        **BASE,
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama3_scaled": {**BASE, "architectures": ["LlamaForCausalLM"], "rope_scaling": LLAMA3},
    "linear_scaled": {
        **BASE,
        "architectures": ["LlamaForCausalLM"],
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    },
    "mistral_window": {**BASE, "architectures": ["MistralForCausalLM"], "sliding_window": 7},
    "gemma3": {
        **BASE,
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 5,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 20,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "attn_logit_softcapping": 30.0,
        "final_logit_softcapping": 20.0,
    },
}


def random_weights(config: ModelConfig, prefix: str = "model.") -> DictWeights:
    """Random weights of every name and shape that a decoder of this config may ask for."""
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    linear = {
        "self_attn.q_proj": (q, c.hidden_size),
        "self_attn.k_proj": (kv, c.hidden_size),
        "self_attn.v_proj": (kv, c.hidden_size),
        "self_attn.o_proj": (c.hidden_size, q),
        **{f"mlp.{part}": (c.intermediate_size, c.hidden_size) for part in _into(c)},
        "mlp.down_proj": (c.hidden_size, c.intermediate_size),
    }
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for layer in range(c.num_layers):
        at = f"{prefix}layers.{layer}."
        shapes |= {f"{at}{name}.weight": shape for name, shape in linear.items()}
        shapes |= {f"{at}{name}.bias": shape[:1] for name, shape in linear.items()}
        shapes |= {f"{at}{name}.weight": (c.hidden_size,) for name in norms}
        shapes |= {f"{at}self_attn.{name}.weight": (c.head_dim,) for name in ("q_norm", "k_norm")}
        shapes |= {f"{at}self_attn.sinks": (c.num_heads,)} if c.sink_logits else {}
        shapes |= _mixture(c, c.moe, f"{at}mlp.") if c.moe and layer in c.moe.layers else {}
    shapes |= {f"{prefix}norm.weight": (c.hidden_size,), "lm_head.weight": (c.vocab_size, c.hidden_size)}
    draw = np.random.default_rng(0)
    return DictWeights({name: draw.standard_normal(s, dtype=np.float32) * 0.2 for name, s in shapes.items()})


def _into(config: ModelConfig) -> tuple[str, ...]:
    return ("gate_proj", "up_proj") if config.mlp_gate else ("up_proj",)


def _mixture(config: ModelConfig, moe: MoeConfig, at: str) -> dict[str, tuple[int, ...]]:
    """Of a router, its correction, experts and the shared one, by the names of any model."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {f"{at}moe_statics.e_score_correction_bias": (1, moe.num_experts)}
    for router in ("gate", "router"):
        shapes |= {f"{at}{router}.weight": (moe.num_experts, hidden), f"{at}{router}.bias": (moe.num_experts,)}
    sizes = {f"experts.{expert}": moe.expert_size for expert in range(moe.num_experts)}
    for name, size in {**sizes, "shared_experts": moe.shared_size}.items():
        for part in _into(config):
            shapes |= {f"{at}{name}.{part}.weight": (size, hidden), f"{at}{name}.{part}.bias": (size,)}
        shapes |= {f"{at}{name}.down_proj.weight": (hidden, size), f"{at}{name}.down_proj.bias": (hidden,)}
    return shapes
