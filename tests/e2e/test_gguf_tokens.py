"""GGUF files of models with experts, latents, states and shared caches are served: their tokens are transformers'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.engine.loaded_model import GREEDY, LoadedModel
from support.reference import answers, assert_same
from support.tiny_ggufs import TINY_GGUFS, write_tiny_gguf


@pytest.mark.parametrize("name", [name for name, tiny in TINY_GGUFS.items() if tiny.changes is None])
def test_a_gguf_file_is_served_with_the_tokens_of_its_model(name: str, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", TINY_GGUFS[name])
    loaded = LoadedModel(str(path), kv_cache="24MiB", cache_dir=str(tmp_path / "cache"))
    wanted = [answer.first(16) for answer in answers(TINY_GGUFS[name].checkpoint) if len(answer.prompt_ids) < 250]
    results, _ = loaded.run(wanted, {answer.name: replace(GREEDY, max_tokens=16) for answer in wanted})
    for answer in wanted:
        assert_same(answer, results[answer.name].token_ids)
