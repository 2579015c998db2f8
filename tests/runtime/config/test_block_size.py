"""How many tokens a block has is the model's choice, the same for all numbers of ranks, unless somebody says it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.tiny_checkpoints import checkpoint

from headwise.cache_controller.head_exchange import Arrangement
from headwise.cache_controller.planner import plan_head_groups
from headwise.errors import ConfigError
from headwise.runtime.config.block_size import choose_block_size, resolve_block_size
from headwise.runtime.config.block_storage import storage_namespace
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.info import chosen
from headwise.runtime.config.model_card import ModelCard, arrangement_with, read_model_card
from headwise.runtime.config.peer_blocks import check_exchanges
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.registry import model_config
from headwise.runtime.models.shard import valid_tp_sizes

PUBLISHED = Path(__file__).parents[2] / "support" / "published"
ROOT = Path(__file__).parents[3]
NAMES = sorted(path.stem for path in PUBLISHED.glob("*.json"))
LARGEST_QWEN = "qwen3.5-397b-a17b"


def model_of(name: str) -> ModelConfig:
    return model_config(json.loads((PUBLISHED / f"{name}.json").read_text()))


def has_states(model: ModelConfig) -> bool:
    return any(policy.is_state for row in model.policies for policy in row)


def most_padding(model: ModelConfig, kv_dtype: str, block_size: int) -> float:
    """Of tokens or of states, on any number of ranks up to eight."""
    attention = attention_of(model)
    sizes = [attention.layout(block_size, 1, kv_dtype, layer).slot_bytes for layer in range(model.cache_layers)]
    plans = [
        plan_head_groups(model.policies, ranks, sizes=sizes, is_replicated=attention.is_replicated)
        for ranks in valid_tp_sizes(model)
        if ranks <= 8
    ]
    return max(plan.padding_of(states=states) for plan in plans for states in (False, True))


@pytest.mark.parametrize("name", NAMES)
def test_published_models_in_bfloat16_have_64_tokens_but_for_three(name: str) -> None:
    longer = (LARGEST_QWEN, "nemotron-3-nano-30b-a3b", "kimi-linear-48b-a3b")
    assert choose_block_size(model_of(name), "bfloat16").tokens == (128 if name in longer else 64)


@pytest.mark.parametrize(
    ("name", "kv_dtype", "tokens", "fewest", "more"),
    [
        ("qwen3.5-397b-a17b", "bfloat16", 128, 0.104, 0.047),
        ("qwen3.5-397b-a17b", "float32", 64, 0.047, None),
        ("qwen3.5-35b-a3b", "int8", 128, 0.213, 0.031),
        ("qwen3.5-35b-a3b", "int4", 128, 0.340, 0.005),
        ("qwen3.5-27b", "int4", 128, 0.247, 0.069),  # more than 5 %, but much less
        ("qwen3.5-27b", "bfloat16", 64, 0.069, 0.069),  # not less
        ("qwen3-next-80b-a3b", "int4", 64, 0.117, 0.117),
        ("gpt-oss-120b", "int8", 64, 0.0, None),
        ("kimi-linear-48b-a3b", "int8", 64, 0.028, None),
        ("kimi-linear-48b-a3b", "int4", 128, 0.174, 0.022),
    ],
)
def test_longer_blocks_are_chosen_where_they_pad_much_less(
    name: str, kv_dtype: str, tokens: int, fewest: float, more: float | None
) -> None:
    found = choose_block_size(model_of(name), kv_dtype)
    assert (found.tokens, found.fewest) == (tokens, pytest.approx(fewest, abs=6e-4))
    assert found.more == (None if more is None else pytest.approx(more, abs=6e-4))


def test_longer_blocks_that_pad_as_much_are_chosen_where_shorter_ones_make_many_groups() -> None:
    """A latent of 64 tokens has 72 KiB, a state 68.5: only one of each goes into a block."""
    found = choose_block_size(model_of("kimi-linear-48b-a3b"), "bfloat16")
    assert (found.tokens, found.groups, found.more) == (128, 647, found.fewest)
    assert found.reason.endswith("64 pads up to 5.1%, 128 up to 5.1%, and 64 would have 647 groups")
    assert choose_block_size(model_of("kimi-linear-48b-a3b"), "float32").tokens == 64  # of 44 groups


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", [name for name in NAMES if not has_states(model_of(name)) and "-v4" not in name])
def test_without_states_longer_blocks_pad_as_much(name: str, kv_dtype: str) -> None:
    model = model_of(name)
    assert most_padding(model, kv_dtype, 64) == pytest.approx(most_padding(model, kv_dtype, 128), abs=1e-3)


def largest_qwen(tmp_path: Path, **options: Any) -> tuple[EngineConfig, ModelCard]:
    (tmp_path / "config.json").write_bytes((PUBLISHED / f"{LARGEST_QWEN}.json").read_bytes())
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16", kv_cache="64GiB", **options)
    return config, read_model_card(config, tmp_path, identify=False)


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_any_ranks_have_the_same_number_and_the_line_at_the_start_says_it(tmp_path: Path, tp_size: int) -> None:
    config, card = largest_qwen(tmp_path, tp_size=tp_size)
    assert {layout.block_size for layout in card.layouts} == {128}
    assert card.max_model_len % 128 == 0
    layout = storage_namespace(replace(card, identity="a model"), 0).layout
    assert layout.count("/b128/") == len({layout.identity for layout in card.layouts})
    assert " block_size=128 " in chosen(config, card, tmp_path)


@pytest.mark.parametrize("block_size", [64, 128, 256])
def test_what_is_said_is_done(tmp_path: Path, block_size: int) -> None:
    config, card = largest_qwen(tmp_path, tp_size=2, block_size=block_size)
    assert card.layout.block_size == resolve_block_size(config, card.config) == block_size


def test_engines_of_other_ranks_read_each_others_blocks(tmp_path: Path) -> None:
    config, card = largest_qwen(tmp_path, tp_size=1, decode_tp_size=8, max_replicas=2)
    check_exchanges(config, card)
    for tp_size in (1, 8):
        other = read_model_card(config.of_ranks(tp_size), tmp_path, identify=False)
        assert arrangement_with(config, card, tp_size) == Arrangement.of(other.plan, other.layouts)
        assert (other.layout.block_size, other.max_model_len) == (128, card.max_model_len)


@pytest.mark.parametrize("name", ["smollm2.yaml", "gemma3.yaml"])
def test_files_that_say_nothing_leave_it_to_the_model(name: str) -> None:
    assert EngineConfig.load(ROOT / "deploy" / name, {}).block_size == "auto"


def test_windows_of_head_patterns_are_compared_with_the_blocks_there_will_be() -> None:
    with pytest.raises(ConfigError, match="window 32 is less than block_size 64"):
        EngineConfig(head_pattern="pattern.json", window=32, sink=4)
    assert EngineConfig(head_pattern="pattern.json", window=32, sink=4, block_size=16).fewest_block_tokens == 16


def test_a_tiny_model_chooses_by_the_dtype_of_its_cache() -> None:
    """As `tests/e2e/test_chosen_blocks.py` counts on."""
    directory = checkpoint("qwen3-next")
    config = EngineConfig(model=str(directory), dtype="float32", kv_cache="64MiB", max_model_len=1024)
    found = {
        kv_dtype: read_model_card(replace(config, kv_dtype=kv_dtype), directory, identify=False).layout.block_size
        for kv_dtype in ("float32", "int8")
    }
    assert found == {"float32": 64, "int8": 128}
