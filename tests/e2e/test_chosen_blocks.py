"""A deployment whose model chooses its block size: scheduler, index, engines of unlike ranks and storage have it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.reference import answers
from support.tiny_checkpoints import checkpoint
from support.waiting import eventually

from headwise import Client, EngineConfig, SamplingParams
from headwise.actors.deployment import Deployment

pytestmark = [pytest.mark.ray, pytest.mark.soak]  # three workers and two deployments for what parts of it show alone

TOKENS, CHOSEN = 8, 128
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


def config_with(storage: Path, **changes: Any) -> EngineConfig:
    """One rank computes prompts, two decode; block_size is not said. In int8, states fit badly beside 64 tokens."""
    return EngineConfig(
        port=0,
        model=str(checkpoint("qwen3-next")),
        prefill_replicas=1,
        decode_replicas=1,
        decode_tp_size=2,
        dtype="float32",
        kv_dtype="int8",
        max_model_len=1024,
        kv_cache="32MiB",
        cpu_threads=1,
        max_batched_tokens=128,
        write_policy="write_through",
        storage=f"file://{storage}?capacity=1GiB",
        prefetch="wait_complete",
        standby=False,
        **changes,
    )


@contextmanager
def serving(config: EngineConfig) -> Iterator[Client]:
    with (
        Deployment.start(config) as deployment,
        Client(deployment.client_address, keys=deployment.client_keys) as client,
    ):
        eventually(lambda: len(client.stats()["engines"]) == 2)
        yield client


def test_all_count_in_blocks_of_the_model_and_storage_is_that_of_who_says_the_same_number(tmp_path: Path) -> None:
    prompt = list(max(answers("qwen3-next"), key=lambda answer: len(answer.prompt_ids)).prompt_ids)
    whole = (len(prompt) - 1) // CHOSEN * CHOSEN
    config = config_with(tmp_path)
    assert config.block_size == "auto"
    with serving(config) as client:
        first = client.generate(prompt, GREEDY)
        engines = client.stats()["engines"]
        assert {engine["cache"]["smallest_reusable_prefix"] for engine in engines.values()} == {CHOSEN}
        assert {engine["tp_size"] for engine in engines.values()} == {1, 2}

        def known() -> int:
            """Tokens of the prompt that the index says some engine has."""
            return max((max(held.values()) for held in client.find_prefix(prompt)["engines"].values()), default=0)

        eventually(lambda: known() == whole, otherwise=known)
        again = client.generate(prompt, GREEDY)
        assert (again.token_ids, again.usage.cached_tokens) == (first.token_ids, whole)

        salts = itertools.count()

        def fetched() -> int:
            """Tokens that engines have from each other."""
            return sum(engine["peers"]["hit_tokens"] for engine in client.stats()["engines"].values())

        def fetches() -> bool:
            """Whether the engine that decodes asks the other one, which it does once they know of each other."""
            assert client.generate(prompt, GREEDY, cache_salt=str(next(salts))).token_ids == first.token_ids
            return fetched() > 0

        eventually(fetches)
        assert fetched() % CHOSEN == 0
    with serving(replace(config, block_size=CHOSEN)) as client:
        result = client.generate(prompt, GREEDY)
        assert (result.token_ids, result.usage.cached_tokens) == (first.token_ids, whole)
