"""GGUF files of models with experts, latents, states and shared caches are served: their tokens are transformers'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.engine.loaded_model import GREEDY, LoadedModel
from support.reference import answers, assert_same
from support.tiny_ggufs import (
    K_QUANTS,
    TINY_GGUFS,
    experts_in_k_quants,
    random_k_blocks,
    random_k_numbers,
    write_tiny_gguf,
)

from headwise.runtime.loader.block_file import EXPERTS, BlockFile
from headwise.runtime.loader.resolve import resolve_model


@pytest.mark.parametrize("name", [name for name, tiny in TINY_GGUFS.items() if tiny.changes is None])
def test_a_gguf_file_is_served_with_the_tokens_of_its_model(name: str, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", TINY_GGUFS[name])
    loaded = LoadedModel(str(path), kv_cache="24MiB", cache_dir=str(tmp_path / "cache"))
    wanted = [answer.first(16) for answer in answers(TINY_GGUFS[name].checkpoint) if len(answer.prompt_ids) < 250]
    results, _ = loaded.run(wanted, {answer.name: replace(GREEDY, max_tokens=16) for answer in wanted})
    for answer in wanted:
        assert_same(answer, results[answer.name].token_ids)


def test_experts_in_k_quants_are_computed_from_as_they_are(tmp_path: Path) -> None:
    """`Q4_K` and `Q6_K`, as the same numbers in float32, but for scales, which are rounded to float16, and for other
    matrices, which are bfloat16 then: that moves what is likeliest by 0.06.
    """
    packed = write_tiny_gguf(tmp_path / "k.gguf", K_QUANTS, experts_in_k_quants, random_k_blocks)
    floats = write_tiny_gguf(tmp_path / "f.gguf", K_QUANTS, encode=random_k_numbers)
    prompts = [answer for answer in answers("qwen3-moe") if 8 < len(answer.prompt_ids) < 250]
    greedy = {answer.name: replace(GREEDY, max_tokens=4, logprobs=0) for answer in prompts}
    said = []
    for path, weights_dtype in ((packed, "gguf"), (floats, "float32")):
        given = {"weights_dtype": weights_dtype, "kv_cache": "24MiB"}
        loaded = LoadedModel(str(path), cache_dir=str(tmp_path / path.stem), **given)
        said.append(loaded.run(prompts, greedy)[0])
    directory = resolve_model(str(packed), tmp_path / "k")
    assert {*BlockFile(directory / EXPERTS).kinds.values()} == {"Q4_K", "Q6_K"}
    for answer in prompts:
        found, expected = (results[answer.name] for results in said)
        assert found.token_ids[0] == expected.token_ids[0]
        assert found.logprobs[0].chosen == pytest.approx(expected.logprobs[0].chosen, abs=0.1)
