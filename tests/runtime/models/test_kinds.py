"""A config that mixes kinds of memory which its architecture has not together is refused, not served without them."""

from __future__ import annotations

from typing import Any

import pytest
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint

from headwise.errors import ModelError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.models.registry import model_config


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek-v3", {"sliding_window": 24}, "'sliding_window' 24, windows, which DeepseekV3ForCausalLM"),
        ("deepseek-v3", {"index_topk": 64}, "'index_topk' 64, an indexer, which DeepseekV3ForCausalLM"),
        ("deepseek-v2", {"layer_types": ["linear_attention"] * 3}, "'layer_types' with 'linear_attention', states"),
        ("deepseek-v2", {"layer_types": ["sliding_attention"] * 3}, "'layer_types' with 'sliding_attention', windows"),
        ("qwen3-next", {"kv_lora_rank": 32}, "'kv_lora_rank' 32, latents, which Qwen3NextForCausalLM"),
        ("qwen3-next", {"sliding_window": 64}, "'sliding_window' 64, windows, which Qwen3NextForCausalLM"),
        (
            "qwen3.5",
            {"layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"]},
            "'layer_types' with 'sliding_attention', windows, which Qwen3_5ForCausalLM",
        ),
        ("qwen2", {"kv_lora_rank": 64}, "'kv_lora_rank' 64, latents, which Qwen2ForCausalLM"),
        ("qwen3", {"linear_num_key_heads": 4}, "'linear_num_key_heads' 4, states of linear attention"),
        ("mixtral", {"layer_types": ["chunked_attention"] * 3}, "'layer_types' with 'chunked_attention', attention wi"),
        ("mixtral", {"mamba_d_state": 16}, "'mamba_d_state' 16, states of a state space model, which Mixtral"),
        ("phi3", {"attention_chunk_size": 64}, "'attention_chunk_size' 64, attention within chunks, which Phi3"),
        ("gemma2", {"num_kv_shared_layers": 1}, "'num_kv_shared_layers' 1, layers that share a cache, which Gemma2"),
    ],
)
def test_a_kind_that_the_architecture_has_not_is_named_in_one_line(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError) as caught:
        model_config({**TINY_CONFIGS[name], **changes})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_decoder_s_part_of_a_multimodal_config_is_looked_at() -> None:
    nested = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": TINY_CONFIGS["qwen3.5"]}
    model_config(nested)
    with pytest.raises(ModelError, match="'kv_lora_rank' 8, latents"):
        model_config({**nested, "text_config": {**TINY_CONFIGS["qwen3.5"], "kv_lora_rank": 8}})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3-next", {"sliding_window": 4096, "use_sliding_window": False}),
        ("deepseek-v3", {"sliding_window": None, "layer_types": ["full_attention"] * 3, "index_topk": None}),
        ("qwen3", {"kv_lora_rank": None, "attention_chunk_size": 0}),
        ("qwen3", {"mamba_d_state": 16, "layer_types": ["full_attention"] * 3}),
    ],
)
def test_fields_that_ask_for_nothing_are_passed_over(name: str, changes: dict[str, Any]) -> None:
    assert model_config({**TINY_CONFIGS[name], **changes}) == model_config(TINY_CONFIGS[name])


def test_weights_are_not_asked_for(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(
        (checkpoint("deepseek-v3") / "config.json")
        .read_text()
        .replace('"kv_lora_rank"', '"index_topk": 8, "kv_lora_rank"')
    )
    with pytest.raises(ModelError, match="an indexer"):
        read_model_card(EngineConfig(model=str(tmp_path)), tmp_path)
