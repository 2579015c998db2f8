"""A KV head that ranks keep together on GPUs: each attends with the queries of all to its own tokens, and to prompts'
queries all bring theirs.

The kernels run on NumPy arrays, on poisoned arenas, a thread for each rank; what is compared with is dense attention.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.attention_scene import Case
from support.covering import covering
from support.gpu.emulated_gpu import poisoned_array
from support.gpu.machine_code import TARGETS, variant_code

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.token_share import TokenShare
from headwise.errors import ConfigError
from headwise.kernels.base import HostLengths
from headwise.kernels.gqa import kv_views
from headwise.kernels.shared_base import SharedRotatingKernels

pytest.importorskip("triton")

from support.gpu.interpreted_attention import SMALL, SMALL_TMA
from support.gpu.shared_heads import RanksScene

from headwise.kernels.cuda import gathered, gqa_ranks, merge_jit, workspace
from headwise.kernels.cuda.attention import AttentionShape, Tuning, variant_of_ranks
from headwise.kernels.cuda.cubins import Target
from headwise.kernels.cuda.gqa_ranks import RanksShape

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy's, of infinities that are meant

ONE = ((0, 0),)
DTYPES = [
    *((each, each) for each in ("float32", "bfloat16", "float16")),
    *((asked, kept) for asked in ("float32", "bfloat16") for kept in ("int8", "float8_e4m3fn", "int4")),
]
CLOSE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 6e-3}


def closeness(asked: str, kept: str) -> float:
    """Of what is cached in fewer bits what was given to it was rounded to bfloat16 before."""
    return CLOSE[asked] + (4e-2 if asked == "bfloat16" and kept != asked else 0)


# ---- what one rank sees ----


def seen_by_numpy(scene: RanksScene, queries: np.ndarray, share: TokenShare) -> tuple[np.ndarray, np.ndarray]:
    """Means ``[ranks, tokens, heads, size]`` and log-sum-exps of ``queries``, as many in float64."""
    asked, cap = queries.astype(np.float64), scene.case.softcap
    means, sums = np.zeros(queries.shape), np.full(queries.shape[:3], -np.inf)
    for token, sequence in enumerate(np.flatnonzero(scene.case.query_lens)):
        key, value = (rows[share.part :: share.parts, 0].astype(np.float64) for rows in scene.kv[sequence])
        if len(key):
            scores = scene.scale * np.einsum("phd,nd->phn", asked[:, token], key)
            weights = np.exp(cap * np.tanh(scores / cap) if cap else scores)
            means[:, token] = weights / weights.sum(-1, keepdims=True) @ value
            sums[:, token] = np.log2(weights.sum(-1))
    return means, sums


@pytest.mark.parametrize(
    ("asked", "kept", "split", "softcap"),
    covering(DTYPES, [(32, 0.0), (1024, 0.0), (32, 5.0)], pairs=()),  # scores and means are float32, whatever is kept
)
def test_a_rank_tells_what_all_heads_see_of_its_tokens_and_the_logarithm_of_their_weights(
    asked: str, kept: str, split: int, softcap: float
) -> None:
    dim = 96 if kept == "int4" else 64
    case = Case((1, 0, 1, 1, 1), (290, 9, 1, 75, 2), ONE, 6, dim, 32, softcap=softcap, dtype=kept)
    scene = RanksScene(case, 2, asked, sms=10, tuning=replace(SMALL, min_split_tokens=split))
    attention, share = scene.kernels[1]._attention, TokenShare(1, 2)
    queries = poisoned_array((2, 4, 3, dim), numpy_dtype(asked))
    queries[:] = np.random.default_rng(3).standard_normal(queries.shape)
    out = poisoned_array((2, 4, 3, dim + workspace.BESIDE), np.float32)
    batch = replace(scene.batch, seq_lens=share.count(scene.batch.seq_lens).astype(np.int32))
    where, how = (scene.arenas[1], scene.layout.own, batch, scene.heads), {"scale": scene.scale, "softcap": softcap}
    for _ in range(2):  # the second time with counters as the first one left them
        attention.attend_of_ranks(queries, *where, **how, out=out)
    means, sums = seen_by_numpy(scene, queries, share)
    np.testing.assert_allclose(out[..., :dim], means, rtol=0, atol=closeness(asked, kept))
    np.testing.assert_allclose(out[..., dim], sums, rtol=1e-5, atol=closeness(asked, kept))
    assert (sums[:, 1] == -np.inf).all(), "the sequence of one token has none here"
    assert (out[:, 1, :, :dim] == 0).all()
    memory = attention._workspace._memory[attention._workspace._counters_bytes :].view(np.float32)
    assert np.isfinite(memory).any() == (split == 32), "there were splits, or none"


@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
def test_decodes_in_tiles_of_production(kept: str) -> None:
    case = Case((1, 1), (300, 70), ONE, share=16, head_dim=128, block_size=64, dtype=kept)
    scene = RanksScene(case, 4, "bfloat16", tuning=Tuning()).decoding()
    np.testing.assert_allclose(
        scene.attend_as_threads()[0].astype(float), scene.expected(), rtol=0, atol=closeness("bfloat16", kept)
    )


def test_parts_of_parts_are_merged_with_their_logarithms() -> None:
    scene = RanksScene(Case((1,), (1300,), ONE, share=2, head_dim=32, block_size=32), 2, sms=20).decoding()
    np.testing.assert_allclose(scene.attend_as_threads()[0], scene.expected(), rtol=0, atol=2e-5)
    splits = -(-1300 // 2 // 32)
    assert splits > merge_jit.GROUP.value


# ---- what all ranks see ----


def assert_all_see_all(scene: RanksScene) -> list[tuple[Any, ...]]:
    """Whether all heads see what dense attention does; what the first rank told the others."""
    found, meeting = scene.attend_as_threads()
    atol = closeness(scene.dtype.name, scene.case.dtype)
    np.testing.assert_allclose(found.astype(np.float64), scene.expected(), rtol=0, atol=atol)
    return meeting.log[0]


@pytest.mark.parametrize(
    ("asked", "kept", "softcap", "has_sinks", "parts"),
    covering(
        [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int8")],
        [(0.0, True), (5.0, False), (5.0, True)],
        [1, 2, 4],
    ),
)
def test_decodes_of_any_length_see_the_tokens_of_all_ranks(
    asked: str, kept: str, softcap: float, has_sinks: bool, parts: int
) -> None:
    case = Case((1, 1, 0, 1, 1), (1, 70, 9, 3, 34), ONE, 3 * parts, 64, 16 * parts, softcap, has_sinks, dtype=kept)
    scene = RanksScene(case, parts, asked).decoding()
    assert assert_all_see_all(scene) == [
        ("all_gather", (4, 3, 64), scene.dtype),
        ("exchange", (parts, 4, 3, 64 + workspace.BESIDE), np.float32),
    ]
    assert [name for name, _ in scene.launched()] == ["attend"]


@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
def test_values_that_are_smaller_than_keys(kept: str) -> None:
    """Of decodes, whose queries go to tokens, and of a prompt, whose tokens go to queries."""
    case = Case((1, 1), (70, 34), ONE, 4, 96, 32, has_sink_logits=True, dtype=kept, value_dim=64)
    scene = RanksScene(case, 2, "bfloat16").decoding()
    assert assert_all_see_all(scene)[1] == ("exchange", (2, 2, 2, 64 + workspace.BESIDE), np.float32)
    assert_all_see_all(RanksScene(replace(case, query_lens=(40, 1)), 2, "bfloat16").knowing())


def test_padding_is_nobodys_and_what_is_launched_and_told_hangs_on_shapes_alone() -> None:
    launched = []
    for query_lens, seq_lens in (((1, 1), (70, 40)), ((1, 0), (2, 70))):
        scene = RanksScene(Case(query_lens, seq_lens, ONE, share=4, head_dim=32, block_size=16), 2).decoding()
        right, tokens, batch = scene.expected(), sum(query_lens), scene.batch
        scene.batch = replace(
            batch,
            cu_seqlens_q=np.append(batch.cu_seqlens_q, batch.cu_seqlens_q[-1:]),
            seq_lens=np.append(batch.seq_lens, np.int32(0)),
            block_tables=np.concatenate([batch.block_tables, np.full_like(batch.block_tables[:1], 1 << 20)]),
        )
        scene.query = np.concatenate([scene.query, np.full_like(scene.query[:1], np.nan).repeat(3 - tokens, 0)])
        found, meeting = scene.attend_as_threads()
        np.testing.assert_allclose(found[:tokens], right, rtol=0, atol=2e-5)
        launched.append((scene.launched(0), scene.launched(1), meeting.log))
    assert launched[0] == launched[1]


@pytest.mark.parametrize(
    ("asked", "kept", "parts"),
    [
        *covering([(asked, kept) for asked, kept in DTYPES if asked == kept], [1, 2, 4], pairs=()),
        *covering([(asked, kept) for asked, kept in DTYPES if asked != kept], [1, 2, 4], pairs=()),
    ],
)
def test_prompts_see_the_blocks_that_all_ranks_bring(asked: str, kept: str, parts: int) -> None:
    """Of several sequences side by side at once, in one piece or some; blocks do not fill up."""
    case = Case((40, 20), (75, 21), ONE, parts, 32, 16 * parts, has_sink_logits=True, dtype=kept)
    scene = RanksScene(case, parts, asked).knowing()
    words, blocks = scene.layout.slot_bytes // 4, -(-75 // (16 * parts)) + -(-21 // (16 * parts))
    assert assert_all_see_all(scene) == [("all_gather", (blocks, words), np.int32)]


def test_what_is_brought_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three sequences fit together; slots go two at a time."""
    case = Case((40, 20, 9), (75, 21, 30), ONE, 2, 32, 32, 5.0)
    scene = RanksScene(case, 2).knowing()
    slot = scene.layout.slot_bytes
    monkeypatch.setattr(gqa_ranks, "CONTEXT_BYTES", 60 * 2 * 32 * 4)
    monkeypatch.setattr(gathered, "TOLD_BYTES", 2 * 2 * slot)
    assert [shape[0] for _, shape, _ in assert_all_see_all(scene)] == [2, 1, 2]


def test_prompts_by_tma() -> None:
    case = Case((40,), (150,), ONE, share=4, head_dim=128, block_size=32, dtype="bfloat16")
    scene = RanksScene(case, 2, "bfloat16", tuning=SMALL_TMA).knowing()
    assert_all_see_all(scene)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_steps_of_all_kinds_of_sequences(parts: int) -> None:
    """Decodes before, between and behind prompts, guesses, sequences without queries, and ones shorter than parts."""
    queries, lengths = (1, 12, 1, 3, 0, 20, 11, 2, 1, 1), (30, 40, 1, 3, 9, 20, 60, 34, 2, 65)
    scene = RanksScene(Case(queries, lengths, ONE, 2 * parts, 32, 8 * parts, 0.0, True), parts).knowing()
    told, rows = assert_all_see_all(scene), 1 + 1 + 3 + 2 + 1 + 1
    assert [(name, shape[-3]) for name, shape, _ in told[:2]] == [("all_gather", rows), ("exchange", rows)]
    assert [name for name, _, _ in told[2:]] == ["all_gather"] * 2, "of one prompt, and of two side by side"


@pytest.mark.parametrize("kept", ["float32", "int8"])
def test_a_few_queries_of_each_sequence_are_rows(kept: str) -> None:
    case = Case((3, 8, 2), (3, 41, 70), ONE, share=4, head_dim=64, block_size=64, has_sink_logits=True, dtype=kept)
    told = assert_all_see_all(RanksScene(case, 4).knowing())
    assert [name for name, _, _ in told] == ["all_gather", "exchange"]


def test_several_groups_and_slots() -> None:
    """The head is not the first of its block, nor its group the first of the tables."""
    scene = RanksScene(Case((1, 12, 3), (30, 40, 9), ONE, share=2, head_dim=32, block_size=16), 2)
    batch, layout = scene.batch, scene.layout
    scene.layout = replace(layout, slots=3)
    arenas = [arena.reshape(-1, layout.slot_bytes) for arena in scene.arenas]
    scene.arenas = [
        np.stack([np.full_like(arena, 0xFF), np.full_like(arena, 0xFF), arena], axis=1).reshape(-1) for arena in arenas
    ]
    tables = np.stack([np.full_like(batch.block_tables, 1 << 20), batch.block_tables], axis=1)
    scene.batch = replace(batch, groups=2, block_tables=tables.reshape(6, -1))
    scene.heads = replace(scene.heads, group=np.ones(1, np.int32), slot=np.full(1, 2, np.int32))
    assert_all_see_all(scene.knowing())


def test_queries_and_results_may_have_gaps_between_tokens() -> None:
    scene = RanksScene(Case((1, 20, 2), (20, 25, 9), ONE, share=4, head_dim=32, block_size=16), 2).knowing()
    scene.gap_heads = 3
    assert_all_see_all(scene)


class WithoutItsSecondBlock(RanksScene):
    def visible(self, sequence: int, head: int) -> np.ndarray:
        seen = super().visible(sequence, head)
        seen[:, 16:32] = False
        return seen


def test_unmapped_tokens_are_not_seen() -> None:
    case = Case((1, 20, 4), (60, 50, 40), ONE, share=2, head_dim=32, block_size=16)
    scene = WithoutItsSecondBlock(case, 2).knowing()
    assert (scene.batch.block_tables[:, 1] == -1).all()
    assert_all_see_all(scene)
    scene.batch.block_tables[:] = -1
    assert (scene.attend_as_threads()[0] == 0).all()


def test_a_part_of_a_cache_that_was_never_written_makes_what_is_computed_of_it_nan() -> None:
    scene = RanksScene(Case((1, 1), (40, 9), ONE, share=2, head_dim=32, block_size=16), 2).decoding()
    kv_views(scene.arenas[1], scene.layout.own)[1][scene.batch.block_tables[0, 1]] = np.nan
    found, _ = scene.attend_as_threads()
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1]).all()


def test_what_cancels_out_between_ranks_leaves_no_rounding_errors_of_theirs() -> None:
    """Their means are a thousand times what is left of them."""
    scene = RanksScene(Case((1,), (64,), ONE, share=2, head_dim=32, block_size=32, dtype="bfloat16"), 2, "bfloat16")
    scene.query[:], draw = 0, np.random.default_rng(2).uniform(1, 2, (32, 1, 32))
    key, value = scene.kv[0]
    value[::2], value[1::2] = 1000 * draw, -1000 * draw + 8 * draw
    for rows in (key, value):
        rows[:] = rows.astype(scene.dtype).astype(np.float32)
    scene.write_shared(scene.kernels[0])
    found, _ = scene.decoding().attend_as_threads()
    np.testing.assert_allclose(found.astype(np.float64), scene.expected(), rtol=1e-2)


def test_sequences_are_brought_together_where_they_lie_side_by_side_and_fit() -> None:
    queries, lengths = [9, 10, 1, 30, 8, 40, 50], [100, 100, 9, 400, 300, 100, 500]
    known = HostLengths(np.cumsum([0, *queries]), np.array(lengths))
    whole = [range(2), range(3, 4), range(5, 7)]
    assert gqa_ranks.brought_together(known, 512) == whole
    most = gqa_ranks.CONTEXT_BYTES // 400  # tokens of 400 of them at a time
    assert gqa_ranks.brought_together(known, most) == [*whole[:2], range(5, 6), range(6, 7)]


def test_what_does_not_fit_is_refused() -> None:
    scene = RanksScene(Case((1, 2), (20, 9), ONE, share=2, head_dim=32, block_size=16), 1)
    assert isinstance(scene.kernels[0], SharedRotatingKernels)
    with pytest.raises(ValueError, match="must know the lengths of a step's prompts: give on_host"):
        scene.attend_as_threads()
    shape = AttentionShape(4, 64, 16, "bfloat16", "bfloat16")
    with pytest.raises(ConfigError, match="context_parallel_size 3 of KV heads is not supported on a GPU: choose a p"):
        scene.kernels[0].prepare_shared(scene.layout.own, RanksShape(shape, 3))
    with pytest.raises(ConfigError, match="block_size 24 is not supported"):
        scene.kernels[0].prepare_shared(scene.layout.own, RanksShape(replace(shape, block_size=24), 2))


def test_all_is_prepared_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((1, 20), (20, 30), ONE, share=4, head_dim=32, block_size=16, softcap=5.0, has_sink_logits=True)
    scene = RanksScene(case, 2).knowing()
    for kernels in scene.kernels:
        own = AttentionShape.of(scene.layout.own, 2, 1, "float32", 5.0, sink_logits=True)
        kernels.prepare_shared(scene.layout.own, RanksShape(own, 2))
        made = set(kernels._attention._ready), set(kernels._attention._of_ranks)
        assert made == ({RanksShape(own, 2).whole}, {RanksShape(own, 2).of_ranks})
        monkeypatch.setattr(kernels._attention.launcher, "prepare", None)
        monkeypatch.setattr(kernels._attention, "allocate", None)
        for part in (kernels._of_ranks._around, kernels._of_ranks._gathered, kernels._write):
            monkeypatch.setattr(part, "_programs", None)
    assert_all_see_all(scene)


# ---- machine code ----


@pytest.mark.parametrize(
    ("sm", "kv_dtype", "head_dim", "block_size"),
    [
        pytest.param(*each, marks=() if each == (90, "bfloat16", 128, 16) else pytest.mark.soak)
        for each in product(TARGETS, ("bfloat16", "int8"), (64, 128, 256), (16, 64))
    ],
)
def test_machine_code_of_eight_heads_of_all_ranks_does_not_spill(
    sm: int, kv_dtype: str, head_dim: int, block_size: int
) -> None:
    shape = RanksShape(AttentionShape(2, head_dim, block_size, "bfloat16", kv_dtype), parts=4)
    compiled = variant_code(variant_of_ranks(shape.of_ranks, sm), Target(sm, cuda=12))
    assert compiled.spilled_bytes == 0
    assert not compiled.is_serialised
    assert "cp.async.c" in compiled.ptx
    assert "griddepcontrol" not in compiled.ptx, "what comes before counts tokens"
