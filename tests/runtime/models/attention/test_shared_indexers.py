"""Layers that share an indexer: who keeps keys of it, how often it chooses, and what deployments have none of it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine.loaded_model import GREEDY, LoadedModel, serve
from support.reference import Answer, answers, assert_same
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint

from headwise.errors import ConfigError
from headwise.kernels.cpu.dsa_attention import NumbaIndexedKernels
from headwise.kernels.dsa import index_view
from headwise.kernels.dsa_reference import ReferenceIndexedKernels
from headwise.kernels.mla import latent_view
from headwise.runtime.config.block_storage import storage_namespace
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.info import describe
from headwise.runtime.config.model_card import ModelCard, read_model_card

NAME = "glm5-shared"
"""Four layers, of which the first and the third have an indexer."""
PUBLISHED = Path(__file__).parents[3] / "support" / "published"


def one_answer(tokens: int) -> Answer:
    """To a prompt of more tokens than are chosen."""
    return next(answer for answer in answers(NAME) if answer.name == "more").first(tokens)


def test_only_layers_with_an_indexer_keep_keys_of_a_token_and_nothing_else_is_touched() -> None:
    """After a prompt, of a poisoned arena: as many numbers as layers keep of its tokens."""
    loaded, answer = LoadedModel(NAME), one_answer(1)
    engine, executor = loaded.engine(prefix_caching=False)
    serve(engine, loaded.preprocessor, [answer], {answer.name: replace(GREEDY, max_tokens=1)})
    arena, card, tokens = loaded.worker.served.runner.cache.arena, loaded.worker.card, len(answer.prompt_ids)
    assert [role.name for layout in card.layouts for role in layout.roles] == ["latent"] * 4 + ["indexer"] * 2
    assert int(np.isfinite(latent_view(arena, card.layouts[3])).sum()) == 4 * (48 + 16) * tokens
    assert int(np.isfinite(index_view(arena, card.layouts[5])).sum()) == 2 * 32 * tokens
    assert int(np.isfinite(arena.view(np.float32)).sum()) == (4 * (48 + 16) + 2 * 32) * tokens
    executor.close()


@pytest.mark.parametrize(("name", "kernels"), [("reference", ReferenceIndexedKernels), ("numba", NumbaIndexedKernels)])
def test_in_each_step_an_indexer_chooses_once_for_all_layers_that_see_it(
    name: str, kernels: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def watch(method: str) -> None:
        whole = getattr(kernels, method)

        def call(self: Any, *given: Any, **more: Any) -> Any:
            calls[method] += 1
            return whole(self, *given, **more)

        monkeypatch.setattr(kernels, method, call)

    watch("choose")
    watch("attend_chosen")
    loaded, answer = LoadedModel(NAME, kernels=name), one_answer(8)
    engine, executor = loaded.engine()
    calls.clear()  # of what is run to warm up
    found = serve(engine, loaded.preprocessor, [answer], {answer.name: replace(GREEDY, max_tokens=8)})
    assert_same(answer, found[answer.name].token_ids)
    assert calls["choose"] >= 2 * 8
    assert calls["attend_chosen"] == 2 * calls["choose"]
    assert loaded.worker.served.attention._chosen is None, "nothing is held behind the last layer that sees it"
    executor.close()


def card_of(directory: Path, config: dict[str, Any], **changes: Any) -> tuple[EngineConfig, ModelCard]:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    given = EngineConfig(model=str(directory), kv_cache="64GiB", dtype="bfloat16", device="cpu", **changes)
    return given, read_model_card(given, directory, identify=False)


@pytest.mark.parametrize(
    ("name", "fields"),
    [("hy4-preview", {}), ("glm-5", {"index_topk_freq": 4, "index_skip_topk_offset": 3})],
    ids=["hunyuan 4", "glm-5.2"],
)
@pytest.mark.parametrize(("kv_dtype", "latent", "key"), [("bfloat16", 1152, 256), ("float8_e4m3fn", 644, 132)])
def test_info_of_published_models_says_what_a_token_takes(
    tmp_path: Path, name: str, fields: dict[str, Any], kv_dtype: str, latent: int, key: int
) -> None:
    """Of 78 layers, 21 have an indexer."""
    published = json.loads((PUBLISHED / f"{name}.json").read_text())
    config, card = card_of(tmp_path, {**published, **fields}, kv_dtype=kv_dtype)
    assert card.bytes_per_token == 78 * latent + 21 * key
    rows = dict(describe(config, card, tmp_path, [8192]))
    assert rows["head groups"] == "1 x 99 slots per rank (auto, padding 0.0%)"
    assert rows["  group 0"].startswith("full attention, 78 layers' latents and keys of 21 layers' indexers, ")
    _, all_own = card_of(tmp_path, {**published, "indexer_types": ["full"] * 78}, kv_dtype=kv_dtype)
    assert all_own.bytes_per_token == 78 * (latent + key)


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_of_a_published_model_pad_what_others_have_more_of(tmp_path: Path, stages: int) -> None:
    published = json.loads((PUBLISHED / "glm-5.json").read_text())
    fields = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    _, card = card_of(tmp_path, {**published, **fields}, pipeline_parallel_size=stages)
    assert all(stage.start in (0, 1, *range(2, 78, 4)) for stage in card.plan.stages)
    assert card.plan.padding < 0.08
    assert len(card.plan.groups) == 1


def test_blocks_with_keys_in_every_layer_are_not_taken_for_blocks_without(tmp_path: Path) -> None:
    tiny = TINY_CONFIGS[NAME]
    (_, shared), (_, own) = (
        card_of(tmp_path / kinds, {**tiny, "indexer_types": ["full", kinds] * 2}) for kinds in ("shared", "full")
    )
    names = [storage_namespace(replace(card, identity="a model"), 0).layout for card in (shared, own)]
    assert names[0] != names[1]
    assert shared.layout_identity != own.layout_identity


def test_head_patterns_are_refused() -> None:
    directory = checkpoint(NAME)
    with pytest.raises(ConfigError, match=r"layers share an indexer.*no head pattern.*serve it without"):
        read_model_card(
            EngineConfig(model=str(directory), device="cpu", head_pattern="any.tsv"), directory, identify=False
        )
