"""GGUF's Granite 3 and 4, with and without state space models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headwise.errors import ModelError
from headwise.runtime.loader.gguf_architecture import (
    ATTENTION,
    LLAMA_NAMES,
    Architecture,
    Config,
    as_llama,
    experts_at,
    feed_forward,
)
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import count, integer, shortest
from headwise.runtime.loader.gguf_part import Part
from headwise.runtime.loader.gguf_rope import undo_neighbours, whole_rope
from headwise.runtime.loader.gguf_states import (
    RESHAPED_STATES,
    check_size,
    of_some_layers,
    state_space_names,
    state_space_parts,
    state_space_sizes,
)
from headwise.runtime.models.model_config import ModelConfig

_MOE, _HYBRID = "granitemoe", "granitehybrid"
_FACTORS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
_SHARED_SIZE, _ROTATES = "expert_shared_feed_forward_length", "rope.scaling.finetuned"
_SHARED = {f"ffn_{kind}_shexp": f"shared_mlp.{kind}_proj" for kind in ("gate", "up", "down")}
_DENSE = {f"ffn_{kind}": f"shared_mlp.{kind}_proj" for kind in ("gate", "up", "down")}
_STATES = state_space_names("mamba")


def _granite(source: GgufFile) -> dict[str, Any]:
    _check_rotates(source, "granite")
    return {"architectures": ["GraniteForCausalLM"], "model_type": "granite", **_common(source, "granite")}


def _granite_moe(source: GgufFile) -> dict[str, Any]:
    """Of Granite 4 without states, too, which has an expert that all tokens go through."""
    if count(source, f"{_MOE}.{_SHARED_SIZE}"):
        return _hybrid(source)
    _check_rotates(source, _MOE)
    return {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": _MOE,
        "num_local_experts": integer(source, f"{_MOE}.expert_count"),
        "num_experts_per_tok": integer(source, f"{_MOE}.expert_used_count"),
        **_common(source, _MOE),
    }


def _hybrid(source: GgufFile) -> dict[str, Any]:
    name = source.require("general.architecture")
    heads = of_some_layers(source, f"{name}.attention.head_count_kv", "with states")
    rotates = _rotates(source, name)
    has_states = 0 in heads
    if has_states and rotates:
        raise ModelError(
            f"{source.path} has state space models, and {name}.{_ROTATES} is not false: so are Bamba's files, which "
            "cannot be served; those of Granite 4 rotate nothing"
        )
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": ["attention" if each else "mamba" for each in heads],
        "num_key_value_heads": max(heads),
        "attention_bias": any(f"blk.{layer}.attn_q.bias" in source.tensors for layer in range(len(heads))),
        "position_embedding_type": "rope" if rotates else "nope",
        **_feed_forward(source, name),
        **(_state_space(source, name) if has_states else {}),
        **_common(source, name),
    }


def _feed_forward(source: GgufFile, name: str) -> dict[str, Any]:
    """Without experts all that is left is what all tokens go through."""
    experts = count(source, f"{name}.expert_count")
    if not experts:
        size = integer(source, f"{name}.feed_forward_length")
        return {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": size}
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": integer(source, f"{name}.expert_used_count"),
        "shared_intermediate_size": integer(source, f"{name}.{_SHARED_SIZE}"),
    }


def _state_space(source: GgufFile, name: str) -> dict[str, Any]:
    sizes = state_space_sizes(source, name)
    return {
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": sizes.head_dim,
        "mamba_n_groups": sizes.groups,
        "mamba_d_state": sizes.state,
        "mamba_d_conv": sizes.convolution,
    }


def _rotates(source: GgufFile, name: str) -> bool:
    """llama.cpp's switch."""
    return bool(source.get(f"{name}.{_ROTATES}", True))


def _check_rotates(source: GgufFile, name: str) -> None:
    if not _rotates(source, name):
        raise ModelError(
            f"{source.path}: {name}.{_ROTATES} is false, so that nothing is rotated, which a {name} is not served "
            "with; Granite 4's files are those of a granitehybrid"
        )


def _common(source: GgufFile, name: str) -> dict[str, Any]:
    factors = {ours: source.get(f"{name}.{theirs}") for ours, theirs in _FACTORS.items()}
    return {
        "hidden_act": "silu",
        **{key: shortest(value) for key, value in factors.items() if value is not None},
        **whole_rope(source, name),
    }


# ---- weights ----


def _made(source: GgufFile, config: Config) -> Iterable[Part]:
    """What of a state space model has another shape, or is other numbers, in GGUF."""
    hidden, sizes = config["hidden_size"], None
    shared = config["shared_intermediate_size"], hidden
    for layer, kind in enumerate(config["layer_types"]):
        for name in (f"blk.{layer}.{part}.weight" for part in ("ffn_up", "ffn_up_shexp")):
            if name in source.tensors:
                check_size(source, name, shared)
        if kind == "mamba":
            sizes = sizes or state_space_sizes(source, source.require("general.architecture"))
            yield from state_space_parts(source, f"blk.{layer}.", f"model.layers.{layer}.mamba.", sizes, hidden)


def _needed(config: ModelConfig, layer: int) -> tuple[str, ...]:
    has_shared = config.moe is not None and config.moe.num_shared_experts > 0
    fed = ("ffn_norm", *feed_forward(config, layer, _SHARED if has_shared else ()))
    if config.states is None or layer not in config.states.layers:
        return (*ATTENTION, *fed)
    return ("attn_norm", *_STATES, *RESHAPED_STATES, *fed)


_EXPERT_NAMES = {**LLAMA_NAMES, **_SHARED, "ffn_gate_inp": "block_sparse_moe.router.layer"}

GRANITE: Mapping[str, Architecture] = {
    "granite": Architecture(_granite, LLAMA_NAMES, as_llama, undo=undo_neighbours),
    _MOE: Architecture(
        _granite_moe,
        _EXPERT_NAMES,
        _needed,
        experts=experts_at("block_sparse_moe.experts"),
        undo=undo_neighbours,
    ),
    _HYBRID: Architecture(
        _hybrid,
        {**_EXPERT_NAMES, **_DENSE, **_STATES},
        _needed,
        experts=experts_at("block_sparse_moe.experts"),
        undo=undo_neighbours,
        made=_made,
    ),
}
