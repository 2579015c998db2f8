"""Architectures that are not served: what each needs that we have not, and which served one comes nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Missing:
    """what: is missing; nearest: architecture that is served"""

    what: str
    nearest: str


_POSITIONS = "learned positions and layer norms"

MISSING = {
    "DeepseekV4ForCausalLM": Missing("a cache of compressed tokens", "DeepseekV32ForCausalLM"),
    "GlmMoeDsaForCausalLM": Missing("an indexer's choice that several layers share", "DeepseekV32ForCausalLM"),
    "Glm4MoeForCausalLM": Missing("routing by sigmoid", "Qwen3MoeForCausalLM"),
    "Qwen2MoeForCausalLM": Missing("a gated shared expert", "Qwen3MoeForCausalLM"),
    "Gemma3nForConditionalGeneration": Missing("alternating updates (AltUp) and sparse MLPs", "Gemma4ForCausalLM"),
    "Gemma4UnifiedForConditionalGeneration": Missing("the unified form's vision and audio", "Gemma4ForCausalLM"),
    "GemmaForCausalLM": Missing("a GELU MLP without post norms", "Gemma2ForCausalLM"),
    "KimiLinearForCausalLM": Missing("states that decay by channel (KDA) beside latents", "Qwen3NextForCausalLM"),
    "Mistral3ForConditionalGeneration": Missing("vision", "MistralForCausalLM"),
    "Phi3SmallForCausalLM": Missing("block-sparse attention", "Phi3ForCausalLM"),
    "PhiMoEForCausalLM": Missing("layer norms and sparse mixing of experts", "MixtralForCausalLM"),
    "PhiForCausalLM": Missing("layer norms and parallel blocks", "Phi3ForCausalLM"),
    "FalconForCausalLM": Missing("layer norms and parallel blocks", "LlamaForCausalLM"),
    "MambaForCausalLM": Missing("recurrent states in place of attention", "LlamaForCausalLM"),
    "GPT2LMHeadModel": Missing(_POSITIONS, "LlamaForCausalLM"),
    "OPTForCausalLM": Missing(_POSITIONS, "LlamaForCausalLM"),
}
"""Those that people are likely to ask for."""


def what_is_missing(name: str, served: Iterable[str]) -> str:
    """Half a sentence on an architecture that is not served; empty if nothing is known of it, nor alike."""
    known = MISSING.get(name)
    if known is not None:
        return f"it needs {known.what}; the nearest that is served is {known.nearest}"
    nearest = difflib.get_close_matches(name, list(served), n=1)
    return f"the nearest by name that is served is {nearest[0]}" if nearest else ""
