"""Architectures that are not served: what each needs that we have not, and which served one comes nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Missing:
    """what: is missing; nearest: architecture that is served"""

    what: str
    nearest: str


_POSITIONS = "learned positions and layer norms"
_ONLY_STATES = "states of a state space model (Mamba) in place of all attention"
_HYBRID = "GraniteMoeHybridForCausalLM"

MISSING = {
    "Gemma3nForConditionalGeneration": Missing("alternating updates (AltUp) and sparse MLPs", "Gemma4ForCausalLM"),
    "Gemma4UnifiedForConditionalGeneration": Missing("the unified form's vision and audio", "Gemma4ForCausalLM"),
    "GemmaForCausalLM": Missing("a GELU MLP without post norms", "Gemma2ForCausalLM"),
    "Phi3SmallForCausalLM": Missing("block-sparse attention", "Phi3ForCausalLM"),
    "PhiMoEForCausalLM": Missing("layer norms and sparse mixing of experts", "MixtralForCausalLM"),
    "PhiForCausalLM": Missing("layer norms and parallel blocks", "Phi3ForCausalLM"),
    "FalconForCausalLM": Missing("layer norms and parallel blocks", "LlamaForCausalLM"),
    "FalconH1ForCausalLM": Missing("attention and a state space model side by side in each layer", _HYBRID),
    "JambaForCausalLM": Missing("states of a state space model of the first kind (Mamba)", _HYBRID),
    "MambaForCausalLM": Missing(_ONLY_STATES, _HYBRID),
    "Mamba2ForCausalLM": Missing(_ONLY_STATES, _HYBRID),
    "GPT2LMHeadModel": Missing(_POSITIONS, "LlamaForCausalLM"),
    "OPTForCausalLM": Missing(_POSITIONS, "LlamaForCausalLM"),
}
"""Those that people are likely to ask for."""


@dataclass(frozen=True)
class _Feature:
    """What some fields of a ``config.json`` tell. nearest: architecture that is served and has it; empty: none has"""

    what: str
    fields: tuple[str, ...]
    nearest: str


_FEATURES = (
    _Feature("entries of several tokens", ("compress_ratios", "compress_rates"), "DeepseekV4ForCausalLM"),
    _Feature("an indexer", ("index_topk",), "DeepseekV32ForCausalLM"),
    _Feature("latents", ("kv_lora_rank",), "DeepseekV3ForCausalLM"),
    _Feature("states of linear attention", ("linear_num_key_heads", "linear_attn_config"), "Qwen3NextForCausalLM"),
    _Feature(
        "states of a state space model",
        ("mamba_d_state", "ssm_state_size", "state_size", "ssm_cfg", "d_state", "mamba_num_heads"),
        _HYBRID,
    ),
    _Feature("layers that share a cache", ("num_kv_shared_layers",), "Gemma4ForCausalLM"),
    _Feature("heads of two sizes", ("global_head_dim",), "Gemma4ForCausalLM"),
    _Feature("attention within chunks", ("attention_chunk_size",), "Llama4ForCausalLM"),
    _Feature(
        "experts", ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), "Qwen3MoeForCausalLM"
    ),
    _Feature("softcaps", ("attn_logit_softcapping", "final_logit_softcapping"), "Gemma2ForCausalLM"),
    _Feature("windows", ("sliding_window",), "MistralForCausalLM"),
    _Feature("an encoder", ("is_encoder_decoder", "encoder_layers"), ""),
    _Feature("vision", ("vision_config",), ""),
    _Feature("audio", ("audio_config",), ""),
    _Feature("attention with grouped heads", ("num_key_value_heads",), "LlamaForCausalLM"),
)
"""The rarest first: the nearest architecture is that of the first one that a model has."""


def what_is_missing(name: str, config: Mapping[str, Any], served: Iterable[str]) -> str:
    """Half a sentence on an architecture that is not served; empty if nothing is known of it, nor alike.

    config: its ``config.json``
    """
    known = MISSING.get(name)
    if known is not None:
        return f"it needs {known.what}; the nearest that is served is {known.nearest}"
    found = _features_of(config)
    nearest = next((feature.nearest for feature, _ in found if feature.nearest), "")
    if nearest:
        told = ", ".join(f"{feature.what} ({field})" for feature, field in found)
        return f"its config has {told}; the nearest that is served, by these, is {nearest}"
    alike = difflib.get_close_matches(name, list(served), n=1)
    return f"the nearest by name that is served is {alike[0]}" if alike else ""


def _features_of(config: Mapping[str, Any]) -> list[tuple[_Feature, str]]:
    """The features that a config has, and the field that says so; a multimodal one's are those of its text, too."""
    text = config.get("text_config")
    both = [text, config] if isinstance(text, Mapping) else [config]
    found = []
    for feature in _FEATURES:
        field = next((field for field in feature.fields if any(each.get(field) for each in both)), "")
        if field:
            found.append((feature, field))
    return found
