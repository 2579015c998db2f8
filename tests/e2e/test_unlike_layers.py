"""Layers whose heads differ in size, and layers that use another one's cache, on ranks, in int8 and in blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.engine.loaded_model import BASE, GREEDY, LoadedModel, serve
from support.reference import answers, assert_same
from support.tiny_checkpoints import checkpoint

from headwise.errors import ConfigError
from headwise.runtime.calibration.calibrate import DenseModel
from headwise.runtime.config.block_storage import storage_namespace
from headwise.runtime.config.model_card import ModelCard, read_model_card
from headwise.runtime.worker.kv_offload import layer_ranges

NAMES = ("gemma4", "gemma4-shared")


def card_of(name: str, **changes: Any) -> ModelCard:
    directory = checkpoint(name)
    return read_model_card(replace(BASE, model=str(directory), kv_cache="24MiB", **changes), directory)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_16_tokens_give_the_same_tokens(name: str) -> None:
    loaded = LoadedModel(name)
    wanted = [answer.first(16) for answer in answers(name)]
    results, engine = loaded.run(wanted, {a.name: replace(GREEDY, max_tokens=16) for a in wanted}, block_size=16)
    for answer in wanted:
        assert_same(answer, results[answer.name].token_ids)
    assert engine.stats()["cache"]["recycled_blocks"] > 0


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("name", NAMES)
def test_scales_make_slots_no_whole_multiples_of_each_other(name: str, kv_dtype: str) -> None:
    assert {layout.tail_bytes > 0 for layout in card_of(name, kv_dtype=kv_dtype).layouts} == {True, False}


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_all_blocks_have_equal_bytes_and_every_layer_is_one_range_of_them(tp_size: int) -> None:
    card = card_of("gemma4-shared", tp_size=tp_size)
    assert len({layout.slot_bytes for layout in card.layouts}) == 2
    assert {layout.block_bytes for layout in card.layouts} == {card.plan.block_bytes}
    for rank in range(tp_size):
        ranges = layer_ranges(card.plan, card.layouts, rank)
        held = (ranges[..., 1] - ranges[..., 0]).sum(axis=1)
        counts = [len(heads) for heads in card.plan.kv_heads(rank)]
        sizes = [layout.slot_bytes for layout in card.layouts]
        assert held.tolist() == [count * size for count, size in zip(counts, sizes, strict=True)]
        assert not held[4:].any()  # the last three use the cache of others
        for group in range(ranges.shape[1]):
            spans = sorted(span for span in ranges[:, group].tolist() if span[1] > span[0])
            assert all(before[1] == after[0] for before, after in pairwise(spans))
            assert spans[-1][1] <= card.layout.block_bytes


def test_layers_that_share_a_cache_cost_nothing_in_it() -> None:
    card = card_of("gemma4-shared")
    members = Counter(member.layer for group in card.plan.groups for rank in group.members for member in rank)
    assert set(members) == {0, 1, 2, 3}
    assert [heads.cache_layer for heads in card.config.layer_heads] == [0, 1, 2, 3, 2, 3, 2]
    assert card.layouts[4] is card.layouts[2]


def test_storage_tells_blocks_of_other_sizes_of_heads_apart() -> None:
    one, other = card_of("gemma4"), card_of("gemma4", kv_dtype="bfloat16")
    assert one.layout_identity.count("+") == 1
    assert storage_namespace(one, 0) != storage_namespace(other, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_grouping": "per_head_index"}, "per_head_index takes layers of equally many heads of one size"),
        ({"tp_size": 3}, "tp_size 3 does not divide the model's 2 or 4 KV heads"),
        ({"head_pattern": "any.json", "sparsity": 0.5}, "unlike heads .*leave head_pattern out"),
    ],
)
def test_what_is_not_served_yet_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        card_of("gemma4", **changes)


def test_there_is_no_head_pattern_of_unlike_layers_to_measure() -> None:
    directory = checkpoint("gemma4")
    with pytest.raises(ConfigError, match="unlike heads"):
        DenseModel.load(replace(BASE, model=str(directory), kv_cache="24MiB"), directory)


def test_what_an_arena_holds_of_a_layer_is_there_and_nothing_else() -> None:
    """After a prompt, of a poisoned arena: as many numbers as layers keep of its tokens."""
    loaded = LoadedModel("gemma4-shared")
    answer = next(answer for answer in answers("gemma4-shared") if answer.name == "few").first(1)
    engine, executor = loaded.engine(prefix_caching=False)
    serve(engine, loaded.preprocessor, [answer], {answer.name: replace(GREEDY, max_tokens=1)})
    arena, heads = loaded.worker.served.runner.cache.arena.view(np.float32), loaded.worker.card.config.layer_heads
    kept = sum(2 * each.kv_heads * each.head_dim for layer, each in enumerate(heads) if each.cache_layer == layer)
    assert int(np.isfinite(arena).sum()) == kept * len(answer.prompt_ids)
    executor.close()
