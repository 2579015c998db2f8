"""Latents that ranks keep together on GPUs: each writes its own tokens, and all attend to those of all.

The kernels run on NumPy arrays, on poisoned arenas, a thread for each rank; what is compared with is one cache of all.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.gpu.emulated_gpu import poisoned_array
from support.gpu.machine_code import TARGETS, accesses, machine_code, spilled, variant_code
from support.latent_scene import LatentCase, LatentScene

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.token_share import TokenShare
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HostLengths
from headwise.kernels.mla import latent_view
from headwise.kernels.mla_base import SharedLatentKernels, UpProjections

pytest.importorskip("triton")

from support.gpu.interpreted_latents import latent_kernels
from support.gpu.latent_ranks import RanksScene, assert_dealt, kept_in, knowing, step_of

from headwise.kernels.cuda import elementwise, latent_ranks, merge_jit, mla_ranks, workspace
from headwise.kernels.cuda.cubins import Target
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
def test_each_rank_stores_its_own_tokens_and_nothing_else(given: str, kept: str, parts: int) -> None:
    scene = LatentScene(kept_in(kept, LatentCase((9, 0, 1, 1, 5), (41, 7, 33, 34, 5), rank=64)))
    scene.batch.block_tables[5, 1] = -1
    kernels, step = latent_kernels(), step_of(scene, scene.latents, 2, given)
    kernels.write_latent(step, scene.arena, scene.layout, scene.batch, scene.heads)
    layout = replace(scene.layout, parts=parts).own
    for part in range(parts):
        own = np.full(len(scene.arena) // scene.layout.block_bytes * layout.block_bytes, 0xFF, np.uint8)
        kernels.write_own(step, own, layout, scene.batch, scene.heads, TokenShare(part, parts))
        assert_dealt(scene, own, layout, TokenShare(part, parts))


@pytest.mark.parametrize("kept", ["float32", "int8", "int4"])
def test_queries_of_all_tokens_are_rotated_whoever_stores_them(kept: str) -> None:
    scene, kernels = LatentScene(kept_in(kept, LatentCase((6, 1), (9, 20), rank=32, rotated=16))), latent_kernels()
    case, step = scene.case, step_of(scene, scene.latents, 0, "float32")
    angles = np.random.default_rng(0).uniform(0, 6, (len(step), 1, case.rotated // 2)).astype(np.float32)
    given = step[:, : case.rank], step[:, case.rank :], np.cos(angles), np.sin(angles)
    turned = scene.query.copy()
    kernels.write_latent_rope(turned, *given, scene.arena, scene.layout, scene.batch, scene.heads)
    assert not np.array_equal(turned, scene.query)
    layout = replace(scene.layout, parts=2).own
    for part in range(2):
        query, share = scene.query.copy(), TokenShare(part, 2)
        own = np.full(len(scene.arena) // scene.layout.block_bytes * layout.block_bytes, 0xFF, np.uint8)
        kernels.write_latent_rope(query, *given, own, layout, scene.batch, scene.heads, share)
        np.testing.assert_array_equal(query, turned)
        assert_dealt(scene, own, layout, share)


# ---- what one rank sees ----


def seen_by_numpy(scene: LatentScene, queries: np.ndarray, share: TokenShare) -> tuple[np.ndarray, np.ndarray]:
    """Means ``[ranks, tokens, heads, rank]`` and log-sum-exps of ``queries [ranks, tokens, heads, rank + rotated]``."""
    rank, asked = scene.case.rank, queries.astype(np.float64)
    means, sums = np.zeros((*queries.shape[:3], rank)), np.full(queries.shape[:3], -np.inf)
    at = np.flatnonzero(scene.case.query_lens)
    for token, sequence in enumerate(at):
        latents = scene._as_stored(scene.latents[sequence])[share.part :: share.parts].astype(np.float64)
        if len(latents):
            scores = scene.scale * np.einsum("phw,nw->phn", asked[:, token], latents)
            weights = np.exp(scores)
            means[:, token] = weights / weights.sum(-1, keepdims=True) @ latents[:, :rank]
            sums[:, token] = np.log2(weights.sum(-1))
    return means, sums


@pytest.mark.parametrize("split", [32, 1024])
@pytest.mark.parametrize(("asked", "dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"),
                                              *(("float32", each) for each in QUANTISED)])  # fmt: skip
def test_a_rank_tells_what_all_heads_see_of_its_tokens_and_the_logarithm_of_their_weights(
    asked: str, dtype: str, split: int
) -> None:
    case = kept_in(dtype, LatentCase((1, 0, 1, 1, 1), (290, 9, 1, 75, 2), heads=10))
    ranks = RanksScene(LatentScene(case), 2, asked, sms=10)
    ranks.write()
    scene, latents, share = ranks.scene, ranks.kernels[1]._latents, TokenShare(1, 2)
    latents.tuning = replace(latents.tuning, min_split_tokens=split)
    queries = poisoned_array((2, 4, 10, case.rank + case.rotated), numpy_dtype(asked))
    queries[:] = np.random.default_rng(3).standard_normal(queries.shape)
    out = poisoned_array((2, 4, 10, case.rank + workspace.BESIDE), np.float32)
    shape = LatentShape.of(ranks.layout, 20, case.rank, case.rotated, asked)
    batch = replace(scene.batch, seq_lens=share.count(scene.batch.seq_lens).astype(np.int32))
    where = ranks.arenas[1], ranks.layout, batch, scene.heads
    for _ in range(2):  # the second time with counters as the first one left them
        latents.attend_of_ranks(queries, shape, *where, scale=scene.scale, out=out)
    means, sums = seen_by_numpy(scene, queries, share)
    close = 2e-2 if asked == "bfloat16" else 1e-4
    np.testing.assert_allclose(out[..., : case.rank], means, rtol=0, atol=close)
    np.testing.assert_allclose(out[..., case.rank], sums, rtol=0, atol=close)
    assert (sums[:, 1] == -np.inf).all(), "the sequence of one token has none here"
    assert (out[:, 1, :, : case.rank] == 0).all()
    memory = latents._workspace._memory[latents._workspace._counters_bytes :].view(np.float32)
    assert np.isfinite(memory).any() == (split == 32), "there were splits, or none"
    assert merge_jit.BESIDE.value == workspace.BESIDE


def test_parts_of_parts_are_merged_with_their_logarithms() -> None:
    ranks = RanksScene(LatentScene(LatentCase((1,), (1200,), heads=2, rank=16)), 2, sms=20)
    ranks.write()
    right = ranks.expected()
    for found, wanted in zip(ranks.attend(replace(ranks.scene.batch, max_query_len=1))[0], right, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    splits = -(-1200 // 2 // 32)
    assert splits > merge_jit.GROUP.value


# ---- what all ranks see ----

CLOSE = {"float32": 1e-4, "bfloat16": 0.15}


def assert_all_see_all(ranks: RanksScene, batch: AttentionBatch, tokens: slice = slice(None)) -> list[tuple[Any, ...]]:
    """Whether each rank's heads see what the reference sees over one cache; what they told each other."""
    found, meeting = ranks.attend(batch)
    for ours, wanted in zip(found, ranks.expected(), strict=True):
        np.testing.assert_allclose(
            ours[tokens].astype(np.float32), wanted[tokens], rtol=0, atol=CLOSE[ranks.dtype.name]
        )
    return meeting.log[0]


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize(("asked", "kept"), [("float32", "float32"), ("float32", "int8"), ("bfloat16", "bfloat16"),
                                             ("bfloat16", "int8")])  # fmt: skip
def test_decodes_of_any_length_see_the_tokens_of_all_ranks(asked: str, kept: str, parts: int) -> None:
    ranks = RanksScene(LatentScene(LatentCase((1, 1, 0, 1, 1), (1, 70, 9, 3, 34), dtype=kept)), parts, asked)
    ranks.write()
    told = assert_all_see_all(ranks, replace(ranks.scene.batch, max_query_len=1))
    case = ranks.scene.case
    assert told == [
        ("all_gather", (4, case.heads, case.rank + case.rotated), ranks.dtype),
        ("exchange", (parts, 4, case.heads, case.rank + workspace.BESIDE), np.float32),
    ]
    assert ranks.launched(0) == [("attend_latents", ranks.launched(0)[0][1])]


def test_padding_is_nobodys_and_what_is_launched_and_told_hangs_on_shapes_alone() -> None:
    launched = []
    for query_lens, seq_lens in (((1, 1), (70, 40)), ((1, 0), (2, 70))):
        ranks = RanksScene(LatentScene(LatentCase(query_lens, seq_lens)), 2)
        ranks.write()
        batch, tokens = ranks.scene.batch, sum(query_lens)
        cu = np.concatenate([batch.cu_seqlens_q, batch.cu_seqlens_q[-1:]])
        tables = np.concatenate([batch.block_tables, np.full_like(batch.block_tables[:2], 1 << 20)])
        lengths = np.append(batch.seq_lens, np.int32(0))
        padded = replace(batch, cu_seqlens_q=cu, seq_lens=lengths, block_tables=tables, max_query_len=1)
        ranks.queries = [
            np.concatenate([query, np.full_like(query[:1], np.nan).repeat(3 - tokens, 0)]) for query in ranks.queries
        ]
        right = ranks.expected()
        found, meeting = ranks.attend(padded)
        for ours, wanted in zip(found, right, strict=True):
            np.testing.assert_allclose(ours[:tokens], wanted[:tokens], rtol=0, atol=1e-4)
        launched.append((ranks.launched(0), ranks.launched(1), meeting.log))
    assert launched[0] == launched[1]


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize(("asked", "kept"), [("float32", "float32"), ("bfloat16", "int8"), ("float32", "int4")])
def test_prompts_are_expanded_piece_by_piece_of_what_all_ranks_bring(asked: str, kept: str, parts: int) -> None:
    case = kept_in(kept, LatentCase((40, 20), (75, 21), heads=2))
    ranks = RanksScene(LatentScene(case), parts, asked)
    for kernels in ranks.kernels:
        kernels._expanded.piece = 30
    ranks.write()
    told = assert_all_see_all(ranks, knowing(ranks.scene.batch))
    width = case.rank + case.rotated
    piece = {1: 30, 2: 30, 4: 32}[parts]
    counts = [*(min(piece, 75 - first) for first in range(0, 75, piece)), 21]
    assert told == [("all_gather", (-(-count // parts), width), ranks.dtype) for count in counts]
    assert {name for name, _ in ranks.launched(0)} == {"gather_latents", "attend_expanded"}


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_steps_of_all_kinds_of_sequences(parts: int) -> None:
    """Decodes before, between and behind prompts, guesses, sequences without queries, and ones shorter than parts."""
    case = LatentCase((1, 12, 1, 3, 0, 20, 2, 1, 1), (30, 40, 1, 3, 9, 20, 34, 2, 65), heads=2)
    ranks = RanksScene(LatentScene(case), parts)
    ranks.write()
    told = assert_all_see_all(ranks, knowing(ranks.scene.batch))
    rows = 1 + 1 + 3 + 2 + 1 + 1
    assert [(name, shape[-3]) for name, shape, _ in told if len(shape) > 2] == [
        ("all_gather", rows),
        ("exchange", rows),
    ]
    assert [name for name, _ in ranks.launched(0)].count("attend_expanded") == 2


@pytest.mark.parametrize("kept", ["float32", "int8"])
def test_a_few_queries_of_each_sequence_are_rows(kept: str) -> None:
    ranks = RanksScene(LatentScene(LatentCase((3, 8, 2), (3, 41, 70), heads=2, dtype=kept)), 4)
    ranks.write()
    assert_all_see_all(ranks, knowing(ranks.scene.batch))
    assert {name for name, _ in ranks.launched(0)} == {"attend_latents"}


@pytest.mark.parametrize("max_query_len", [1, None])
def test_heads_are_attended_to_some_at_a_time_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, max_query_len: int | None
) -> None:
    monkeypatch.setattr("headwise.kernels.cuda.mla_ranks.RANKS_BYTES", 1)
    ranks = RanksScene(LatentScene(LatentCase((1, 1), (20, 9), heads=20, rank=16)), 2)
    ranks.write()
    told = assert_all_see_all(ranks, replace(knowing(ranks.scene.batch), max_query_len=max_query_len))
    assert [shape[-2] for name, shape, _ in told if name == "exchange"] == [16, 4]


def test_queries_may_have_gaps_between_tokens() -> None:
    ranks = RanksScene(LatentScene(LatentCase((1, 2), (20, 9))), 2)
    ranks.write()
    for part, query in enumerate(ranks.queries):
        wide = poisoned_array((len(query), 5, query.shape[2]), query.dtype)
        wide[:, 1:4] = query
        ranks.queries[part] = wide[:, 1:4]
    assert_all_see_all(ranks, knowing(ranks.scene.batch))


def test_unmapped_tokens_are_not_seen() -> None:
    ranks = RanksScene(LatentScene(LatentCase((1, 20, 4), (60, 50, 40))), 2)
    ranks.scene.batch.block_tables[:, 1] = -1
    ranks.write()
    assert_all_see_all(ranks, knowing(ranks.scene.batch))
    ranks.scene.batch.block_tables[:] = -1
    for seen in ranks.attend(knowing(ranks.scene.batch))[0]:
        assert (seen == 0).all()


def test_what_cancels_out_between_ranks_leaves_no_rounding_errors_of_theirs() -> None:
    """Their means are a thousand times what is left of them."""
    ranks = RanksScene(LatentScene(LatentCase((1,), (64,), dtype="bfloat16")), 2, "bfloat16")
    (latents,) = ranks.scene.latents
    draw = np.random.default_rng(2).uniform(1, 2, (32, latents.shape[1]))
    latents[::2], latents[1::2] = 1000 * draw, -1000 * draw + draw
    for query, up in zip(ranks.queries, ranks.ups, strict=True):
        query[:] = 0
        up.value[:] = np.abs(up.value)
    ranks.write()
    for ours, wanted in zip(
        ranks.attend(replace(ranks.scene.batch, max_query_len=1))[0], ranks.expected(), strict=True
    ):
        np.testing.assert_allclose(ours.astype(np.float32), wanted, rtol=1e-2)


def test_a_part_of_a_cache_that_was_never_written_makes_what_is_computed_of_it_nan() -> None:
    ranks = RanksScene(LatentScene(LatentCase((1, 1), (40, 9))), 2)
    ranks.write()
    latent_view(ranks.arenas[1], ranks.layout)[ranks.scene.batch.block_tables[1, 1]] = np.nan
    for seen in ranks.attend(replace(ranks.scene.batch, max_query_len=1))[0]:
        assert np.isnan(seen[0]).all()
        assert np.isfinite(seen[1]).all()


# ---- which form ----


@pytest.mark.parametrize(
    ("queries", "context", "expands"),
    [
        (1, 100_000, False),
        (8, 8, False),  # guesses
        (9, 9, True),
        (12, 1000, True),
        (10, 1000, False),
        (150, 100_000, False),
        (250, 100_000, True),
        (8192, 100_000, True),
    ],
)
def test_prompts_are_expanded_where_that_is_less_to_compute_and_to_send(
    queries: int, context: int, expands: bool
) -> None:
    """At DeepSeek-V3's sizes on eight ranks."""
    narrow = numpy_dtype("bfloat16")
    query = np.empty((0, 16, 192), narrow)
    up = UpProjections(np.empty((16, 128, 512), narrow), np.empty((16, 512, 128), narrow))
    lengths = HostLengths(np.array([0, queries, queries + 1]), np.array([context, context]))
    assert mla_ranks.are_expanded(lengths, query, up, 8).tolist() == [expands, False]


def test_what_does_not_fit_is_refused() -> None:
    ranks = RanksScene(LatentScene(LatentCase((1, 2), (20, 9))), 1)
    assert isinstance(ranks.kernels[0], SharedLatentKernels)
    with pytest.raises(ValueError, match="must know the lengths of a step's prompts: give on_host"):
        ranks.attend(ranks.scene.batch)
    ranks.ups = [UpProjections(up.key[:2], up.value) for up in ranks.ups]
    with pytest.raises(ValueError, match="do not fit"):
        ranks.attend(knowing(ranks.scene.batch))
    odd = RanksScene(LatentScene(LatentCase((1,), (9,), heads=2, plain=6)), 1)
    with pytest.raises(ConfigError, match=r"heads of 22, or latents of 32 \+ 16, are no whole 16 bytes"):
        odd.attend(replace(odd.scene.batch, max_query_len=1))


# ---- machine code ----

PUBLISHED = LatentShape(heads=16, rank=512, rotated=64, block_size=8, q_dtype="bfloat16", kv_dtype="bfloat16")


@pytest.mark.parametrize(
    ("sm", "kv_dtype", "block_size"),
    [
        pytest.param(*each, marks=() if each == (90, "bfloat16", 8) else pytest.mark.soak)
        for each in product(TARGETS, ("bfloat16", "int8"), (8, 16, 64))
    ],
)
def test_machine_code_of_eight_ranks_of_16_heads_does_not_spill(sm: int, kv_dtype: str, block_size: int) -> None:
    shape = ExpandedShape(replace(PUBLISHED, kv_dtype=kv_dtype, block_size=block_size), 128, 128, parts=8)
    for variant in mla_ranks.variants_of(shape, sm):
        compiled = variant_code(variant, Target(sm, cuda=12))
        few = 8 if sm >= 90 and kv_dtype == "int8" and block_size < 64 else 0
        assert compiled.spilled_bytes <= few  # an instruction, as of as many heads of one rank
        assert not compiled.is_serialised
        assert variant.kernel != "attend_latents" or "cp.async.c" in compiled.ptx


@pytest.mark.parametrize("sm", TARGETS)
def test_what_lies_around_it_moves_whole_vectors_and_does_not_spill(sm: int) -> None:
    compiled = machine_code(latent_ranks.SOURCE, elementwise.variant_of(numpy_dtype("bfloat16")), sm)
    assert spilled(compiled) == []
    assert {"v4.u32", "v4.f32"} <= accesses(compiled, "ld")
    assert "v4.u32" in accesses(compiled, "st")


def test_all_is_prepared_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = RanksScene(LatentScene(LatentCase((1, 20), (20, 30))), 2)
    ranks.write()
    case, prepared = ranks.scene.case, []
    for kernels in ranks.kernels:
        monkeypatch.setattr(kernels._latents.launcher, "prepare", prepared.append)
        kernels.prepare_shared(
            ranks.layout, case.heads, 2, case.rank, case.rotated, case.plain, case.value_dim, "float32"
        )  # fmt: skip
        workspace = kernels._latents._workspace._memory
        launch = kernels._latents.launcher.launch

        def known(variant: Any, *more: Any, launch: Any = launch) -> None:
            assert variant in prepared
            launch(variant, *more)

        monkeypatch.setattr(kernels._latents.launcher, "launch", known)
        monkeypatch.setattr(kernels._of_ranks._around, "_programs", None)
        monkeypatch.setattr(kernels._write, "_programs", None)
        assert workspace is not None
    assert_all_see_all(ranks, knowing(ranks.scene.batch))
