"""Latent attention on a GPU, with and without an indexer: the kernels on NumPy arrays, and their machine code.

They are run by Triton's interpreter, the shim and cuBLAS on the host, on poisoned arenas, against dense oracles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.gpu.machine_code import accesses, machine_code, spilled, variant_code
from support.indexed_scene import IndexedCase, IndexedScene
from support.latent_scene import LatentCase, LatentScene

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.errors import ConfigError
from headwise.kernels.base import HostLengths
from headwise.kernels.dsa import index_dtype, index_scale_view, index_view
from headwise.kernels.dsa_base import IndexKeys, IndexQueries
from headwise.kernels.dsa_reference import ReferenceIndexedKernels, best
from headwise.kernels.mla import latent_layout, latent_scale_view, latent_view, load_latents
from headwise.kernels.mla_base import UpProjections
from headwise.kernels.mla_quantised import quantise_keys
from headwise.kernels.mla_reference import ReferenceLatentKernels
from headwise.kernels.nibbles import GROUP, INT4

pytest.importorskip("triton")

from support.gpu.interpreted_latents import gpu_parts, indexed_kernels, latent_kernels

from headwise.kernels.cuda import dsa, expanded, indexer, latents, mla
from headwise.kernels.cuda.cubins import Target
from headwise.kernels.cuda.dsa import IndexShape
from headwise.kernels.cuda.dsa_kernels import CudaIndexedKernels
from headwise.kernels.cuda.expanded import ExpandedShape
from headwise.kernels.cuda.mla import LatentShape, check_latents
from headwise.kernels.cuda.mla_kernels import CudaLatentKernels
from headwise.kernels.cuda.tiles import SHARED_BYTES, SHARED_BYTES_FROM_90

QUANTISED = ["int8", "float8_e4m3fn", "int4"]

Case = TypeVar("Case", bound=LatentCase)


def kept_in(dtype: str, case: Case) -> Case:
    """The case over a cache of that dtype; in int4 with latents whose two parts are whole groups."""
    if dtype != INT4:
        return replace(case, dtype=dtype)
    return replace(case, dtype=dtype, rank=case.rank + -case.rank % GROUP, rotated=GROUP)


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy's, of infinities that are meant


def assert_right(case: LatentCase, kernels: Any, atol: float = 1e-4) -> None:
    scene = IndexedScene(case) if isinstance(case, IndexedCase) else LatentScene(case)
    scene.write(kernels)
    np.testing.assert_allclose(scene.attend(kernels), scene.expected(), rtol=0, atol=atol)


@st.composite
def cases(draw: st.DrawFn, make: Callable[..., LatentCase]) -> LatentCase:
    lengths = draw(st.lists(st.integers(1, 80), min_size=1, max_size=3))
    window = st.tuples(st.integers(1, 60), st.integers(0, 50))
    return make(
        query_lens=tuple(draw(st.one_of(st.integers(0, 1), st.integers(0, min(length, 12)))) for length in lengths),
        seq_lens=tuple(lengths),
        policy=draw(st.one_of(st.just((0, 0)), window)),
        heads=draw(st.sampled_from([1, 3, 20])),
        rank=draw(st.sampled_from([16, 48])),
        block_size=draw(st.sampled_from([1, 4, 16, 64])),
        seed=draw(st.integers(0, 2**16)),
    )


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases(LatentCase), dtype=st.sampled_from(["float32", *QUANTISED]))
def test_any_batch_matches_dense_attention(case: LatentCase, dtype: str) -> None:
    assert_right(kept_in(dtype, case), latent_kernels())


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases(IndexedCase), top=st.sampled_from([1, 2, 20, 64]), rows=st.integers(1, 9),
       dtype=st.sampled_from(["float32", *QUANTISED]))  # fmt: skip
def test_any_batch_matches_dense_attention_to_the_best_tokens(
    case: IndexedCase, top: int, rows: int, dtype: str
) -> None:
    assert_right(kept_in(dtype, replace(case, top=top)), indexed_kernels(score_bytes=4 * 80 * rows))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_layers_that_share_an_indexer_see_what_it_has_chosen_once(dtype: str) -> None:
    scene = IndexedScene(kept_in(dtype, IndexedCase((1, 0, 6), (90, 9, 40), heads=4, is_apart=True)))
    behind, kernels = scene.next_layer(), indexed_kernels()
    scene.write(kernels)
    super(IndexedScene, behind).write(kernels)
    chosen = scene.choose(kernels)
    for each in (scene, behind):
        right = each.expected()
        near = 1e-4 if dtype == "float32" else 0.02 * np.abs(right).max()
        np.testing.assert_allclose(each.attend_to(kernels, chosen), right, rtol=0, atol=near)
    launched = [name for name, _ in kernels._latents.launcher.launched]
    assert (launched.count("score_tokens"), launched.count("attend_chosen")) == (1, 2)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_of_quantised_keys_with_scales_of_their_own_those_of_the_reference_are_chosen(dtype: str) -> None:
    """And what is stored are its bytes, those of a CPU: tiers and peers exchange them."""
    draw = np.random.default_rng(1)
    scene = IndexedScene(kept_in(dtype, IndexedCase((1, 0, 6), (90, 9, 40), heads=18, top=30)))
    scene.keys = [draw.normal(0, draw.uniform(0.1, 3, (len(keys), 1)), keys.shape) for keys in scene.keys]
    scene.keys = [keys.astype(np.float32) for keys in scene.keys]
    scene.keys[0][5] = 0
    scene.write(ReferenceIndexedKernels())
    right, stored = scene.attend(ReferenceIndexedKernels()), scene.arena.copy()
    scene.arena[:] = 0xFF
    kernels = indexed_kernels(sms=10)
    scene.write(kernels)
    np.testing.assert_array_equal(scene.arena, stored)
    np.testing.assert_allclose(scene.attend(kernels), right, rtol=0, atol=1e-4)
    assert np.isfinite(kernels._latents._workspace._memory.view(np.float32)).any(), "there were splits"


@pytest.mark.parametrize("make", [LatentCase, IndexedCase])
def test_splits_of_unlike_lengths_are_merged(make: Callable[..., LatentCase]) -> None:
    case = make((1, 0, 1), (200, 9, 33), heads=18)
    kernels: Any
    if isinstance(case, IndexedCase):
        case, kernels = replace(case, top=150), indexed_kernels(sms=10)
    else:
        kernels = latent_kernels(sms=10)
    for _ in range(2):  # the second time with what the first one left
        assert_right(case, kernels)
    workspace = kernels._latents._workspace
    assert not workspace._memory[: workspace._counters_bytes].any()
    assert np.isfinite(workspace._memory[workspace._counters_bytes :].view(np.float32)).any(), "there were splits"


def attend_knowing(scene: LatentScene, kernels: CudaLatentKernels) -> np.ndarray:
    """As `LatentScene.attend`, where the host knows lengths."""
    known = HostLengths(scene.batch.cu_seqlens_q.copy(), scene.batch.seq_lens.copy())
    scene.batch = replace(scene.batch, on_host=known, max_query_len=max(scene.case.query_lens))
    return scene.attend(kernels)


@pytest.mark.parametrize("dtype", ["float32", *QUANTISED])
@pytest.mark.parametrize("case", [
    LatentCase((1, 40, 0, 30, 1), (60, 40, 9, 75, 33), block_size=16),
    LatentCase((50,), (50,), policy=(20, 5), block_size=4, heads=2, plain=24, value_dim=20),
])  # fmt: skip
def test_prompts_are_attended_to_in_the_expanded_form_piece_by_piece(case: LatentCase, dtype: str) -> None:
    scene, kernels = LatentScene(kept_in(dtype, case)), latent_kernels()
    kernels._expanded.piece = 32
    scene.write(kernels)
    np.testing.assert_allclose(attend_knowing(scene, kernels), scene.expected(), rtol=0, atol=1e-4)
    launched = [name for name, _ in kernels._latents.launcher.launched]
    assert launched.count("attend_expanded") == sum(
        -(-length // 32) for length, queries in zip(case.seq_lens, case.query_lens, strict=True) if queries > 1
    )
    assert launched.count("attend_latents") == (1 in case.query_lens), "those that decode stay in the absorbed form"


def test_heads_are_expanded_some_at_a_time_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.kernels.cuda.expanded.PIECE_BYTES", 2 * 64 * (8 + 12) * 4 + 2 * 40 * 14 * 4)
    scene, kernels = LatentScene(LatentCase((40,), (64,), heads=5)), latent_kernels()
    scene.write(kernels)
    np.testing.assert_allclose(attend_knowing(scene, kernels), scene.expected(), rtol=0, atol=1e-4)
    assert [name for name, _ in kernels._latents.launcher.launched].count("attend_expanded") == 3


def test_a_few_queries_of_a_long_context_stay_in_the_absorbed_form() -> None:
    scene, kernels = LatentScene(LatentCase((2,), (70,))), latent_kernels()
    scene.write(kernels)
    np.testing.assert_allclose(attend_knowing(scene, kernels), scene.expected(), rtol=0, atol=1e-4)
    assert "attend_expanded" not in dict(kernels._latents.launcher.launched)


@pytest.mark.parametrize(
    "sm", [pytest.param(80, marks=pytest.mark.soak), 90, pytest.param(100, marks=pytest.mark.soak)]
)
def test_prompts_in_the_expanded_form_keep_all_in_registers(sm: int) -> None:
    shape = ExpandedShape(LatentShape(16, 512, 64, 64, "bfloat16", "bfloat16"), 128, 128)
    gather, attend = expanded.variants_of(shape, sm)
    compiled = variant_code(attend, Target(sm, 12))
    assert compiled.spilled_bytes == 0
    assert compiled.shared_bytes <= SHARED_BYTES.get(sm, SHARED_BYTES_FROM_90)
    assert variant_code(gather, Target(sm, 12)).spilled_bytes == 0


def error_in_bfloat16(case: IndexedCase, kernels: CudaIndexedKernels) -> float:
    """Of attention whose arguments all are bfloat16, against the answer by what is stored of the same numbers."""
    narrow, scene = numpy_dtype("bfloat16"), IndexedScene(case)
    scene.query, up, asked = scene.query.astype(narrow), scene.up, scene.index
    scene.up = UpProjections(up.key.astype(narrow), up.value.astype(narrow))
    scene.latents, scene.keys = ([rows.astype(narrow) for rows in each] for each in (scene.latents, scene.keys))
    scene.index = IndexQueries(asked.query.astype(narrow), asked.weights.astype(narrow), asked.top)
    scene.write(kernels)
    out = np.zeros((len(scene.query), case.heads, case.value_dim), narrow)
    where = scene.arena, scene.layout, scene.batch, scene.heads
    kernels.attend_chosen(scene.query, scene.up, scene.choose(kernels), *where, scale=scene.scale, out=out)
    scene.query, scene.index = scene.query.astype(np.float32), asked
    scene.up = UpProjections(*(part.astype(np.float32) for part in (scene.up.key, scene.up.value)))
    scene.latents, scene.keys = ([rows.astype(np.float32) for rows in each] for each in (scene.latents, scene.keys))
    expected = scene.expected()
    return float(np.linalg.norm(out.astype(np.float64) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("kept", QUANTISED)
def test_queries_of_bfloat16_see_what_a_quantised_cache_keeps(kept: str) -> None:
    case = kept_in(kept, IndexedCase((1, 3), (70, 40), heads=4, top=30, rotated_size=4.0))
    assert error_in_bfloat16(case, indexed_kernels()) < 0.02


@pytest.mark.soak
@pytest.mark.parametrize("kept", ["bfloat16", *QUANTISED])
def test_the_sizes_and_tiles_of_published_models_in_bfloat16(kept: str) -> None:
    case = IndexedCase(
        (1, 2), (150, 70), heads=16, rank=512, plain=128, rotated=64, value_dim=128, block_size=64, index_heads=64,
        index_dim=128, top=80, dtype=kept,
    )  # fmt: skip
    error = error_in_bfloat16(case, indexed_kernels(tuning=mla.TUNING))
    assert error < 0.02, "queries and latents are rounded once more when they are absorbed, and mixed"


def test_heads_are_attended_to_some_at_a_time_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.kernels.cuda.mla_kernels.ABSORBED_BYTES", 1)
    assert_right(LatentCase((1, 2), (20, 9), heads=40, rank=16), latent_kernels())


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_unmapped_tokens_are_neither_written_nor_seen_nor_chosen(dtype: str) -> None:
    for kernels, scene, reference in (
        (latent_kernels(), LatentScene(kept_in(dtype, LatentCase((1, 5), (60, 50)))), ReferenceLatentKernels()),
        (indexed_kernels(), IndexedScene(kept_in(dtype, IndexedCase((1, 5), (60, 50)))), ReferenceIndexedKernels()),
    ):
        scene.batch.block_tables[:, 1:3] = -1
        scene.write(kernels)
        blocks = scene.arena.reshape(-1, scene.layout.block_bytes)
        untouched = sorted(set(range(len(blocks))) - set(scene.batch.block_tables.flat))
        assert untouched
        assert (blocks[untouched] == 0xFF).all()
        right = scene.attend(reference)
        np.testing.assert_allclose(scene.attend(kernels), right, rtol=0, atol=1e-4)
        scene.batch.block_tables[:] = -1
        assert (scene.attend(kernels) == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_key_that_was_never_written_makes_what_is_computed_of_it_nan(dtype: str) -> None:
    scene, kernels = IndexedScene(IndexedCase((2, 2), (90, 80), dtype=dtype)), indexed_kernels()
    scene.write(kernels)
    view = index_view if dtype == "float32" else index_scale_view
    view(scene.arena, scene.layout)[scene.batch.block_tables[1, 1]] = np.nan
    out = scene.attend(kernels)
    assert np.isnan(out[:2]).all()
    assert np.isfinite(out[2:]).all()


def test_padding_writes_nothing_and_what_is_launched_depends_on_shapes_alone() -> None:
    launched = []
    for query_lens, seq_lens in (((1, 1), (70, 40)), ((1, 0), (9, 70))):
        scene, kernels = IndexedScene(IndexedCase(query_lens, seq_lens)), indexed_kernels()
        scene.write(kernels)
        right = scene.attend(kernels)
        before, tokens = scene.arena.copy(), sum(query_lens)
        kernels._latents.launcher.launched.clear()
        batch = scene.batch
        cu = np.concatenate([batch.cu_seqlens_q, batch.cu_seqlens_q[-1:]])
        tables = np.concatenate([batch.block_tables, np.full_like(batch.block_tables[:2], 1 << 20)])
        columns = np.full((len(tables), 5 - tables.shape[1]), 1 << 20, np.int32)
        scene.batch = replace(
            batch, cu_seqlens_q=cu, seq_lens=np.append(batch.seq_lens, np.int32(0)), max_query_len=1,
            block_tables=np.ascontiguousarray(np.hstack([tables, columns])),
        )  # fmt: skip
        spare = 3 - tokens
        scene.query = np.concatenate([scene.query, np.full_like(scene.query[:1], np.nan).repeat(spare, 0)])
        asked = scene.index
        padded = (np.concatenate([rows, np.full_like(rows[:1], np.nan).repeat(spare, 0)]) for rows in
                  (asked.query, asked.weights))  # fmt: skip
        scene.index = IndexQueries(*padded, asked.top)
        latent = np.full((3, 48), np.nan, np.float32)
        latent[:tokens] = [scene.latents[at][-1] for at, count in enumerate(query_lens) if count]
        kernels.write_latent(latent, scene.arena, scene.layout, scene.batch, scene.heads)
        np.testing.assert_array_equal(scene.arena, before)
        np.testing.assert_allclose(scene.attend(kernels)[:tokens], right, rtol=0, atol=1e-6)
        launched.append(kernels._latents.launcher.launched)
    assert launched[0] == launched[1]


def test_what_carries_positions_is_rotated_on_the_way_and_keys_are_normed() -> None:
    rng = np.random.default_rng(0)
    scene = IndexedScene(IndexedCase((3, 1), (9, 20), rank=32, rotated=16, index_dim=32))
    tokens, heads = 4, 3
    angles = rng.uniform(0, 6, (tokens, 1, 8)).astype(np.float32)
    cosines, sines = np.cos(angles), np.sin(angles)

    def turned(rows: np.ndarray) -> np.ndarray:
        low, high = rows[..., :8], rows[..., 8:16]
        return np.concatenate([low * cosines - high * sines, high * cosines + low * sines, rows[..., 16:]], -1)

    query = rng.standard_normal((tokens, heads, 24)).astype(np.float32)
    projected = rng.standard_normal((tokens, 32 + 16)).astype(np.float32)
    asked = IndexQueries(rng.standard_normal((tokens, 3, 32)).astype(np.float32), scene.index.weights, 20)
    weight, bias = (rng.standard_normal(32).astype(np.float32) for _ in range(2))
    keys = rng.standard_normal((tokens, 64)).astype(np.float32)[:, :32]
    expected_query = query.copy()
    expected_query[..., 8:] = turned(query[..., 8:])
    expected_asked = turned(asked.query)
    centred = keys - keys.mean(1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-6) * weight + bias
    kernels, where = indexed_kernels(), (scene.arena, scene.layout, scene.batch, scene.heads)
    kernels.write_latent_rope(query, projected[:, :32], projected[:, 32:], cosines, sines, *where)
    kernels.write_index_rope(asked, IndexKeys(keys, weight, bias, 1e-6), cosines, sines, *where)
    np.testing.assert_allclose(query, expected_query, atol=1e-6)
    np.testing.assert_allclose(asked.query, expected_asked, atol=1e-6)
    table, slot = scene.batch.block_tables, scene.heads.slot[0]
    for row, (sequence, position) in enumerate([(0, 6), (0, 7), (0, 8), (1, 19)]):
        at = table[2 * sequence + 1, position // 16], slot, position % 16
        latent = np.concatenate([projected[row, :32], turned(projected[:, None, 32:])[row, 0]])
        np.testing.assert_allclose(latent_view(scene.arena, scene.layout)[at], latent, atol=1e-6)
        np.testing.assert_allclose(
            index_view(scene.arena, scene.layout)[at], turned(normed[:, None])[row, 0], atol=3e-5
        )


@pytest.mark.parametrize("kept", QUANTISED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_latents_are_those_of_the_rule(dtype: str, kept: str) -> None:
    scene = LatentScene(kept_in(kept, LatentCase((1,), (40,), rank=48, rotated_size=8.0)))
    rows = scene.latents[0].astype(numpy_dtype(dtype))
    rows[3], rows[4, 5], rows[4, -3] = 0, 1e6, -1e5
    scene.latents = [rows]
    scene.write(latent_kernels())
    found = scene.arena.copy()
    scene.arena[:] = 0xFF
    scene.write(ReferenceLatentKernels())
    np.testing.assert_array_equal(found, scene.arena)
    rows[5, 2] = rows[6, -1] = np.nan
    scene.write(latent_kernels())
    table, within = scene.batch.block_tables[1], np.arange(scene.case.block_size)
    read = load_latents(scene.arena, scene.layout, (table[:1, None], scene.heads.slot[0], within), rows.shape[1])
    assert np.flatnonzero(np.isnan(read[0]).any(axis=1)).tolist() == [5, 6]


@pytest.mark.parametrize("kept", QUANTISED[:2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_keys_are_those_of_the_rule_and_one_that_is_no_number_has_no_scale(dtype: str, kept: str) -> None:
    scene, kernels = IndexedScene(IndexedCase((1,), (40,), index_dim=48, dtype=kept)), indexed_kernels()
    rows = np.random.default_rng(0).standard_normal((40, 48)).astype(numpy_dtype(dtype))
    rows[3], rows[7, 20] = 0, np.nan
    scene.keys, scene.latents = [rows], [scene.latents[0].astype(rows.dtype)]
    scene.latents[0][9, -1] = np.nan
    scene.write(kernels)
    stored, scales = quantise_keys(rows, kept)
    at = scene.batch.block_tables[1], scene.heads.slot[0]
    found = index_view(scene.arena, scene.layout)[at].reshape(-1, 48)[:40]
    wanted = np.delete(np.arange(40), 7)
    np.testing.assert_array_equal(found[wanted], stored[wanted])
    np.testing.assert_array_equal(index_scale_view(scene.arena, scene.layout)[at].reshape(-1)[:40], scales)
    of_latents = latent_scale_view(scene.arena, scene.layout)[at].reshape(-1)[:40]
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(of_latents)), [9])


@pytest.mark.parametrize("top", [1, 5, 24, 100, 300])
def test_of_equal_scores_the_first_are_chosen(top: int) -> None:
    rng, chooser = np.random.default_rng(top), indexer.CudaIndexer(gpu_parts().programs, threads=64)
    scene = IndexedScene(IndexedCase((3,), (200,)))
    scores = rng.choice([-np.inf, -3.5, -0.0, 0.0, 1e-30, 2.0, 2.0000002, 1e30], (3, 200)).astype(np.float32)
    places, counts = np.full((3, top), 77, np.int32), np.zeros(3, np.int32)
    where = scene.layout, scene.batch, scene.heads
    chooser.choose(scores, 0, np.dtype(np.float32), *where, places, counts)
    for row, seen in enumerate((198, 199, 200)):
        exact = scores[row : row + 1, :seen].astype(np.float64)
        wanted = np.flatnonzero(best(exact, exact > -np.inf, top)[0])
        at = scene.batch.block_tables[1][wanted // 16] * 16 + wanted % 16
        np.testing.assert_array_equal(places[row, : counts[row]], at)


# ---- machine code ----

PUBLISHED = LatentShape(heads=16, rank=512, rotated=64, block_size=64, q_dtype="bfloat16", kv_dtype="bfloat16")
INDEX = IndexShape(heads=64, dim=128, block_size=64, dtype="bfloat16", key_dtype="bfloat16")


@pytest.mark.parametrize(
    ("sm", "heads", "kv_dtype", "some"),
    [
        (90, 16, "bfloat16", slice(1, 4, 2)),  # of one token, of latents and of chosen ones
        *(
            pytest.param(sm, heads, kv_dtype, slice(None), marks=pytest.mark.soak)
            for sm in (80, 90, 100)
            for heads, kv_dtype in [(16, "bfloat16"), (64, "bfloat16"), *product((16, 128), ("int8", "int4"))]
        ),
        *(
            pytest.param(sm, heads, "float8_e4m3fn", slice(None), marks=pytest.mark.soak)
            for sm in (90, 100)
            for heads in (16, 128)
        ),
    ],
)
def test_machine_code_at_published_sizes_does_not_spill(sm: int, heads: int, kv_dtype: str, some: slice) -> None:
    shape = replace(PUBLISHED, heads=heads, kv_dtype=kv_dtype)
    variants = mla.variants_of(shape, sm) + dsa.variants_of(shape, replace(INDEX, key_dtype=index_dtype(kv_dtype)), sm)
    for variant in variants[some]:
        compiled = variant_code(variant, Target(sm, cuda=12))
        few = (
            16
            if (heads, kv_dtype) == (128, "float8_e4m3fn")
            else 8
            if (sm, heads, kv_dtype) == (100, 128, "int8")
            else 0
        )
        assert compiled.spilled_bytes <= few  # an instruction or two
        assert not compiled.is_serialised
        assert "cp.async.c" in compiled.ptx
        if variant.kernel == "attend_latents" and heads == 16 and sm == 90 and variant.num_stages == 2:
            assert compiled.shared_bytes <= 113 << 10, "two programs of a decode share a multiprocessor"


@pytest.mark.parametrize("source", [latents.SOURCE, indexer.SOURCE])
def test_writes_are_whole_vectors_and_do_not_spill(source: str) -> None:
    rule = {latents.SOURCE: latents, indexer.SOURCE: indexer}[source]
    for variant in (each for each in rule.all_variants() if each["NUMBER"] == "BF16"):
        compiled = machine_code(source, variant, 90)
        assert spilled(compiled) == []
        assert "v4.u32" in accesses(compiled, "ld")


# ---- refusals ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 576}, "kv_lora_rank 576 is not supported on a GPU: only multiples of 16 up to 512"),
        ({"rotated": 24}, "qk_rope_head_dim 24 is not supported on a GPU"),
        (
            {"kv_dtype": "float16"},
            "kv_dtype float16 cannot keep latents of dtype bfloat16.*choose bfloat16, int8, float8_e4m3fn or int4",
        ),
        ({"block_size": 48}, "block_size 48.*power of two"),
        ({"kv_dtype": "int4", "rank": 48}, "int4 of latents .* kv_lora_rank of a multiple of 32 on a GPU, not 48"),
    ],
)
def test_what_the_kernels_do_not_serve_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_latents(replace(PUBLISHED, **changes), 90)
    with pytest.raises(ConfigError, match=r"compute capability 7\.5 is too old"):
        check_latents(PUBLISHED, 75)
    with pytest.raises(
        ConfigError, match=r"float8_e4m3fn needs compute capability 8\.9.*has 8\.0: choose kv_dtype int8"
    ):
        check_latents(replace(PUBLISHED, kv_dtype="float8_e4m3fn"), 80)
    with pytest.raises(ConfigError, match="index_head_dim 512 of bfloat16"):
        dsa.check_index(replace(INDEX, dim=512))
    with pytest.raises(
        ConfigError, match=r"kv_dtype float16 cannot keep .*keys of dtype bfloat16.*choose bfloat16, int8"
    ):
        dsa.check_index(replace(INDEX, key_dtype="float16"))


def test_wrong_arrays_are_refused() -> None:
    scene = LatentScene(LatentCase((1,), (9,)))
    kernels = CudaLatentKernels(gpu_parts())
    with pytest.raises(ConfigError, match="keys of float32 cannot be kept as float16 on a GPU: give"):
        indexer.variant_of("float32", "float16")
    with pytest.raises(ConfigError, match="latents of float16 cannot be kept as float32"):
        kernels.write_latent(scene.latents[0].astype(np.float16), scene.arena, scene.layout, scene.batch, scene.heads)
    scene.up = UpProjections(scene.up.key[:2], scene.up.value)
    with pytest.raises(ValueError, match="do not fit"):
        scene.attend(kernels)
    with pytest.raises(ValueError, match=r"latents of 512 \+ 64 are not what"):
        LatentShape.of(latent_layout(16, 1, 64), 4, 512, 64, "float32")
