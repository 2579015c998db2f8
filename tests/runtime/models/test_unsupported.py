"""Of an architecture that is not served, what is told of it."""

from __future__ import annotations

from typing import Any

import pytest

from headwise.runtime.models.registry import _MODELS
from headwise.runtime.models.unsupported import _FEATURES, MISSING, what_is_missing


def test_whatever_is_told_to_be_nearest_is_served_and_nothing_that_is_served_is_said_to_lack_something() -> None:
    nearest = {missing.nearest for missing in MISSING.values()} | {feature.nearest for feature in _FEATURES} - {""}
    assert nearest <= _MODELS.keys()
    assert not MISSING.keys() & _MODELS.keys()


@pytest.mark.parametrize(
    ("name", "needs", "nearest"),
    [
        ("PhiMoEForCausalLM", "layer norms and sparse mixing of experts", "MixtralForCausalLM"),
        ("GemmaForCausalLM", "a GELU MLP without post norms", "Gemma2ForCausalLM"),
        ("MambaForCausalLM", "states of a state space model", "GraniteMoeHybridForCausalLM"),
        ("FalconH1ForCausalLM", "attention and a state space model side by side", "GraniteMoeHybridForCausalLM"),
        ("Gemma4UnifiedForConditionalGeneration", "vision and audio", "Gemma4ForCausalLM"),
    ],
)
def test_what_is_known_of_a_name_is_told(name: str, needs: str, nearest: str) -> None:
    told = what_is_missing(name, {}, _MODELS)
    assert needs in told
    assert told.endswith(f"the nearest that is served is {nearest}")


@pytest.mark.parametrize(
    ("config", "told", "nearest"),
    [
        (
            {"kv_lora_rank": 512, "n_routed_experts": 64},
            "latents (kv_lora_rank), experts (n_routed_experts)",
            "DeepseekV3",
        ),
        ({"compress_rates": {"a": 4}, "index_topk": 512}, "entries of several tokens (compress_rates)", "DeepseekV4"),
        ({"kv_lora_rank": 512, "index_topk": 2048}, "an indexer (index_topk), latents", "DeepseekV32"),
        (
            {"mamba_d_state": 64, "num_experts": 16},
            "states of a state space model (mamba_d_state), experts",
            "GraniteMoeHybrid",
        ),
        ({"num_local_experts": 8, "sliding_window": None}, "experts (num_local_experts)", "Qwen3Moe"),
        ({"sliding_window": 4096, "num_key_value_heads": 8}, "windows (sliding_window), attention with", "Mistral"),
        ({"num_key_value_heads": 8}, "attention with grouped heads (num_key_value_heads)", "Llama"),
        (
            {"text_config": {"num_experts": 8}, "vision_config": {"depth": 2}},
            "experts (num_experts), vision",
            "Qwen3Moe",
        ),
    ],
)
def test_of_an_unknown_name_what_its_config_says_decides(config: dict[str, Any], told: str, nearest: str) -> None:
    found = what_is_missing("Gemma2MoeForCausalLM", config, _MODELS)  # by its letters, it would be Gemma 2
    assert f"its config has {told}" in found
    assert found.endswith(f"the nearest that is served, by these, is {nearest}ForCausalLM")


def test_where_a_config_says_nothing_a_name_that_is_alike_is_told() -> None:
    assert what_is_missing("Gemma9ForCausalLM", {}, _MODELS).startswith("the nearest by name that is served is Gemma")
    assert what_is_missing("Xyzzy", {"num_experts": 0, "text_config": "?"}, _MODELS) == ""
