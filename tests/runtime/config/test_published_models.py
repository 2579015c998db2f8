"""Published geometries are planned without waste, and `headwise info` tells of each without its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwise.cache_controller.planner import plan_head_groups
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.info import describe
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.models.base import valid_tp_sizes
from headwise.runtime.models.registry import model_config

PUBLISHED = sorted((Path(__file__).parents[2] / "support" / "published").glob("*.json"))


@pytest.fixture(params=PUBLISHED, ids=lambda path: path.stem)
def published(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_padding_is_small_for_all_ranks_that_divide_the_heads(published: Path) -> None:
    model = model_config(json.loads(published.read_text()))
    sizes = [size for size in valid_tp_sizes(model) if size <= 8]
    assert sizes[:2] == [1, 2]
    for size in sizes:
        assert plan_head_groups(model.policies, size).padding <= 0.05


def test_info_describes_the_cache(published: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(published.read_bytes())
    config = EngineConfig(model=str(tmp_path), kv_cache="64GiB")
    card = read_model_card(config, tmp_path, identify=False)
    rows = dict(describe(config, card, tmp_path, [8192]))
    model = card.config
    heads = f"{model.num_heads} query and {model.num_kv_heads} KV heads of {model.head_dim}"
    assert rows["geometry"] == f"{model.num_layers} layers, {heads}"
    assert "padding" in rows["head groups"]
    windows = {policy.window for row in model.policies for policy in row if not policy.is_full}
    for window in windows:
        assert any(f"window of {window}" in value for value in rows.values())


def test_windows_of_every_other_layer_are_those_that_are_published() -> None:
    by_name = {path.stem: model_config(json.loads(path.read_text())) for path in PUBLISHED}
    windows = {name: [row[0].window for row in model.policies[:4]] for name, model in by_name.items()}
    assert windows["gpt-oss-20b"] == [128, 0, 128, 0]
    assert windows["gemma-2-2b"] == [4096, 0, 4096, 0]
    assert windows["phi-3-mini-4k"] == [2047] * 4
    assert windows["qwen2.5-7b"] == windows["qwen3-30b-a3b"] == windows["mixtral-8x7b"] == [0] * 4
    assert by_name["gpt-oss-120b"].moe is not None
    assert (by_name["gpt-oss-120b"].moe.num_experts, by_name["gpt-oss-120b"].sink_logits) == (128, True)
    assert by_name["phi-4-mini"].ropes[0].share == 0.75
