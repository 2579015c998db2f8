"""The tokens of tensor-parallel ranks are those of a single one, whatever layers keep and however ranks share it.

Latents are on every rank, and query heads are dealt out; states are dealt out by key heads. Where there are more ranks
than KV heads, as many keep each, and deal out its query heads.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.engine.dense_oracle import run_rank
from support.engine.loaded_model import BASE, GREEDY, serve
from support.engine.ranks import Ranks
from support.reference import CLOSE, answers, assert_same
from support.tiny_checkpoints import checkpoint, reference, write_checkpoint

from headwise.runtime.config.block_storage import open_lookup
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.models.registry import model_config
from headwise.runtime.ops.comm import SingleRank

WHOLE = ("gemma4-shared", "gemma4-moe", "deepseek-v3.2", "deepseek-v4")
"""Whose layers ranks compute operation by operation: those of others in a few calls."""


def run_twice(name: str, size: int, **changes: object) -> list[np.ndarray]:
    """Serve the references' prompts twice, chunked and batched, compare tokens, and return the ranks' arenas."""
    directory = checkpoint(name)
    config = replace(
        BASE, model=str(directory), kv_cache="24MiB", tp_size=size, max_batched_tokens=256, cpu_threads=1, **changes
    )
    ranks, preprocessor = Ranks(config, directory), Preprocessor.open(config)
    card, executor = preprocessor.card, LocalExecutor(ranks)
    engine = EngineCore(config, card, preprocessor.tokenizer, executor, lookup=open_lookup(config, card))
    wanted, tokens = [answer.first(12) for answer in answers(name)], replace(GREEDY, max_tokens=12)
    for _ in range(2):
        results = serve(engine, preprocessor, wanted, {answer.name: tokens for answer in wanted})
        for answer in wanted:
            assert_same(answer, results[answer.name].token_ids)
    assert engine.stats()["cache"]["hit_tokens"] > 1000
    executor.close()
    assert [worker.served.model._fused is not None for worker in ranks.workers] == [name not in WHOLE] * size
    return [worker.served.runner.cache.arena.view(np.float32) for worker in ranks.workers]


@pytest.mark.parametrize(
    ("name", "size"), [("deepseek-v2", 2), ("deepseek-v3", 4), ("deepseek-v3.2", 2), ("deepseek-v4", 2)]
)
def test_ranks_say_the_reference_tokens_whole_chunked_batched_and_cached_twice(name: str, size: int) -> None:
    arenas = run_twice(name, size)
    for arena in arenas[1:]:
        np.testing.assert_allclose(arena, arenas[0], rtol=0, atol=1e-5)  # and NaN where nothing was written


@pytest.mark.parametrize(("name", "block_size"), [("qwen3-next", 16), ("qwen3.5", 64), ("qwen3.5-moe", 16)])
def test_ranks_that_share_states_out_say_the_reference_tokens(name: str, block_size: int) -> None:
    run_twice(name, 2, block_size=block_size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_that_share_states_out_beside_latents_that_all_have_say_the_reference_tokens(size: int) -> None:
    run_twice("kimi-linear", size, block_size=16)


@pytest.mark.parametrize("name", ["gemma4", "gemma4-shared"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_ranks_with_heads_of_two_sizes_say_the_reference_tokens(name: str, block_size: int) -> None:
    run_twice(name, 2, block_size=block_size)


def test_ranks_that_see_chunks_say_the_reference_tokens() -> None:
    run_twice("llama4", 2, block_size=16)


@pytest.mark.parametrize(
    "name",
    [
        "gpt-oss",  # windows, biases, and a learned sink for each query head
        "gemma4",  # two full heads that are shared beside four windowed ones that are not
        "mimo-v2",  # one full head beside two windowed ones, values smaller than keys, sinks of some layers
        pytest.param("qwen2", marks=pytest.mark.soak),
        pytest.param("gemma4-shared", marks=pytest.mark.soak),
        pytest.param("gemma4-moe", marks=pytest.mark.soak),
        pytest.param("llama4", marks=pytest.mark.soak),
    ],
)
def test_four_ranks_that_share_two_heads_say_the_reference_tokens(name: str) -> None:
    run_twice(name, 4, block_size=16)


@pytest.mark.parametrize(
    "name",
    [
        "gpt-oss",  # windows, biases, a learned sink for each query head, experts that three ranks do not divide
        "deepseek-v3",  # latents, all of which each has
        pytest.param("qwen3", marks=pytest.mark.soak),  # normed queries and keys
        pytest.param("qwen2", marks=pytest.mark.soak),
        pytest.param("gemma4-shared", marks=pytest.mark.soak),
        pytest.param("llama4", marks=pytest.mark.soak),
        pytest.param("deepseek-v3.2", marks=pytest.mark.soak),
        "deepseek-v4",  # parts of heads that are projected together, which three ranks cut
    ],
)
def test_three_ranks_that_share_four_query_heads_unequally_say_the_reference_tokens(name: str) -> None:
    run_twice(name, 3, block_size=16)


def test_ranks_that_share_a_head_have_all_of_it_each() -> None:
    arenas = run_twice("qwen3", 4)
    for rank in (1, 3):
        np.testing.assert_allclose(arenas[rank], arenas[rank - 1], rtol=0, atol=1e-5)
    assert not np.allclose(arenas[0], arenas[2], rtol=0, atol=1e-2, equal_nan=True)


@pytest.mark.soak
@pytest.mark.model
def test_four_ranks_that_share_the_one_head_of_a_real_model_say_the_reference_tokens() -> None:
    """And cut the blocks of its GGUF file, whose scales are rounded: of two tokens about as likely, either comes."""
    config = replace(BASE, model="gemma3-270m", tp_size=4, weights_dtype="gguf", packed_cache=False, cpu_threads=1)
    ranks = Ranks(config, resolve_model(config.model, config.cache_path))
    preprocessor, executor = Preprocessor.open(config), LocalExecutor(ranks)
    engine = EngineCore(config, preprocessor.card, preprocessor.tokenizer, executor)
    short = (answer.first(16) for answer in answers(config.model) if len(answer.prompt_ids) <= 200)
    wanted = [answer for answer in short if min(answer.gaps) > 10 * CLOSE]
    assert len(wanted) > 2
    results = serve(engine, preprocessor, wanted, {answer.name: replace(GREEDY, max_tokens=16) for answer in wanted})
    for answer in wanted:
        assert_same(answer, results[answer.name].token_ids)
    executor.close()


def one_kv_head_and_four_key_heads(directory: Path, query_heads: int) -> Path:
    """A model as qwen3.5, with more heads of delta-nets and fewer of attention."""
    known = reference("qwen3.5")
    config = {
        **known["config"],
        "num_key_value_heads": 1,
        "linear_num_key_heads": 4,
        "num_attention_heads": query_heads,
    }
    shapes, keys = dict(known["shapes"]), 2 * 2 * config["linear_key_head_dim"]
    for name, (rows, *others) in shapes.items():
        if name.endswith((".in_proj_qkv.weight", ".conv1d.weight")):
            shapes[name] = [rows + keys, *others]
        elif name.endswith((".k_proj.weight", ".v_proj.weight")):
            shapes[name] = [rows // 2, *others]
        elif name.endswith(".q_proj.weight"):
            shapes[name] = [rows * query_heads // 4, *others]
        elif name.endswith(".o_proj.weight"):
            shapes[name] = [rows, others[0] * query_heads // 4]
    return write_checkpoint(directory, config, shapes)


def assert_likeliest(directory: Path, prompt: list[int], output: list[int]) -> None:
    """Of one rank's dense attention, as far as its two best logits lie apart."""
    config = model_config(json.loads((directory / "config.json").read_text()))
    ids = np.array(prompt + output[:-1], np.int32)
    logits = run_rank(config, Checkpoint(directory), SingleRank(), ids)
    assert logits is not None
    best = np.sort(logits[len(prompt) - 1 :], axis=1)[:, -2:]
    close = np.flatnonzero(best[:, 1] - best[:, 0] < CLOSE)
    judged = int(close[0]) if len(close) else len(output)
    assert judged > 4
    assert logits[len(prompt) - 1 :].argmax(axis=1).tolist()[:judged] == output[:judged]


@pytest.mark.parametrize(
    ("size", "query_heads"),
    [pytest.param(2, 4, marks=pytest.mark.soak), pytest.param(4, 4, marks=pytest.mark.soak), (4, 7)],
)
def test_ranks_that_have_states_of_their_own_may_share_a_kv_head(tmp_path: Path, size: int, query_heads: int) -> None:
    """Also one whose query heads, with gates of their own, they do not divide."""
    directory = one_kv_head_and_four_key_heads(tmp_path, query_heads)
    config = replace(BASE, model=str(directory), block_size=16, kv_cache="24MiB", tp_size=size, cpu_threads=1)
    ranks, preprocessor = Ranks(config, directory), Preprocessor.open(config)
    plan, executor = preprocessor.card.plan, LocalExecutor(ranks)
    assert [plan.sharing(rank)[3] for rank in range(size)] == [(rank, size) for rank in range(size)]
    assert [head for rank in range(size) for head in plan.kv_heads(rank)[0]] == [0, 1, 2, 3]
    engine = EngineCore(config, preprocessor.card, preprocessor.tokenizer, executor)
    prompts = [answer for answer in answers("qwen3.5") if 8 < len(answer.prompt_ids) < 500]
    params = {answer.name: replace(GREEDY, max_tokens=16) for answer in prompts}
    for _ in range(2):
        results = serve(engine, preprocessor, prompts, params)
        for answer in prompts:
            assert_likeliest(directory, answer.prompt_ids, list(results[answer.name].token_ids))
    assert engine.stats()["cache"]["hit_tokens"] > 300
    executor.close()
