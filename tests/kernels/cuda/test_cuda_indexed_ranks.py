"""Latents with an indexer that ranks keep together on GPUs: what is chosen is the best of all ranks' tokens.

The kernels run on NumPy arrays, on poisoned arenas, a thread for each rank; what is compared with is one cache of all.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.gpu.emulated_gpu import poisoned_array
from support.gpu.machine_code import TARGETS, variant_code
from support.indexed_scene import IndexedCase, IndexedScene

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import TokenShare
from headwise.kernels.base import AttentionBatch, HostLengths
from headwise.kernels.dsa import index_dtype, index_scale_view, index_view, indexed_layout, key_roles, latent_roles
from headwise.kernels.dsa_base import IndexKeys, IndexQueries, SharedIndexedKernels
from headwise.kernels.dsa_reference import best
from headwise.kernels.mla_base import UpProjections
from headwise.kernels.shared_context import roles_alone

pytest.importorskip("triton")

from support.gpu.indexed_ranks import IndexedRanksScene
from support.gpu.interpreted_latents import gpu_parts, indexed_kernels
from support.gpu.latent_ranks import assert_dealt, kept_in, knowing, step_of

from headwise.kernels.cuda import dsa_ranks, indexer, workspace
from headwise.kernels.cuda.cubins import Target
from headwise.kernels.cuda.dsa import IndexShape
from headwise.kernels.cuda.expanded import ExpandedShape
from headwise.kernels.cuda.mla import LatentShape

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy's, of infinities that are meant

QUANTISED = ["int8", "float8_e4m3fn", "int4"]


# ---- writes ----


@pytest.mark.parametrize(
    ("given", "kept"),
    [(each, each) for each in ("float32", "bfloat16", "float16")] + [("bfloat16", each) for each in QUANTISED],
)
@pytest.mark.parametrize("parts", [2, 4])
def test_each_rank_stores_its_own_keys_and_nothing_else(given: str, kept: str, parts: int) -> None:
    scene = IndexedScene(kept_in(kept, IndexedCase((9, 0, 1, 1, 5), (41, 7, 33, 34, 5), rank=64)))
    scene.batch.block_tables[5, 1] = -1
    kernels, where = indexed_kernels(), (scene.batch, scene.heads)
    latents, keys = (step_of(scene, every, 2, given) for every in (scene.latents, scene.keys))
    kernels.write_latent(latents, scene.arena, scene.layout, *where)
    kernels.write_index(keys, scene.arena, scene.layout, *where)
    layout = replace(scene.layout, parts=parts).own
    for part in range(parts):
        own = np.full(len(scene.arena) // scene.layout.block_bytes * layout.block_bytes, 0xFF, np.uint8)
        kernels.write_own(latents, own, layout, *where, TokenShare(part, parts))
        kernels.write_index_own(keys, own, layout, *where, TokenShare(part, parts))
        assert_dealt(scene, own, layout, TokenShare(part, parts))


@pytest.mark.parametrize("kept", ["float32", "int8"])
def test_an_indexers_queries_of_all_tokens_are_rotated_whoever_stores_their_keys(kept: str) -> None:
    scene, kernels = IndexedScene(IndexedCase((6, 1), (9, 20), dtype=kept)), indexed_kernels()
    latents, rows = (step_of(scene, every, 0, "float32") for every in (scene.latents, scene.keys))
    draw, where = np.random.default_rng(0), (scene.batch, scene.heads)
    angles = draw.uniform(0, 6, (len(rows), 1, scene.case.rotated // 2)).astype(np.float32)
    weight, bias = (draw.standard_normal(rows.shape[1]).astype(np.float32) for _ in range(2))
    keys, turns = IndexKeys(rows, weight, bias, 1e-6), (np.cos(angles), np.sin(angles))

    def written(arena: np.ndarray, layout: BlockLayout, **share: TokenShare) -> np.ndarray:
        asked = IndexQueries(scene.index.query.copy(), scene.index.weights, scene.index.top)
        kernels.write_own(latents, arena, layout, *where, share.get("share", TokenShare()))
        kernels.write_index_rope(asked, keys, *turns, arena, layout, *where, **share)
        return asked.query

    turned, layout = written(scene.arena, scene.layout), replace(scene.layout, parts=2).own
    assert not np.array_equal(turned, scene.index.query)
    for part in range(2):
        own = np.full(len(scene.arena) // scene.layout.block_bytes * layout.block_bytes, 0xFF, np.uint8)
        np.testing.assert_array_equal(written(own, layout, share=TokenShare(part, 2)), turned)
        assert_dealt(scene, own, layout, TokenShare(part, 2))


# ---- choice ----


def test_a_rank_scores_its_own_tokens_up_to_the_querys_and_no_others() -> None:
    ranks = IndexedRanksScene(IndexedScene(IndexedCase((1, 0, 3, 1), (1, 9, 70, 18))), 4)
    ranks.write()
    scene, positions, of_rows = ranks.scene, (0, 67, 68, 69, 17), (0, 2, 2, 2, 3)
    where = ranks.layout, scene.batch, scene.heads
    for part, (kernels, arena) in enumerate(zip(ranks.kernels, ranks.arenas, strict=True)):
        scores, share = poisoned_array((5, 5 * 16 // 4), np.float32), TokenShare(part, 4)
        kernels._indexed.score(ranks.index, 0, arena, *where, scores, share)
        for row, (position, sequence) in enumerate(zip(positions, of_rows, strict=True)):
            keys = scene.keys[sequence][: position + 1][part::4]
            wanted = np.maximum(keys @ ranks.index.query[row].T, 0) @ ranks.index.weights[row]
            np.testing.assert_array_equal(scores[row, : len(keys)], wanted)
            assert np.isnan(scores[row, len(keys) :]).all()


SCORES = [-np.inf, -3.5, -0.0, 0.0, 1e-30, 2.0, 2.0000002, 1e30]


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("top", [1, 5, 24, 100, 300])
def test_of_equal_scores_the_first_tokens_of_all_ranks_are_chosen(top: int, parts: int) -> None:
    """Each rank's places are of its own tokens, in their order; a query of padding has none."""
    draw, chooser = np.random.default_rng(top), indexer.CudaIndexer(gpu_parts().programs, threads=64)
    scene = IndexedScene(IndexedCase((3,), (200,)))
    every = draw.choice(SCORES, (4, 240)).astype(np.float32)
    every[1, 150] = np.nan
    layout, dtype = replace(scene.layout, block_size=4), np.dtype(np.float32)
    where = layout, replace(scene.batch, block_tables=np.arange(4 * 60, dtype=np.int32).reshape(4, 60)), scene.heads
    found, told, shares = [], [], [TokenShare(part, parts) for part in range(parts)]
    for share in shares:
        scores = np.ascontiguousarray(every[:, share.part :: parts])
        own, counts = poisoned_array((4, top), np.int32), poisoned_array((4,), np.int32)
        told.append(poisoned_array((4, 2, top), np.int32))
        chooser.choose(scores, 0, dtype, *where, own, counts, told[-1], share)
        found.append(own)
    for share, own in zip(shares, found, strict=True):
        places, counts = poisoned_array((4, top), np.int32), poisoned_array((4,), np.int32)
        chooser.choose_of_all(np.array(told), own, dtype, layout, share, places, counts)
        for row, seen in enumerate((198, 199, 200)):
            exact = np.where(np.isnan(every[row, :seen]), np.inf, every[row, :seen].astype(np.float64))
            wanted = np.flatnonzero(best(exact[None], exact[None] > -np.inf, top)[0])
            wanted = wanted[wanted % parts == share.part]
            at = where[1].block_tables[1][wanted // parts // 4] * 4 + wanted // parts % 4
            at[np.isnan(every[row, wanted])] = -2
            np.testing.assert_array_equal(places[row, : counts[row]], at)
        assert counts[3] == 0


# ---- what all ranks see ----

CLOSE = {"float32": {"rtol": 0, "atol": 1e-4}, "bfloat16": {"rtol": 0.01, "atol": 0.15}}
Told = list[tuple[Any, ...]]


def assert_all_see_the_best(ranks: IndexedRanksScene, batch: AttentionBatch, tokens: slice = slice(None)) -> Told:
    """Whether each rank's heads see what the reference sees over one cache; what they told each other."""
    right = ranks.expected()
    found, meeting = ranks.attend(batch)
    for ours, wanted in zip(found, right, strict=True):
        np.testing.assert_allclose(ours[tokens].astype(np.float32), wanted[tokens], **CLOSE[ranks.dtype.name])
    assert all(log == meeting.log[0] for log in meeting.log)
    return meeting.log[0]


KINDS = [("float32", "float32"), ("float32", "int8"), ("float32", "int4"), ("bfloat16", "bfloat16"),
         ("bfloat16", "int8")]  # fmt: skip


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize(("asked", "kept"), KINDS)
def test_decodes_of_any_length_see_the_best_tokens_of_all_ranks(asked: str, kept: str, parts: int) -> None:
    """Lengths of less than a token of each rank, of fewer than may be chosen, and of more."""
    case = kept_in(kept, IndexedCase((1, 1, 0, 1, 1, 1), (1, 70, 9, 3, 34, 20), heads=2, is_apart=parts == 2))
    ranks = IndexedRanksScene(IndexedScene(case), parts, asked)
    ranks.write()
    told = assert_all_see_the_best(ranks, replace(ranks.scene.batch, max_query_len=1))
    assert told == [
        ("all_gather", (5, 2, case.top), np.int32),
        ("all_gather", (5, 2, case.rank + case.rotated), ranks.dtype),
        ("exchange", (parts, 5, 2, case.rank + workspace.BESIDE), np.float32),
    ]
    kernels = [name for name, _ in ranks.launched(0)]
    assert set(kernels) == {"score_tokens", "attend_chosen"}
    assert kernels.count("attend_chosen") == 1


def test_tokens_of_one_rank_may_be_all_that_are_chosen() -> None:
    """And splits of other ranks have none."""
    scene = IndexedScene(IndexedCase((1, 1), (200, 90), top=80, heads=2))
    scene.index = IndexQueries(np.abs(scene.index.query) + 1, np.abs(scene.index.weights) + 1, 80)
    for keys in scene.keys:
        keys[:], keys[1::2] = 0, np.abs(keys[1::2]) + 1
    ranks = IndexedRanksScene(scene, 2, sms=10)
    ranks.write()
    assert_all_see_the_best(ranks, replace(scene.batch, max_query_len=1))
    memory = ranks.kernels[1]._latents._workspace
    assert not memory._memory[: memory._counters_bytes].any()
    assert np.isfinite(memory._memory[memory._counters_bytes :].view(np.float32)).any(), "there were splits"


def test_where_all_scores_are_equal_the_first_tokens_are_seen() -> None:
    scene = IndexedScene(IndexedCase((1, 3), (90, 60), top=25, heads=2))
    scene.index = IndexQueries(np.zeros_like(scene.index.query), scene.index.weights, 25)
    ranks = IndexedRanksScene(scene, 4)
    ranks.write()
    assert_all_see_the_best(ranks, knowing(scene.batch))


@pytest.mark.parametrize(
    ("asked", "kept", "parts", "is_apart"),
    [
        ("float32", "float32", 2, False),
        ("bfloat16", "int8", 4, True),
        ("float32", "int4", 1, False),
        *(
            pytest.param(*kinds, parts, is_apart, marks=pytest.mark.soak)
            for *kinds, others in (
                ("float32", "float32", (1, 4)), ("bfloat16", "int8", (1, 2)), ("float32", "int4", (2, 4)),
            )
            for parts in others
            for is_apart in (False, True)
        ),
    ],
)  # fmt: skip
def test_contexts_come_to_prompts_that_do_not_see_all_of_them(
    asked: str, kept: str, parts: int, is_apart: bool
) -> None:
    """Keys to choose by, then latents. A prompt that does is expanded, piece by piece, of what all ranks bring."""
    case = kept_in(kept, IndexedCase((40, 20), (75, 20), heads=2, is_apart=is_apart))
    ranks = IndexedRanksScene(IndexedScene(case), parts, asked)
    ranks.write()
    told = assert_all_see_the_best(ranks, knowing(ranks.scene.batch))
    columns = -(-75 // case.block_size)
    latents, keys = (
        roles_alone(layout, roles_of(layout)).slot_bytes
        for layout, roles_of in ((ranks.layout, latent_roles), (ranks.key_layout, key_roles))
    )
    assert is_apart or latents + keys == ranks.layout.slot_bytes
    assert told == [
        ("all_gather", (columns, keys // 4), np.int32),
        ("all_gather", (20 // parts, case.rank + case.rotated), ranks.dtype),
        ("all_gather", (columns, latents // 4), np.int32),
    ]
    assert [name for name, _ in ranks.launched(0) if name != "score_tokens"] == [
        "gather_latents", "attend_expanded", "attend_chosen",
    ]  # fmt: skip


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_steps_of_all_kinds_of_sequences(parts: int) -> None:
    """Decodes before, between and behind prompts, guesses, sequences without queries, and ones shorter than parts."""
    case = IndexedCase((1, 30, 1, 3, 0, 20, 2, 1, 1), (30, 40, 1, 3, 9, 20, 34, 2, 65), heads=2)
    ranks = IndexedRanksScene(IndexedScene(case), parts)
    ranks.write()
    told = assert_all_see_the_best(ranks, knowing(ranks.scene.batch))
    rows = 1 + 1 + 3 + 2 + 1 + 1
    assert [shape[0] for name, shape, _ in told if shape[1:] == (2, case.top)] == [rows]
    launched = [name for name, _ in ranks.launched(0)]
    assert (launched.count("attend_chosen"), launched.count("attend_expanded")) == (2, 1)


@pytest.mark.parametrize("kept", ["float32", "int8"])
def test_a_few_queries_of_each_sequence_are_rows(kept: str) -> None:
    ranks = IndexedRanksScene(IndexedScene(IndexedCase((3, 8, 2), (3, 41, 70), heads=2, dtype=kept)), 4)
    ranks.write()
    told = assert_all_see_the_best(ranks, knowing(ranks.scene.batch))
    assert [name for name, _, _ in told] == ["all_gather", "all_gather", "exchange"]


def test_a_prompt_whose_context_is_too_large_to_gather_is_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.kernels.cuda.dsa_ranks.GATHERED_BYTES", 75 * 80 * 4 - 1)
    ranks = IndexedRanksScene(IndexedScene(IndexedCase((40,), (75,), heads=2)), 2)
    ranks.write()
    told = assert_all_see_the_best(ranks, knowing(ranks.scene.batch))
    assert [name for name, _, _ in told] == ["all_gather", "all_gather", "exchange"]


def test_rows_are_attended_to_some_at_a_time_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.kernels.cuda.dsa_ranks.RANKS_BYTES", 3 * 8 * 2 * 20)
    monkeypatch.setattr("headwise.kernels.cuda.mla_ranks.RANKS_BYTES", 1)
    case = IndexedCase((1, 40, 2, 1, 3), (70, 75, 30, 9, 60), heads=20, rank=16)
    ranks = IndexedRanksScene(IndexedScene(case), 2)
    ranks.write()
    told = assert_all_see_the_best(ranks, knowing(ranks.scene.batch))
    assert [shape[0] for _, shape, _ in told if shape[1:] == (2, 20)] == [3, 3, 1]
    assert [shape[1:3] for name, shape, _ in told if name == "exchange"] == [
        (rows, heads) for rows in (3, 3, 1) for heads in (16, 4)
    ]


def test_portions_of_rows() -> None:
    assert list(dsa_ranks.portions([], 4)) == []
    assert list(dsa_ranks.portions([slice(2, 5), slice(7, 8), slice(10, 16)], 4)) == [
        [slice(2, 5), slice(7, 8)], [slice(10, 14)], [slice(14, 16)],
    ]  # fmt: skip


def test_tables_that_hold_no_more_than_may_be_chosen_are_attended_to_whole() -> None:
    ranks = IndexedRanksScene(IndexedScene(IndexedCase((1, 1), (30, 9), top=32)), 2)
    ranks.write()
    assert_all_see_the_best(ranks, replace(ranks.scene.batch, max_query_len=1))
    assert {name for name, _ in ranks.launched(0)} == {"attend_latents"}


def test_padding_is_nobodys_and_what_is_launched_and_told_hangs_on_shapes_alone() -> None:
    launched = []
    for query_lens, seq_lens in (((1, 1), (70, 40)), ((1, 0), (2, 70))):
        ranks = IndexedRanksScene(IndexedScene(IndexedCase(query_lens, seq_lens, heads=2)), 2)
        ranks.write()
        right, batch, tokens = ranks.expected(), ranks.scene.batch, sum(query_lens)

        def padded(rows: np.ndarray, tokens: int = tokens) -> np.ndarray:
            return np.concatenate([rows, np.full_like(rows[:1], np.nan).repeat(3 - tokens, 0)])

        cu = np.concatenate([batch.cu_seqlens_q, batch.cu_seqlens_q[-1:]])
        tables = np.concatenate([batch.block_tables, np.full_like(batch.block_tables[:2], 1 << 20)])
        batch = replace(batch, cu_seqlens_q=cu, seq_lens=np.append(batch.seq_lens, np.int32(0)), block_tables=tables)
        ranks.queries = list(map(padded, ranks.queries))
        ranks.index = IndexQueries(padded(ranks.index.query), padded(ranks.index.weights), ranks.index.top)
        found, meeting = ranks.attend(replace(batch, max_query_len=1))
        for ours, wanted in zip(found, right, strict=True):
            np.testing.assert_allclose(ours[:tokens], wanted[:tokens], rtol=0, atol=1e-4)
        launched.append((ranks.launched(0), ranks.launched(1), meeting.log))
    assert launched[0] == launched[1]


@pytest.mark.parametrize("max_query_len", [1, None])
@pytest.mark.parametrize("kept", ["float32", "int8"])
def test_a_score_that_is_nan_on_one_rank_breaks_its_query_on_all(kept: str, max_query_len: int | None) -> None:
    ranks = IndexedRanksScene(IndexedScene(IndexedCase((1, 1), (60, 50), heads=2, dtype=kept)), 2)
    ranks.write()
    view = index_view if kept == "float32" else index_scale_view
    view(ranks.arenas[1], ranks.layout)[ranks.scene.batch.block_tables[1, 1], ..., :3] = np.nan
    for seen in ranks.attend(replace(knowing(ranks.scene.batch), max_query_len=max_query_len))[0]:
        assert np.isnan(seen[0]).all()
        assert np.isfinite(seen[1]).all()


def test_a_nan_in_a_gathered_context_breaks_the_queries_that_see_it() -> None:
    ranks = IndexedRanksScene(IndexedScene(IndexedCase((30,), (60,), heads=2)), 2)
    ranks.write()
    index_view(ranks.arenas[1], ranks.layout)[ranks.scene.batch.block_tables[1, 2], ..., 7, :] = np.nan  # position 47
    for seen in ranks.attend(knowing(ranks.scene.batch))[0]:
        assert np.isfinite(seen[:17]).all()
        assert np.isnan(seen[17:]).all()


def test_unmapped_tokens_are_neither_seen_nor_chosen() -> None:
    ranks = IndexedRanksScene(IndexedScene(IndexedCase((1, 20, 4), (60, 50, 40), heads=2)), 2)
    ranks.scene.batch.block_tables[:, 1] = -1
    ranks.write()
    assert_all_see_the_best(ranks, knowing(ranks.scene.batch))
    ranks.scene.batch.block_tables[:] = -1
    for seen in ranks.attend(knowing(ranks.scene.batch))[0]:
        assert (seen == 0).all()


def test_what_does_not_fit_is_refused() -> None:
    ranks = IndexedRanksScene(IndexedScene(IndexedCase((1, 2), (20, 41))), 1)
    assert isinstance(ranks.kernels[0], SharedIndexedKernels)
    with pytest.raises(ValueError, match="must know the lengths of a step's prompts: give on_host"):
        ranks.attend(ranks.scene.batch)
    ranks.ups = [UpProjections(up.key[:2], up.value) for up in ranks.ups]
    with pytest.raises(ValueError, match="do not fit"):
        ranks.attend(knowing(ranks.scene.batch))


# ---- which way ----


@pytest.mark.parametrize(
    ("queries", "context", "is_gathered"),
    [
        (1, 3000, False),
        (8, 3000, False),  # guesses
        (9, 3000, True),
        (12, 10_000, False),
        (64, 10_000, True),
        (8192, 30_000, True),
        (8192, 60_000, False),  # to score all of it on each rank is more than to send queries
    ],
)
def test_contexts_are_gathered_where_that_is_less_to_compute_and_to_send(
    queries: int, context: int, is_gathered: bool
) -> None:
    """At DeepSeek-V3.2's sizes on eight ranks."""
    narrow = numpy_dtype("bfloat16")
    query, layout = np.empty((0, 16, 192), narrow), indexed_layout(8, 1, 576, 128, "bfloat16", 64)
    up = UpProjections(np.empty((16, 128, 512), narrow), np.empty((16, 512, 128), narrow))
    index = IndexQueries(np.empty((0, 64, 128), narrow), np.empty((0, 64), narrow), 2048)
    lengths = HostLengths(np.array([0, queries, queries + 1]), np.array([context, context]))
    assert dsa_ranks.are_gathered(lengths, query, up, index, layout, 8).tolist() == [is_gathered, False]


# ---- machine code ----

PUBLISHED = LatentShape(heads=16, rank=512, rotated=64, block_size=8, q_dtype="bfloat16", kv_dtype="bfloat16")
INDEX = IndexShape(heads=64, dim=128, block_size=8, dtype="bfloat16", key_dtype="bfloat16")


@pytest.mark.parametrize(
    ("sm", "kv_dtype"),
    [
        pytest.param(*each, marks=() if each == (90, "bfloat16") else pytest.mark.soak)
        for each in product(TARGETS, ("bfloat16", "int8"))
    ],
)
def test_machine_code_of_eight_ranks_of_16_heads_does_not_spill(sm: int, kv_dtype: str) -> None:
    shape = ExpandedShape(replace(PUBLISHED, kv_dtype=kv_dtype), 128, 128, parts=8)
    for variant in dsa_ranks.variants_of(shape, replace(INDEX, key_dtype=index_dtype(kv_dtype)), sm):
        compiled = variant_code(variant, Target(sm, cuda=12))
        assert compiled.spilled_bytes == 0
        assert not compiled.is_serialised
        assert "cp.async.c" in compiled.ptx


def test_all_is_prepared_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = IndexedRanksScene(IndexedScene(IndexedCase((1, 20, 20), (20, 30, 20), heads=2)), 2)
    ranks.write()
    case, prepared = ranks.scene.case, []
    for kernels in ranks.kernels:
        monkeypatch.setattr(kernels._latents.launcher, "prepare", prepared.append)
        sizes = case.rank, case.rotated, case.plain, case.value_dim
        kernels.prepare_shared(ranks.layout, case.heads, 2, *sizes, "float32")
        kernels.prepare_index(ranks.layout, case.index_heads, "float32", 2)
        shapes = set(kernels._latents._prepared)
        launch = kernels._latents.launcher.launch

        def known(variant: Any, *more: Any, launch: Any = launch) -> None:
            assert variant in prepared
            launch(variant, *more)

        monkeypatch.setattr(kernels._latents.launcher, "launch", known)
        for user in (kernels._of_ranks._around, kernels._write, kernels._indexer, kernels._indexed_of_ranks._gathered):
            monkeypatch.setattr(user, "_programs", None)
        monkeypatch.setattr(kernels._latents, "_prepared", frozenset(shapes))
    assert_all_see_the_best(ranks, knowing(ranks.scene.batch))
