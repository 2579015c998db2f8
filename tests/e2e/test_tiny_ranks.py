"""Two ranks of every tiny model say the reference's tokens, in blocks of 16 and 64, and after host and file tiers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from support.engine.given_guesses import GivenGuesses
from support.engine.loaded_model import BASE, GREEDY, TINY_KINDS, serve
from support.engine.ranks import Ranks
from support.reference import Answer, answers, assert_same
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint
from support.waiting import PATIENCE_S

from headwise.runtime.config.block_storage import open_lookup
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.frontend.preprocessor import Preprocessor

TOKENS = 24
ALSO_ON_OTHER_RANKS = {
    "deepseek-v2", "deepseek-v3", "deepseek-v3.2", "qwen3-next", "qwen3.5", "qwen3.5-moe", "gemma4", "gemma4-shared",
    "llama4",
}  # fmt: skip
"""Those that `test_tiny_models_on_ranks` runs, too: here they are for the soak."""


def cases() -> list[ParameterSet]:
    """Every model with blocks of 16 and of 64 tokens, one of which is for the soak, by turns; and so are models whose
    caches are of another one's kind: how weights are dealt to ranks, `test_models_tiny` shows of all.
    """
    found, kinds = [], {kind.values[0]: kind for kind in TINY_KINDS}
    for index, name in enumerate(TINY_CONFIGS):
        for block_size in (16, 64):
            is_second = (block_size == 64) == (index % 2 == 0)
            marks = [pytest.mark.soak] if is_second or name in ALSO_ON_OTHER_RANKS else kinds[name].marks
            found.append(pytest.param(name, block_size, marks=marks))
    return found


@contextmanager
def two_ranks(name: str, **changes: object) -> Iterator[tuple[EngineCore, Preprocessor]]:
    directory = checkpoint(name)
    sizes = {"kv_cache": "24MiB", "tp_size": 2, "max_batched_tokens": 256, "cpu_threads": 1}
    config = replace(BASE, model=str(directory), **sizes, **changes)
    preprocessor, executor = Preprocessor.open(config), LocalExecutor(Ranks(config, directory))
    card = preprocessor.card
    try:
        yield EngineCore(config, card, preprocessor.tokenizer, executor, lookup=open_lookup(config, card)), preprocessor
    finally:
        executor.close()


def assert_said(engine: EngineCore, preprocessor: Preprocessor, wanted: list[Answer]) -> None:
    sampling = {each.name: replace(GREEDY, max_tokens=len(each.output_ids)) for each in wanted}
    results = serve(engine, preprocessor, wanted, sampling)
    for answer in wanted:
        assert_same(answer, results[answer.name].token_ids)


def some_of(name: str, tokens: int = TOKENS) -> list[Answer]:
    return [answer.first(tokens) for answer in answers(name) if len(answer.prompt_ids) <= 300]


@pytest.mark.parametrize(("name", "block_size"), cases())
def test_two_ranks_say_the_reference_tokens_chunked_batched_and_cached_twice(name: str, block_size: int) -> None:
    with two_ranks(name, block_size=block_size) as (engine, preprocessor):
        for _ in range(2):
            assert_said(engine, preprocessor, some_of(name))
        assert engine.stats()["cache"]["hit_tokens"] > 300


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "gemma2",
        "gpt-oss",
        "llama4",
        "gemma4-shared",
        "deepseek-v3.2",
        "deepseek-v4",
        "hunyuan4",
        "qwen3-next",
        "kimi-linear",
        "mimo-v2",
    ],
)
def test_two_ranks_say_the_reference_tokens_from_the_host_and_from_a_directory(name: str, tmp_path: Path) -> None:
    tiers = {
        "block_size": 16,
        "host_cache": "24MiB",
        "storage": f"file://{tmp_path}?capacity=1GiB",
        "write_policy": "write_through",
        "prefetch": "wait_complete",
        "load_timeout_s": PATIENCE_S,
        "storage_timeout_s": PATIENCE_S,
    }
    wanted = some_of(name, tokens=16)
    with two_ranks(name, **tiers) as (engine, preprocessor):
        assert_said(engine, preprocessor, wanted)
        engine.cache.reset(("device",))
        assert_said(engine, preprocessor, wanted)
        assert engine.stats()["host"]["loaded_blocks"] > 0
        assert engine.stats()["cache"]["host_hit_tokens"] > 200
    with two_ranks(name, **tiers) as (engine, preprocessor):
        assert_said(engine, preprocessor, wanted)
        assert engine.stats()["storage"]["hit_tokens"] > 200


@pytest.mark.parametrize(
    "name", ["qwen3", "deepseek-v3.2", "deepseek-v4", "hunyuan4", "granite-hybrid-ssm", "kimi-linear"]
)
def test_two_ranks_agree_on_which_guesses_are_right(name: str) -> None:
    wanted = some_of(name)
    with two_ranks(name, block_size=16, speculation=5) as (engine, preprocessor):
        engine.resources.speculator = GivenGuesses({each.name: each.output_ids for each in wanted}, 5)
        assert_said(engine, preprocessor, wanted)
        found = engine.stats()["speculation"]
        assert found["drafted"] > found["accepted"] > 0.4 * found["drafted"]
