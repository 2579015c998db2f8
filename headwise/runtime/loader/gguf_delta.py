"""GGUF's models with gated delta-nets: Qwen3-Next, and Qwen3.5 with and without experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
    experts_at,
    feed_forward,
)
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import integer, placed_scaling, theta
from headwise.runtime.loader.gguf_part import Part, made_of
from headwise.runtime.loader.gguf_qwen import GATED_EXPERT, GATED_EXPERT_PARTS, shared_gates
from headwise.runtime.loader.gguf_states import decay_logarithms
from headwise.runtime.models.model_config import ModelConfig

_NEXT, _QWEN35, _QWEN35_MOE = "qwen3next", "qwen35", "qwen35moe"
_QKV, _GATES, _WHOLE = "attn_qkv.weight", "attn_gate.weight", "ssm_in.weight"


def _config(name: str, architecture: str, model_type: str) -> Callable[[GgufFile], dict[str, Any]]:
    def config(source: GgufFile) -> dict[str, Any]:
        head_dim = integer(source, f"{name}.attention.key_length")
        value_heads, inner = integer(source, f"{name}.ssm.time_step_rank"), integer(source, f"{name}.ssm.inner_size")
        if inner % value_heads:
            raise ModelError(f"{source.path}: {name}.ssm.inner_size {inner} is no multiple of {value_heads} heads")
        found = {
            "architectures": [architecture],
            "model_type": model_type,
            "hidden_act": "silu",
            "rope_theta": theta(source, name),
            "rope_scaling": placed_scaling(source, name),
            "partial_rotary_factor": integer(source, f"{name}.rope.dimension_count") / head_dim,
            "full_attention_interval": integer(source, f"{name}.full_attention_interval", 4),
            "linear_num_key_heads": integer(source, f"{name}.ssm.group_count"),
            "linear_num_value_heads": value_heads,
            "linear_key_head_dim": integer(source, f"{name}.ssm.state_size"),
            "linear_value_head_dim": inner // value_heads,
            "linear_conv_kernel_dim": integer(source, f"{name}.ssm.conv_kernel"),
        }
        return found if name == _QWEN35 else {**found, **_experts(source, name)}

    return config


def _experts(source: GgufFile, name: str) -> dict[str, Any]:
    size = integer(source, f"{name}.expert_feed_forward_length")
    return {
        "intermediate_size": integer(source, f"{name}.feed_forward_length", size),  # of layers that none of them has
        "num_experts": integer(source, f"{name}.expert_count"),
        "num_experts_per_tok": integer(source, f"{name}.expert_used_count"),
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": integer(source, f"{name}.expert_shared_feed_forward_length", size),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


# ---- weights ----


def _undo(name: str, values: NDArray[Any], config: Config) -> NDArray[Any]:
    """Take 1 from the weights of norms, which multiply by ``1 + weight``, but for those of delta-nets' heads."""
    is_offset = name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")
    return values - np.float32(1.0) if is_offset else values


def _undo_qwen35(name: str, values: NDArray[Any], config: Config) -> NDArray[Any]:
    """The same, and value heads in the order of the key heads that they share: all first ones come first in GGUF."""
    kind = name.split(".", 2)[-1]
    if kind == _QKV:
        behind = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
        return np.concatenate([values[:behind], _by_key_head(values[behind:], config)])
    if kind in (_GATES, "ssm_beta.weight", "ssm_alpha.weight"):
        return _by_key_head(values, config)
    if kind == "ssm_out.weight":
        return np.ascontiguousarray(_by_key_head(values.T, config).T)
    return _undo(name, values, config)


def _columns(name: str, config: Config) -> int:
    return int(config["linear_value_head_dim"]) if name.endswith("ssm_out.weight") else 0


def _by_key_head(values: NDArray[Any], config: Config) -> NDArray[Any]:
    """Reorder the first axis, ``[share, key heads, ...]``, to ``[key heads, share, ...]``."""
    heads = config["linear_num_key_heads"]
    apart = values.reshape(config["linear_num_value_heads"] // heads, heads, -1, *values.shape[1:])
    return np.ascontiguousarray(apart.swapaxes(0, 1)).reshape(values.shape)


def _in_order(values: NDArray[np.float32], config: Config) -> NDArray[np.float32]:
    return values


def _made(order: Callable[[NDArray[np.float32], Config], NDArray[np.float32]]) -> Callable[..., Iterable[Part]]:
    """Weights of delta-nets that have another shape, or are other numbers, in GGUF.

    order: of value heads, along the first axis
    """

    def made(source: GgufFile, config: Config) -> Iterable[Part]:
        for layer in range(config["num_hidden_layers"]):
            at, hf = f"blk.{layer}.", f"model.layers.{layer}.linear_attn."
            if f"{at}ssm_a" in source.tensors:
                yield from _of_delta_net(source, at, hf, config, order)
        yield from shared_gates(source, config)

    return made


def _of_delta_net(
    source: GgufFile,
    at: str,
    hf: str,
    config: Config,
    order: Callable[[NDArray[np.float32], Config], NDArray[np.float32]],
) -> Iterable[Part]:
    heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    plain = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    channels, kernel = plain + heads * value_dim, config["linear_conv_kernel_dim"]

    def decays() -> NDArray[np.float32]:
        return order(decay_logarithms(source, f"{at}ssm_a"), config)

    def convolution() -> NDArray[np.float32]:
        rows = source.tensor(f"{at}ssm_conv1d.weight").reshape(channels, kernel)
        return np.concatenate([rows[:plain], order(rows[plain:], config)])[:, None]

    def biases() -> NDArray[np.float32]:
        return order(source.tensor(f"{at}ssm_dt.bias").reshape(-1), config)

    yield made_of(source, f"{hf}A_log", (heads,), (f"{at}ssm_a",), decays)
    yield made_of(source, f"{hf}conv1d.weight", (channels, 1, kernel), (f"{at}ssm_conv1d.weight",), convolution)
    yield made_of(source, f"{hf}dt_bias", (heads,), (f"{at}ssm_dt.bias",), biases)


def _made_next(source: GgufFile, config: Config) -> Iterable[Part]:
    """Those of all, and ``in_proj_qkvz``, of which newer files have queries, keys and values, and gates, apart."""
    yield from _made(_in_order)(source, config)
    heads, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    for layer in range(config["num_hidden_layers"]):
        names = f"blk.{layer}.{_QKV}", f"blk.{layer}.{_GATES}"
        if f"blk.{layer}.ssm_a" not in source.tensors or f"blk.{layer}.{_WHOLE}" in source.tensors:
            continue
        for name in names:
            if name not in source.tensors:
                raise ModelError(f"{source.path} lacks the tensor {name!r}; download it again")

        def joined(names: tuple[str, str] = names) -> NDArray[np.float32]:
            rows = np.concatenate([source.tensor(name) for name in names])
            cuts = [heads * key_dim, 2 * heads * key_dim, heads * (2 * key_dim + values)]
            apart = [part.reshape(heads, -1, rows.shape[1]) for part in np.split(rows, cuts)]
            return np.concatenate(apart, axis=1).reshape(rows.shape)

        shape = heads * (2 * key_dim + 2 * values), config["hidden_size"]
        yield made_of(source, f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight", shape, names, joined)


def _needed(is_next: bool) -> Callable[[ModelConfig, int], tuple[str, ...]]:
    def needed(config: ModelConfig, layer: int) -> tuple[str, ...]:
        assert config.states is not None, "parsed so"
        fed = ("post_attention_norm", *feed_forward(config, layer, GATED_EXPERT_PARTS))
        if layer not in config.states.layers:
            return (*ATTENTION, *HEAD_NORMS, *fed)
        parts = ("ssm_ba",) if is_next else ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")
        return ("attn_norm", *parts, "ssm_a", "ssm_conv1d", "ssm_dt.bias", "ssm_norm", "ssm_out", *fed)

    return needed


_NAMES = {
    **{name: hf for name, hf in LLAMA_NAMES.items() if name != "ffn_norm"},
    **HEAD_NORMS,
    **GATED_EXPERT,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_NEXT_NAMES = {**_NAMES, "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"}
_QWEN35_NAMES = {
    **_NAMES,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
}

DELTA: Mapping[str, Architecture] = {
    _NEXT: Architecture(
        _config(_NEXT, "Qwen3NextForCausalLM", "qwen3_next"),
        _NEXT_NAMES,
        _needed(is_next=True),
        experts=experts_at("mlp.experts"),
        undo=_undo,
        made=_made_next,
    ),
    **{
        name: Architecture(
            _config(name, architecture, model_type),
            _QWEN35_NAMES,
            _needed(is_next=False),
            experts={} if name == _QWEN35 else experts_at("mlp.experts"),
            undo=_undo_qwen35,
            columns=_columns,
            made=_made(_by_key_head),
        )
        for name, architecture, model_type in (
            (_QWEN35, "Qwen3_5ForCausalLM", "qwen3_5_text"),
            (_QWEN35_MOE, "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
        )
    },
}
