"""Which layers a stage of a pipeline has, what storage calls its blocks, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.drafting_checkpoints import drafting_checkpoint
from support.eagle_checkpoints import head_checkpoint
from support.tiny_checkpoints import checkpoint

from headwise.errors import ConfigError
from headwise.runtime.config.block_storage import storage_namespace
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard, read_model_card
from headwise.runtime.config.peer_blocks import check_exchanges, exchange_with, exchange_with_ranks, identity_of_blocks
from headwise.runtime.config.threads import threads_per_worker
from headwise.runtime.models.shard import Shard

PUBLISHED = Path(__file__).parents[2] / "support" / "published"


def config_of(directory: Path, stages: int, **options: Any) -> EngineConfig:
    given = {"model": str(directory), "dtype": "float32", "kv_cache": "24MiB", "pipeline_parallel_size": stages}
    return EngineConfig(**{**given, **options})


def card_of(directory: Path, stages: int, **options: Any) -> ModelCard:
    return read_model_card(config_of(directory, stages, **options), directory)


@pytest.mark.parametrize("given", [0, -1, 65])
def test_a_number_of_stages_that_makes_no_sense_is_refused(given: int) -> None:
    with pytest.raises(ConfigError, match=f"pipeline_parallel_size must be from 1 to 64, got {given}"):
        EngineConfig(pipeline_parallel_size=given)


def test_stages_are_a_whole_number() -> None:
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size must be int, got 2\.0"):
        EngineConfig(pipeline_parallel_size=2.0)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="pipeline_parallel_size 4 is too much: 3 layers can be dealt to 3 stages at most"
    ):
        card_of(checkpoint("qwen3"), 4)


def test_layers_with_embeddings_of_their_own_are_not_dealt() -> None:
    with pytest.raises(
        ConfigError, match=r"^pipeline_parallel_size 2: each layer has an embedding of every token; leave it out$"
    ):
        card_of(checkpoint("gemma4-shared"), 2)
    assert card_of(checkpoint("gemma4-shared"), 1).plan.ranks == 1


def test_a_draft_model_is_refused() -> None:
    options = {"draft_model": str(head_checkpoint("qwen3")), "speculation": 3}
    with pytest.raises(ConfigError, match=r"^pipeline_parallel_size 2: draft_model drafts by .*; leave it out$"):
        card_of(checkpoint("qwen3"), 2, **options)
    assert card_of(checkpoint("qwen3"), 1, **options).plan.ranks == 1


def test_ranks_of_a_stage_must_fit_the_heads_as_those_of_an_engine_do() -> None:
    with pytest.raises(ConfigError, match=r"tp_size 3 does not divide the 2 key heads .*; sizes that fit: \[1, 2\]$"):
        card_of(checkpoint("qwen3-next"), 2, tp_size=3)  # states, of which each rank has equally many


def test_tokens_are_kept_together_by_ranks_of_one_stage() -> None:
    with pytest.raises(ConfigError, match=r"context_parallel_size 2 does not divide tp_size 1$"):
        config_of(checkpoint("deepseek-v3"), 2, context_parallel_size=2)
    card = card_of(checkpoint("deepseek-v3"), 2, context_parallel_size=2, tp_size=2)
    assert (card.token_parts, card.plan.ranks) == (2, 4)


@pytest.mark.parametrize(("stages", "layers"), [(1, [(0, 3)]), (2, [(0, 2), (2, 3)]), (3, [(0, 1), (1, 2), (2, 3)])])
def test_stages_have_their_layers_in_order(stages: int, layers: list[tuple[int, int]]) -> None:
    card = card_of(checkpoint("qwen3"), stages)
    assert [(stage.start, stage.stop) for stage in card.plan.stages] == layers
    assert card.plan.stages == card.config.stages(stages)


def test_layers_that_draft_are_with_the_last_one_of_the_decoder() -> None:
    directory = drafting_checkpoint("deepseek-v3")
    card = card_of(directory, 3, speculation=3)
    assert card.config.draft_layers == 1
    assert [(stage.start, stage.stop) for stage in card.plan.stages] == [(0, 1), (1, 2), (2, 4)]
    with pytest.raises(ConfigError, match="pipeline_parallel_size 4 is too much: 4 layers can be dealt to 3 stages"):
        card_of(directory, 4, speculation=3)


def test_a_shard_knows_its_stage_s_layers_and_its_place_among_the_stage_s_ranks() -> None:
    card = card_of(checkpoint("deepseek-v3"), 2, tp_size=2)
    shards = [Shard.of(card.config, card.plan, rank) for rank in range(4)]
    assert [(shard.rank, shard.size) for shard in shards] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [shard.layers(card.config) for shard in shards] == [range(2)] * 2 + [range(2, 3)] * 2
    assert [shard.is_first(card.config) for shard in shards] == [True, True, False, False]
    assert [shard.is_last(card.config) for shard in shards] == [False, False, True, True]


def test_the_one_stage_of_an_engine_is_first_and_last() -> None:
    card = card_of(checkpoint("qwen3"), 1)
    shard = Shard.of(card.config, card.plan, 0)
    assert (shard.stage, shard.layers(card.config)) == (None, range(3))
    assert shard.is_first(card.config)
    assert shard.is_last(card.config)


def test_ranks_threads_and_steps_are_counted_over_all_stages() -> None:
    config = EngineConfig(tp_size=2, pipeline_parallel_size=3, replicas=2)
    assert (config.ranks, config.first_ranks, config.steps_in_flight) == (6, 12, 4)
    assert replace(config, async_scheduling=False).steps_in_flight == 1
    assert config.prefill_chunk == EngineConfig().prefill_chunk
    assert config.tokens_in_flight == 4 * config.prefill_chunk
    assert threads_per_worker(replace(config, engine_cpus=1.0)) == 1
    assert config.of_ranks(2).ranks == 6


def test_a_rank_s_pool_holds_as_many_more_tokens_as_there_are_stages() -> None:
    """Each has its layers' part of every block: of equally many layers, half as many bytes a token."""
    name = "gemma2"  # four layers
    one, two = (card_of(checkpoint(name), stages, block_size=16, max_model_len=512) for stages in (1, 2))
    assert two.layout.block_bytes * 2 == one.layout.block_bytes
    assert [two.spec.num_blocks, len(two.plan.groups)] == [2 * one.spec.num_blocks, len(one.plan.groups)]
    assert two.bytes_per_token == one.bytes_per_token, "over all ranks"


@pytest.mark.parametrize(
    ("name", "stages", "sizes"),
    [
        ("deepseek-v3", 4, [16, 15, 15, 15]),
        ("kimi-k2", 2, [31, 30]),
        ("gemma-3-27b", 8, [8] * 6 + [7] * 2),
        ("qwen3-next-80b-a3b", 2, [24, 24]),
    ],
)
def test_layers_of_large_models_are_dealt_equally(name: str, stages: int, sizes: list[int], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((PUBLISHED / f"{name}.json").read_bytes())
    config = config_of(tmp_path, stages, dtype="bfloat16", kv_cache="40GiB")
    plan = read_model_card(config, tmp_path, identify=False).plan
    assert [len(stage) for stage in plan.stages] == sizes
    assert plan.padding < 0.15, "empty slots, most of them of stages with a layer less"


def namespaces(stages: int, tp_size: int, name: str = "gemma2") -> list[Any]:
    card = card_of(checkpoint(name), stages, tp_size=tp_size, block_size=16)
    return [storage_namespace(card, rank) for rank in range(card.plan.ranks)]


def test_storage_keeps_blocks_of_other_stages_and_ranks_apart() -> None:
    """Two stages of a rank, and two ranks of a stage: of as many ranks, and equally large blocks."""
    staged, parallel = namespaces(2, 1), namespaces(1, 2)
    assert [each.tp_rank for each in staged] == [each.tp_rank for each in parallel] == [0, 1]
    assert len({each.tp_size for each in (*staged, *parallel)}) == 1
    found = [*staged, *parallel, *namespaces(1, 1), *namespaces(2, 2), *namespaces(4, 1), *namespaces(1, 4)]
    assert len({*found}) == len(found) == 17
    assert len({each.model for each in found}) == 1, "whose keys and values are the same"
    assert namespaces(2, 1) == staged


def test_engines_of_stages_exchange_blocks_with_those_of_other_tp_sizes() -> None:
    directory = checkpoint("gemma2")
    config = config_of(directory, 2, tp_size=1, decode_tp_size=2, replicas=2, block_size=16)
    card = read_model_card(config, directory)
    check_exchanges(config, card)
    exchange = exchange_with(config, card, 2)
    assert exchange.owner_ranks == 4
    owners = [{*exchange.pieces(rank)[:, 2].tolist()} for rank in range(card.plan.ranks)]
    assert owners == [{0, 1}, {2, 3}], "each stage's ranks take of the same stage's"
    assert [exchange_with_ranks(config, card, ranks).owner_ranks for ranks in (2, 4)] == [2, 4]
    with pytest.raises(ValueError, match="3 ranks are not those of 2 stages"):
        exchange_with_ranks(config, card, 3)
    with pytest.raises(ConfigError, match="engines have 1 or 2 ranks each, got 3"):
        exchange_with_ranks(config, card, 6)


def test_engines_of_other_stages_read_no_blocks_of_each_other() -> None:
    """They take each other's members to lie where their own do, of as many tensor-parallel ranks."""
    directory = checkpoint("gemma2")
    found = {
        identity_of_blocks(config, read_model_card(config, directory))
        for config in (config_of(directory, stages, block_size=16) for stages in (1, 2, 2, 4))
    }
    assert len(found) == 3
