"""GGUF's Nemotron-H, Nemotron Nano 2 and Nemotron 3: blocks that each are one thing, numbered as in the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headwise.errors import ModelError
from headwise.runtime.loader.gguf_architecture import Architecture, Config
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import count, integer, shortest
from headwise.runtime.loader.gguf_part import Part
from headwise.runtime.loader.gguf_routing import CORRECTION, corrected_feed_forward, sigmoid_routing
from headwise.runtime.loader.gguf_states import (
    RESHAPED_STATES,
    check_size,
    of_some_layers,
    state_space_names,
    state_space_parts,
    state_space_sizes,
)
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.nemotron_h import NemotronConfig

_DENSE, _MOE = "nemotron_h", "nemotron_h_moe"
_STATES, _ATTENTION, _MLP, _EXPERTS = "M", "*", "-", "E"
"""Of ``hybrid_override_pattern``."""
# Biases, of which no published model has any, are refused: names are of weights alone.
_MIXERS = {
    "attn_q.weight": "mixer.q_proj.weight",
    "attn_k.weight": "mixer.k_proj.weight",
    "attn_v.weight": "mixer.v_proj.weight",
    "attn_output.weight": "mixer.o_proj.weight",
}
_STATE_SPACE = state_space_names("mixer")
_LATENTS = {
    "ffn_latent_down.weight": "mixer.fc1_latent_proj.weight",
    "ffn_latent_up.weight": "mixer.fc2_latent_proj.weight",
}
_SHARED_SIZE = "expert_shared_feed_forward_length"


def _config(source: GgufFile) -> dict[str, Any]:
    name = source.require("general.architecture")
    pattern = _pattern(source, name)
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": pattern,
        "mlp_hidden_act": "relu2",
        **dict.fromkeys(("layer_norm_epsilon", "rms_norm_eps"), _epsilon(source, name)),
        "num_key_value_heads": max(_kv_heads(source, name)),
        "intermediate_size": max(_inner_sizes(source, name)),
        **(_state_space(source, name) if _STATES in pattern else {}),
        **(_experts(source, name) if _EXPERTS in pattern else {}),
    }


def _epsilon(source: GgufFile, name: str) -> float:
    """Of all norms. Files may have either key; where they have both, llama.cpp takes the first, too."""
    at = f"{name}.attention"
    known = source.get(f"{at}.layer_norm_rms_epsilon")
    return shortest(source.require(f"{at}.layer_norm_epsilon") if known is None else known)


def _pattern(source: GgufFile, name: str) -> str:
    """A letter for each block."""
    sizes = list(zip(_kv_heads(source, name), _inner_sizes(source, name), strict=True))
    both = [block for block, (heads, inner) in enumerate(sizes) if heads and inner]
    if both:
        raise ModelError(
            f"{source.path}: blocks {both} have heads of attention and an MLP, by {name}.attention.head_count_kv and "
            f"{name}.feed_forward_length, of which one must be 0; download it again"
        )
    fed = _EXPERTS if name == _MOE else _MLP
    return "".join(_ATTENTION if heads else fed if inner else _STATES for heads, inner in sizes)


def _kv_heads(source: GgufFile, name: str) -> list[int]:
    return of_some_layers(source, f"{name}.attention.head_count_kv", "without attention")


def _inner_sizes(source: GgufFile, name: str) -> list[int]:
    return of_some_layers(source, f"{name}.feed_forward_length", "without an MLP")


def _state_space(source: GgufFile, name: str) -> dict[str, Any]:
    sizes = state_space_sizes(source, name)
    return {
        "mamba_num_heads": sizes.heads,
        "mamba_head_dim": sizes.head_dim,
        "n_groups": sizes.groups,
        "ssm_state_size": sizes.state,
        "conv_kernel": sizes.convolution,
    }


def _experts(source: GgufFile, name: str) -> dict[str, Any]:
    latent = count(source, f"{name}.moe_latent_size")
    return {
        "n_routed_experts": integer(source, f"{name}.expert_count"),
        "n_shared_experts": integer(source, f"{name}.expert_shared_count"),
        "moe_shared_expert_intermediate_size": integer(source, f"{name}.{_SHARED_SIZE}"),
        **({"moe_latent_size": latent} if latent else {}),
        **sigmoid_routing(source, name),
    }


# ---- weights ----


def _made(source: GgufFile, config: Config) -> Iterable[Part]:
    """States' tensors that have another shape in GGUF; the sizes of all matrices are checked on the way."""
    name, pattern, hidden = source.require("general.architecture"), config["hybrid_override_pattern"], _hidden(config)
    sizes = state_space_sizes(source, name) if _STATES in pattern else None
    for block, letter in enumerate(pattern):
        at = f"blk.{block}."
        for stem, shape in _shapes(config, letter).items():
            check_size(source, f"{at}{stem}.weight", shape)
        if sizes is not None and letter == _STATES:
            yield from state_space_parts(source, at, f"backbone.layers.{block}.mixer.", sizes, hidden)


def _hidden(config: Config) -> int:
    size: int = config["hidden_size"]
    return size


def _shapes(config: Config, letter: str) -> dict[str, tuple[int, int]]:
    """GGUF names of a block's matrices -> their shapes; those of routed experts are checked where they are read."""
    hidden = _hidden(config)
    if letter == _ATTENTION:
        inner, shared = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
        into = {"attn_q": (inner, hidden), "attn_k": (shared, hidden), "attn_v": (shared, hidden)}
        return {**into, "attn_output": (hidden, inner)}
    if letter == _MLP:
        return _mlp_shapes("", config["intermediate_size"], hidden)
    return _expert_shapes(config, hidden) if letter == _EXPERTS else {}


def _expert_shapes(config: Config, hidden: int) -> dict[str, tuple[int, int]]:
    latent, shared = config.get("moe_latent_size"), config["moe_shared_expert_intermediate_size"]
    through = {"ffn_latent_down": (latent, hidden), "ffn_latent_up": (hidden, latent)} if latent else {}
    return {
        "ffn_gate_inp": (config["n_routed_experts"], hidden),
        **_mlp_shapes("_shexp", shared * config["n_shared_experts"], hidden),
        **through,
    }


def _mlp_shapes(suffix: str, inner: int, hidden: int) -> dict[str, tuple[int, int]]:
    return {f"ffn_up{suffix}": (inner, hidden), f"ffn_down{suffix}": (hidden, inner)}


def _needed(config: ModelConfig, block: int) -> tuple[str, ...]:
    assert isinstance(config, NemotronConfig), "parsed so"
    layer = next(layer for layer, blocks in enumerate(config.blocks) if block in blocks)
    if block != config.blocks[layer][0]:
        is_latent = config.moe is not None and config.moe.latent_size > 0
        return ("attn_norm", *corrected_feed_forward(config, layer), *(_LATENTS if is_latent else ()))
    has_states = config.states is not None and layer in config.states.layers
    return ("attn_norm", *((*_STATE_SPACE, *RESHAPED_STATES) if has_states else _MIXERS))


_NAMES = {
    "attn_norm.weight": "norm.weight",
    **_MIXERS,
    **_STATE_SPACE,
    "ffn_up.weight": "mixer.up_proj.weight",
    "ffn_down.weight": "mixer.down_proj.weight",
}
_EXPERT_NAMES = {
    **_NAMES,
    **_LATENTS,
    "ffn_up_shexp.weight": "mixer.shared_experts.up_proj.weight",
    "ffn_down_shexp.weight": "mixer.shared_experts.down_proj.weight",
    "ffn_gate_inp.weight": "mixer.gate.weight",
    CORRECTION: "mixer.gate.e_score_correction_bias",
}
_GLOBAL_NAMES = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"}
_NO_GATES = {f"ffn_{kind}_exps.weight": (f"mixer.experts.{{}}.{kind}_proj",) for kind in ("up", "down")}

# Nothing is rotated, so that it makes no difference in which order a head's rows of queries and keys are.
NEMOTRON: Mapping[str, Architecture] = {
    _DENSE: Architecture(_config, _NAMES, _needed, global_names=_GLOBAL_NAMES, made=_made, layers_at="backbone.layers"),
    _MOE: Architecture(
        _config,
        _EXPERT_NAMES,
        _needed,
        experts=_NO_GATES,
        global_names=_GLOBAL_NAMES,
        made=_made,
        layers_at="backbone.layers",
    ),
}
