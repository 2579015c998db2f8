"""Tiny random EAGLE-3 heads for tiny random models, as their checkpoints are published.

What torch makes of them is in `tests/references/eagle.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from support.tiny_checkpoints import draw_weights, reference

from headwise.runtime.loader.safetensors_file import TensorForm, write_safetensors


@dataclass(frozen=True)
class Head:
    """layer: what names of its layer begin with; drafts: tokens that it may draft; fields: of its ``config.json``"""

    layer: str = "midlayer."
    drafts: int = 263
    has_embedding: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)


HEADS: Mapping[str, Head] = {
    "qwen2": Head(fields={"rope_theta": 500000.0}),
    "qwen3": Head(layer="layers.0.", drafts=120, fields={"norm_before_residual": True, "num_key_value_heads": 4}),
    "qwen3-moe": Head(has_embedding=True, fields={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 1]}}),
    "gpt-oss": Head(layer="layers.0.", drafts=200, has_embedding=True),
}
"""By the model that they are for."""


def head_config(name: str) -> dict[str, Any]:
    model, head = reference(name)["config"], HEADS[name]
    alike = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{key: model[key] for key in alike if key in model},
        "num_hidden_layers": 1,
        "intermediate_size": 160,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "draft_vocab_size": head.drafts,
        **head.fields,
    }


def taken_states(name: str) -> int:
    own: dict[str, Any] = head_config(name).get("eagle_config", {})
    return len(own.get("eagle_aux_hidden_state_layer_ids", "123"))


def drafted_tokens(name: str) -> np.ndarray:
    """The model's token that each one of the head's is, ascending."""
    vocabulary, drafts = head_config(name)["vocab_size"], HEADS[name].drafts
    return np.sort(np.random.default_rng(7).permutation(vocabulary)[:drafts]).astype(np.int64)


@cache
def head_weights(name: str) -> dict[str, np.ndarray]:
    config, head = head_config(name), HEADS[name]
    hidden, dim, size = config["hidden_size"], config.get("head_dim", 0), config["intermediate_size"]
    dim = dim or hidden // config["num_attention_heads"]
    q, kv = (config[key] * dim for key in ("num_attention_heads", "num_key_value_heads"))
    of_layer = {
        "self_attn.q_proj": [q, 2 * hidden],
        "self_attn.k_proj": [kv, 2 * hidden],
        "self_attn.v_proj": [kv, 2 * hidden],
        "self_attn.o_proj": [hidden, q],
        "mlp.gate_proj": [size, hidden],
        "mlp.up_proj": [size, hidden],
        "mlp.down_proj": [hidden, size],
        "hidden_norm": [hidden],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    shapes = {
        "fc.weight": [hidden, taken_states(name) * hidden],
        "norm.weight": [hidden],
        "lm_head.weight": [head.drafts, hidden],
        **({"embed_tokens.weight": [config["vocab_size"], hidden]} if head.has_embedding else {}),
        **{f"{head.layer}{part}.weight": shape for part, shape in of_layer.items()},
    }
    weights = draw_weights(config, shapes)
    if head.drafts < config["vocab_size"]:
        tokens = drafted_tokens(name)
        weights["d2t"] = tokens - np.arange(len(tokens))
        weights["t2d"] = np.isin(np.arange(config["vocab_size"]), tokens)
    return weights


def write_head(directory: Path, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    kinds = {"float32": "F32", "int64": "I64", "bool": "BOOL"}
    forms = {name: TensorForm(kinds[values.dtype.name], values.shape) for name, values in weights.items()}
    write_safetensors(directory / "model.safetensors", forms, iter(weights.values()))
    return directory


@cache
def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="headwise-eagle-")


@cache
def head_checkpoint(name: str) -> Path:
    """The directory of a head, written when it is first asked for and gone with this process."""
    return write_head(Path(_scratch().name) / name, head_config(name), head_weights(name))
