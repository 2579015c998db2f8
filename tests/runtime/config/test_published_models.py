"""Published geometries are planned without waste, and `headwise info` tells of each without its weights."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headwise.cache_controller.head_groups import HeadGroupPlan
from headwise.cache_controller.planner import plan_head_groups
from headwise.cache_controller.policy import STATE
from headwise.runtime.config.block_size import choose_block_size
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.info import describe
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.models.attention.base import Serving
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.registry import drafting_config, model_config
from headwise.runtime.models.shard import Shard, valid_tp_sizes
from headwise.units import format_bytes

PUBLISHED = sorted((Path(__file__).parents[2] / "support" / "published").glob("*.json"))


@pytest.fixture(params=PUBLISHED, ids=lambda path: path.stem)
def published(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


EVERY = [1, 2, 3, 4, 5, 6, 7, 8]


def sizes_up_to_eight(model: ModelConfig) -> list[int]:
    """Those that divide all KV heads or are more, divide members of states, and that have a query head each."""
    members = 0 if model.states is None else model.states.members
    return [
        size
        for size in EVERY
        if size <= model.num_heads
        and not members % size
        and all(count % size == 0 or size > count for count in model.kv_head_counts)
    ]


FOUR_RANKS = ("granite-4.0-h-tiny",)
"""Its 48 heads with states are 12 members."""

MOST_PADDING = 0.05
NO_BETTER = {("qwen3.5-27b", 8): 0.07, ("kimi-linear-48b-a3b", 8): 0.052}
"""Models, and their ranks, whose states and heads fit no better into blocks of the same bytes, of any number of tokens
that is a power of two."""
MORE_PADDING = {
    **NO_BETTER,
    **{("nemotron-nano-9b-v2", ranks): 0.31 for ranks in (4, 8)},
}
"""Those of which blocks of so many tokens do not
suit all numbers of ranks: with 80 x 128 numbers of a head's state, 128 tokens would suit four, and 512 eight."""


def plan_of(path: Path, tp_size: int, block_size: int = 0, kv_dtype: str = "bfloat16") -> HeadGroupPlan:
    """As it is served: states and heads in blocks of one pool.

    block_size: 0: what ``auto`` is
    """
    return plan_of_model(model_config(json.loads(path.read_text())), tp_size, block_size, kv_dtype)


def plan_of_model(model: ModelConfig, tp_size: int, block_size: int = 0, kv_dtype: str = "bfloat16") -> HeadGroupPlan:
    """The same of a model that was read."""
    attention, block_size = attention_of(model), block_size or choose_block_size(model, kv_dtype).tokens
    sizes = [attention.layout(block_size, 1, kv_dtype, layer).slot_bytes for layer in range(model.cache_layers)]
    return plan_head_groups(model.policies, tp_size, sizes=sizes, is_replicated=attention.is_replicated)


def paddings(plan: HeadGroupPlan) -> dict[bool, float]:
    """What stays empty of blocks of tokens (False) and of states (True), over what does not."""
    found = {}
    for is_state in {group.policy.is_state for group in plan.groups}:
        groups = [group for group in plan.groups if group.policy.is_state is is_state]
        filled = sum(plan.sizes[member.layer] for group in groups for rank in group.members for member in rank)
        found[is_state] = plan.block_bytes * len(groups) * plan.tp_size / filled - 1
    return found


def least_of_the_worse(plan: HeadGroupPlan) -> float:
    """The least that the larger of the two paddings can be, whatever bytes a block has: each multiple of a size is
    tried, since a block between two of them only has more room that nobody fills."""
    counts = Counter((plan.sizes[m.layer], g.policy.is_state) for g in plan.groups for m in g.members[0])
    largest = max(plan.sizes)
    every = {size * slots for (size, _), count in counts.items() for slots in range(1, count + 1)}

    def padding(size: int, count: int, block_bytes: int) -> float:
        return -(-count // (block_bytes // size)) * block_bytes / (size * count) - 1

    return min(
        max(padding(size, count, block_bytes) for (size, _), count in counts.items())
        for block_bytes in every
        if block_bytes >= largest
    )


def test_padding_is_small_on_one_rank_to_eight_and_groups_are_equal_on_all(published: Path) -> None:
    model = model_config(json.loads(published.read_text()))
    attention, ranks = attention_of(model), sizes_up_to_eight(model)
    assert [size for size in valid_tp_sizes(model) if size <= 8] == ranks
    assert {1, 2, 4, 8} <= {*ranks} or model.num_heads < 8 or published.stem in FOUR_RANKS
    for size in ranks:
        attention.check(Serving(published.stem, size, "cpu", "auto", "bfloat16"))
        plan = plan_of(published, size)
        assert max(paddings(plan).values()) <= MORE_PADDING.get((published.stem, size), MOST_PADDING)
        for group in plan.groups:
            assert len({tuple(plan.sizes[layer] for layer, _ in rank) for rank in group.members}) == 1
        for layer, row in enumerate(model.policies):
            counts = {len(plan.kv_heads(rank)[layer]) for rank in range(size)}
            is_whole = not row or (attention.is_replicated and row[0] != STATE)
            assert counts == {len(row) if is_whole else max(1, len(row) // size)}
        shards = [Shard.of(model, plan, rank) for rank in range(size)]
        if model.mla is None:
            for layer in range(model.num_layers):
                heads = [head for shard in shards for part in shard.query_heads(model, layer) for head in range(*part)]
                if model.policies[layer][:1] != (STATE,):
                    assert sorted(heads) == list(range(model.query_heads_of(layer)))


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v3", "deepseek-v3.2", "glm-4.5", "glm-4.7-flash", "glm-5", "qwen3-next-80b-a3b", "qwen3.5-27b",
        "qwen3.5-35b-a3b", "qwen3.5-397b-a17b", "mimo-v2-flash",
    ],
)  # fmt: skip
def test_padding_is_as_small_with_a_layer_that_drafts(name: str) -> None:
    """Which is one more of those that keep tokens."""
    model = model_config(json.loads((PUBLISHED[0].parent / f"{name}.json").read_text()))
    joins = f"model.layers.{model.num_layers}.eh_proj", "model.mtp.layers.0.eh_proj", "mtp.fc"
    drafting = drafting_config(model, [f"{name}.weight" for name in joins])
    assert (drafting.num_layers, drafting.decoder_layers) == (model.num_layers + 1, model.num_layers)
    for size in sizes_up_to_eight(model):
        assert max(paddings(plan_of_model(drafting, size)).values()) <= MOST_PADDING


@pytest.mark.parametrize(("name", "tp_size"), NO_BETTER)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256, 512])
def test_where_more_is_padded_no_other_block_would_pad_less(name: str, tp_size: int, block_size: int) -> None:
    plan = plan_of(PUBLISHED[0].parent / f"{name}.json", tp_size, block_size)
    worse = max(paddings(plan).values())
    assert MOST_PADDING < worse == pytest.approx(least_of_the_worse(plan))


def test_heads_come_before_states_where_both_cannot_fit() -> None:
    """Of a long sequence nearly all blocks are those of heads."""
    assert paddings(plan_of(PUBLISHED[0].parent / "qwen3.5-27b.json", 8))[False] == 0


@pytest.mark.parametrize(
    ("kv_dtype", "number", "groups", "most"), [("bfloat16", 2, [12, 10], 1.17), ("float8_e4m3fn", 1, [22], 1.05)]
)
def test_of_a_long_context_deepseek_v4_keeps_little_and_wastes_little_of_that(
    kv_dtype: str, number: int, groups: list[int], most: float
) -> None:
    """Entries of 4 tokens with keys of 128, of 21 layers, and entries of 128 tokens of 20 layers.

    groups: of entries, members; most: bytes over those of numbers, scales and rotated numbers' second bytes
    """
    plan = plan_of(PUBLISHED[0].parent / "deepseek-v4-flash.json", 1, kv_dtype=kv_dtype)
    full = [group for group in plan.groups if group.policy.is_full]
    assert [len(group.members[0]) for group in full] == groups
    assert plan.block_bytes == 256 << 10
    each, key = (512 * 2, 128 * 2) if number == 2 else (512 + 64 + 4, 128 + 4)
    filled = 64 // 4 * (each + key) * 21 + each * 20
    assert 1 < plan.block_bytes * len(full) / filled < most
    of_v3_2 = 85_888 if number == 2 else 47_336
    assert plan.block_bytes * len(full) / 64 < of_v3_2 / 10, "bytes of a token of DeepSeek-V3.2"


@pytest.mark.parametrize(
    ("name", "tp_size", "block_size", "told"),
    [
        ("qwen3.5-397b-a17b", 1, 64, "0.0% of tokens, 3.6% of states"),
        ("qwen3.5-397b-a17b", 8, 64, "10.4% of tokens, 0.0% of states; with block_size 128 0.0% and 4.7%"),
        ("qwen3.5-27b", 8, 64, "0.0% of tokens, 6.9% of states"),
        (
            "qwen3.5-397b-a17b",
            8,
            "auto",
            "0.0% of tokens, 4.7% of states; auto chose 128: on 1 to 8 ranks 64 pads up to 10.4%, 128 up to 4.7%",
        ),
        (
            "qwen3.5-27b",
            1,
            "auto",
            "2.3% of tokens, 1.2% of states; auto chose 64: on 1 to 8 ranks 64 pads up to 6.9%, 128 up to 6.9%",
        ),
        (
            "qwen3-next-80b-a3b",
            2,
            "auto",
            "4.7% of tokens, 0.0% of states; auto chose 64: it pads at most 4.7% on 1 to 8 ranks",
        ),
    ],
)
def test_info_tells_what_blocks_would_pad_less(
    name: str, tp_size: int, block_size: Any, told: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((PUBLISHED[0].parent / f"{name}.json").read_text())
    config = EngineConfig(model="m", kv_cache="64GiB", dtype="bfloat16", tp_size=tp_size, block_size=block_size)
    rows = dict(describe(config, read_model_card(config, tmp_path, identify=False), tmp_path))
    assert rows["padding"] == told


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen2.5-0.5b", EVERY),
        ("qwen2.5-7b", [1, 2, 4, 5, 6, 7, 8]),
        ("ernie-4.5-21b-a3b", [1, 2, 4, 5, 6, 7, 8]),
        ("gemma-3-1b", [1, 2, 3, 4]),
        ("gemma-4-31b", [1, 2, 4, 8]),
        ("deepseek-v3", EVERY),
        ("qwen3-8b", [1, 2, 4, 8]),
        ("qwen3-next-80b-a3b", [1, 2, 4, 8]),
    ],
)
def test_sizes_of_some(name: str, sizes: list[int]) -> None:
    model = model_config(json.loads((PUBLISHED[0].parent / f"{name}.json").read_text()))
    assert sizes_up_to_eight(model) == sizes


def test_info_describes_the_cache(published: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(published.read_bytes())
    config = EngineConfig(model=str(tmp_path), kv_cache="64GiB")
    card = read_model_card(config, tmp_path, identify=False)
    rows = dict(describe(config, card, tmp_path, [8192]))
    model = card.config
    heads = attention_of(model).geometry()
    if model.mla is None and model.compressed is None and model.states is None and not model.layer_heads:
        queries = " or ".join(map(str, sorted({*map(model.query_heads_of, range(model.num_layers))})))
        assert heads == f"{queries} query and {model.num_kv_heads} KV heads of {model.head_dim}"
    assert rows["geometry"] == f"{model.num_layers} layers, {heads}"
    assert "padding" in rows["head groups"]
    windows = {policy.window for row in model.policies for policy in row if policy.window}
    for window in windows:
        assert any(f"window of {window}" in value for value in rows.values())


@pytest.mark.parametrize(
    ("name", "heads", "groups", "kinds"),
    [
        (
            "gemma-4-31b",
            "32 query and 16 KV heads of 256 or 4 KV heads of 512",
            "11 x 40 or 80 slots per rank (auto, padding 0.0%)",
            {"full attention, 40 (layer, KV head) pairs", "window of 1024, 80 (layer, KV head) pairs"},
        ),
        (
            "gemma-4-e4b",
            "8 query and 2 KV heads of 256 or 2 KV heads of 512, 18 layers use an earlier one's cache",
            "7 x 4 or 8 slots per rank (auto, padding 0.0%)",
            {"full attention, 4 (layer, KV head) pairs", "window of 512, 8 (layer, KV head) pairs"},
        ),
        (
            "mimo-v2-flash",
            "64 query and 4 KV heads of 192 (values 128) or 8 KV heads of 192 (values 128)",
            "29 x 12 slots per rank (auto, padding 0.0%)",
            {"full attention, 12 (layer, KV head) pairs", "window of 128, 12 (layer, KV head) pairs"},
        ),
    ],
)
def test_info_of_heads_of_two_sizes(tmp_path: Path, name: str, heads: str, groups: str, kinds: set[str]) -> None:
    source = next(path for path in PUBLISHED if path.stem == name)
    (tmp_path / "config.json").write_bytes(source.read_bytes())
    config = EngineConfig(model=str(tmp_path), kv_cache="64GiB", dtype="bfloat16")
    card = read_model_card(config, tmp_path, identify=False)
    rows = dict(describe(config, card, tmp_path, [8192]))
    assert rows["geometry"].endswith(heads)
    assert rows["head groups"] == groups
    assert {value.rsplit(",", 1)[0] for key, value in rows.items() if key.startswith("  group")} == kinds
    assert "of 8192 tokens" in rows["over pages of one layer"]
    assert {layout.block_bytes for layout in card.layouts} == {card.plan.block_bytes}


@pytest.mark.parametrize(
    ("name", "layers", "geometry"),
    [
        ("deepseek-v2-lite", 27, "16 query heads of 128 + 64 over latents of 512 + 64, values of 128"),
        ("deepseek-v3", 61, "128 query heads of 128 + 64 over latents of 512 + 64, values of 128"),
        ("kimi-k2", 61, "64 query heads of 128 + 64 over latents of 512 + 64, values of 128"),
    ],
)
@pytest.mark.parametrize("tp_size", [1, 4])
def test_info_of_latents(tmp_path: Path, name: str, layers: int, geometry: str, tp_size: int) -> None:
    source = next(path for path in PUBLISHED if path.stem == name)
    (tmp_path / "config.json").write_bytes(source.read_bytes())
    config = EngineConfig(model=str(tmp_path), kv_cache="64GiB", dtype="bfloat16", tp_size=tp_size)
    card = read_model_card(config, tmp_path, identify=False)
    rows = dict(describe(config, card, tmp_path, [8192]))
    assert rows["geometry"] == f"{layers} layers, {geometry}"
    assert rows["head groups"] == f"1 x {layers} slots per rank (auto, padding 0.0%)"
    assert rows["  group 0"].startswith(f"full attention, {layers} layers' latents, ")
    assert card.bytes_per_token == layers * (512 + 64) * 2 * tp_size  # every rank keeps all of them


@pytest.mark.parametrize(
    ("name", "tp_size", "ranks", "times", "most"),
    [
        ("qwen3-next-80b-a3b", 2, "", "", 1),
        ("qwen3-next-80b-a3b", 8, "4 of 8", "4", 4),
        ("gemma-4-31b", 8, "1 or 2 of 8", "1.09", 2),
        ("qwen2.5-7b", 8, "2 of 8", "2", 1),  # 28 query heads
        ("qwen2.5-0.5b", 5, "2 or 3 of 5", "2.5", 1),
        ("deepseek-v3", 4, "4 of 4", "4", 4),
    ],
)
def test_info_says_what_ranks_that_keep_the_same_cost(
    tmp_path: Path, name: str, tp_size: int, ranks: str, times: str, most: int
) -> None:
    source = next(path for path in PUBLISHED if path.stem == name)
    (tmp_path / "config.json").write_bytes(source.read_bytes())
    config = EngineConfig(model=str(tmp_path), kv_cache="64GiB", device="cuda", dtype="bfloat16", tp_size=tp_size)
    card = read_model_card(config, tmp_path, identify=False)
    rows = dict(describe(config, card, tmp_path, [8192]))
    told = f"each member by {ranks}; a token takes {times} times the bytes that it would on one rank"
    told += f", and less with context_parallel_size {most}" if most > 1 else ""
    assert rows.get("kept by several ranks") == (told if ranks else None)
    each = format_bytes(1000 * card.bytes_per_token / tp_size)
    assert f" over all ranks, {each} each" in rows["cache of 1,000 tokens"]


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
