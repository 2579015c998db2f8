"""GGUF's Qwen 1.5, 2, 2.5 and 3, some of which have experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.loader.gguf_architecture import (
    ATTENTION,
    HEAD_NORMS,
    LLAMA_NAMES,
    Architecture,
    Config,
    as_llama,
    experts_at,
    feed_forward,
)
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import integer, rope_scaling, theta
from headwise.runtime.loader.gguf_part import Part, made_of
from headwise.runtime.models.model_config import ModelConfig


def _qwen(name: str, architecture: str, model_type: str) -> Callable[[GgufFile], dict[str, Any]]:
    def config(source: GgufFile) -> dict[str, Any]:
        return {
            "architectures": [architecture],
            "model_type": model_type,
            "hidden_act": "silu",
            "rope_theta": theta(source, name),
            "rope_scaling": rope_scaling(source, name),
            "use_sliding_window": False,
        }

    return config


def _qwen2moe(source: GgufFile) -> dict[str, Any]:
    """All that were published have experts in every layer, and weights that are not normed; GGUF says neither. Files of
    before there were keys for it have sizes that follow from that of a dense MLP."""
    per_token = integer(source, "qwen2moe.expert_used_count")
    size = integer(source, "qwen2moe.feed_forward_length")
    return {
        **_qwen("qwen2moe", "Qwen2MoeForCausalLM", "qwen2_moe")(source),
        "qkv_bias": "blk.0.attn_q.bias" in source.tensors,
        "num_experts": integer(source, "qwen2moe.expert_count"),
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": integer(source, "qwen2moe.expert_feed_forward_length", size // per_token),
        "shared_expert_intermediate_size": integer(source, "qwen2moe.expert_shared_feed_forward_length", size),
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen3moe(source: GgufFile) -> dict[str, Any]:
    """All that were published have experts in every layer, and weights that are normed; GGUF says neither."""
    return {
        **_qwen("qwen3moe", "Qwen3MoeForCausalLM", "qwen3_moe")(source),
        "num_experts": integer(source, "qwen3moe.expert_count"),
        "num_experts_per_tok": integer(source, "qwen3moe.expert_used_count"),
        "moe_intermediate_size": integer(source, "qwen3moe.expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _needs_qwen2moe(config: ModelConfig, layer: int) -> tuple[str, ...]:
    return (*ATTENTION, "ffn_norm", *feed_forward(config, layer, GATED_EXPERT_PARTS))


def _needs_qwen3(config: ModelConfig, layer: int) -> tuple[str, ...]:
    return (*as_llama(config, layer), *HEAD_NORMS)


def shared_gates(source: GgufFile, config: Config) -> Iterable[Part]:
    """Of layers with an expert that all tokens go through as far as a gate lets them: the gate, a vector in GGUF and a
    matrix of one row elsewhere. Raises `ModelError` on one that is not of the hidden size."""
    hidden = config["hidden_size"]
    for layer in range(config["num_hidden_layers"]):
        name = f"blk.{layer}.{_GATE}.weight"
        if name not in source.tensors:
            continue
        if source.tensors[name].shape not in ((hidden,), (1, hidden)):
            raise ModelError(
                f"{source.path}: {name} has the shape {source.tensors[name].shape}, the metadata say {(hidden,)}; "
                "download it again"
            )
        hf = f"model.layers.{layer}.mlp.shared_expert_gate.weight"
        yield made_of(source, hf, (1, hidden), (name,), partial(_as_row, source, name))


def _as_row(source: GgufFile, name: str) -> NDArray[np.float32]:
    return source.tensor(name).reshape(1, -1)


_GATE = "ffn_gate_inp_shexp"
GATED_EXPERT = {f"ffn_{kind}_shexp": f"mlp.shared_expert.{kind}_proj" for kind in ("gate", "up", "down")}
GATED_EXPERT_PARTS = (*GATED_EXPERT, _GATE)

QWEN: Mapping[str, Architecture] = {
    "qwen2": Architecture(_qwen("qwen2", "Qwen2ForCausalLM", "qwen2"), LLAMA_NAMES, as_llama),
    "qwen2moe": Architecture(
        _qwen2moe,
        {**LLAMA_NAMES, **GATED_EXPERT, "ffn_gate_inp": "mlp.gate"},
        _needs_qwen2moe,
        experts=experts_at("mlp.experts"),
        made=shared_gates,
    ),
    "qwen3": Architecture(_qwen("qwen3", "Qwen3ForCausalLM", "qwen3"), {**LLAMA_NAMES, **HEAD_NORMS}, _needs_qwen3),
    "qwen3moe": Architecture(
        _qwen3moe,
        {**LLAMA_NAMES, **HEAD_NORMS, "ffn_gate_inp": "mlp.gate"},
        _needs_qwen3,
        experts=experts_at("mlp.experts"),
    ),
}
