"""What all kernels of latent attention with an indexer (DSA) promise, by an oracle that knows nothing of blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.indexed_scene import IndexedCase, IndexedScene
from support.latent_scene import kept_in

from headwise.errors import ConfigError
from headwise.kernels.cpu import dsa_attention
from headwise.kernels.cpu.chosen import chosen
from headwise.kernels.dsa import index_layout, index_scale_view, index_view, indexed_layout
from headwise.kernels.dsa_base import IndexedKernels, IndexQueries
from headwise.kernels.dsa_reference import ReferenceChosen, best
from headwise.kernels.mla import latent_layout, latent_scale_view, latent_view
from headwise.kernels.select import make_indexed_kernels

ROUNDING = 1e-5
"""Between sums of one row in other company: of more rows, some BLAS adds up in another order."""


@pytest.fixture(scope="module", params=["reference", "numba"])
def kernels(request: pytest.FixtureRequest) -> IndexedKernels:
    return make_indexed_kernels(request.param, threads=2)


def assert_right(kernels: IndexedKernels, case: IndexedCase, atol: float = 1e-4) -> None:
    scene = IndexedScene(case)
    scene.write(kernels)
    np.testing.assert_allclose(scene.attend(kernels), scene.expected(), rtol=0, atol=atol)


@st.composite
def cases(draw: st.DrawFn) -> IndexedCase:
    lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
    window = st.tuples(st.integers(1, 80), st.integers(0, 70))
    return IndexedCase(
        query_lens=tuple(draw(st.one_of(st.integers(0, 1), st.integers(1, length))) for length in lengths),
        seq_lens=tuple(lengths),
        policy=draw(st.one_of(st.just((0, 0)), window)),
        heads=draw(st.sampled_from([1, 2, 3, 8])),
        rank=draw(st.sampled_from([16, 32, 80])),
        plain=draw(st.sampled_from([8, 48])),
        value_dim=draw(st.sampled_from([12, 80])),
        block_size=draw(st.sampled_from([1, 3, 16, 64])),
        index_heads=draw(st.sampled_from([1, 4, 7])),
        index_dim=draw(st.sampled_from([32, 96])),
        top=draw(st.sampled_from([1, 2, 20, 64, 100, 150])),
        has_sinks=draw(st.booleans()),
        is_apart=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


def test_any_batch_matches_dense_attention_to_the_best_tokens(kernels: IndexedKernels) -> None:
    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(case=cases())
    def check(case: IndexedCase) -> None:
        assert_right(kernels, case)

    check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn", "int4"])
def test_layers_that_share_an_indexer_see_what_it_has_chosen_once(kernels: IndexedKernels, dtype: str) -> None:
    """Of latents of their own: what is chosen holds nothing of the layer that attends to it."""

    @settings(max_examples=15, suppress_health_check=list(HealthCheck))
    @given(case=cases())
    def check(case: IndexedCase) -> None:
        scene = IndexedScene(kept_in(dtype, replace(case, policy=(0, 0), is_apart=True)))
        behind = scene.next_layer()
        scene.write(kernels)
        chosen = scene.choose(kernels)
        scene.arena.view(np.uint8)[:] = 0xFF  # its keys and latents are not looked at any more
        super(IndexedScene, behind).write(kernels)
        right = behind.expected()
        near = 1e-4 if dtype == "float32" else 0.02 * np.abs(right).max(initial=1)
        np.testing.assert_allclose(behind.attend_to(kernels, chosen), right, rtol=0, atol=near)

    check()


def test_what_the_reference_chooses_is_what_it_says_of_each_query() -> None:
    scene, reference = IndexedScene(IndexedCase((3, 2), (50, 9), is_apart=True)), make_indexed_kernels("reference", 1)
    scene.write(reference)
    chosen = scene.choose(reference)
    assert isinstance(chosen, ReferenceChosen)
    for sequence, (found, is_broken) in chosen.of_sequences.items():
        np.testing.assert_array_equal(found, scene.visible(sequence))
        assert not is_broken.any()


@pytest.mark.parametrize("queries", [(1, 1), (60, 1), (60, 90)])
def test_the_geometry_of_the_published_model(kernels: IndexedKernels, queries: tuple[int, int]) -> None:
    latents = {"heads": 4, "rank": 512, "plain": 128, "rotated": 64, "value_dim": 128, "block_size": 64}
    assert_right(kernels, IndexedCase(queries, (300, 90), **latents, index_heads=64, index_dim=128, top=80), atol=2e-3)


def test_a_cache_of_bfloat16(kernels: IndexedKernels) -> None:
    # Queries and probabilities are rounded to bfloat16, too, where a CPU multiplies it; the indexer's are exact in it.
    assert_right(kernels, IndexedCase((1, 60), (300, 90), dtype="bfloat16", rank=64, top=50), atol=0.15)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "int4"])
def test_any_batch_over_a_quantised_cache(kernels: IndexedKernels, dtype: str) -> None:
    """What is chosen is exact; attention to it is as over a cache of bfloat16."""

    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(case=cases(), rotated_size=st.sampled_from([0.1, 1.0, 8.0]))
    def check(case: IndexedCase, rotated_size: float) -> None:
        scene = IndexedScene(kept_in(dtype, replace(case, rotated_size=rotated_size)))
        scene.write(kernels)
        right = scene.expected()
        np.testing.assert_allclose(scene.attend(kernels), right, rtol=0, atol=0.02 * np.abs(right).max(initial=1))

    check()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "int4"])
def test_scores_of_quantised_keys_are_those_of_what_is_stored(dtype: str) -> None:
    """Of keys with scales of their own, from one token to the next: the same tokens are chosen as by the reference."""
    both = []
    for name in ("reference", "numba"):
        scene = IndexedScene(kept_in(dtype, IndexedCase((1, 40), (300, 90), rank=64, top=40)))
        draw = np.random.default_rng(1)
        scene.keys = [draw.normal(0, draw.uniform(0.1, 3, (len(keys), 1)), keys.shape) for keys in scene.keys]
        scene.write(make_indexed_kernels(name, threads=2))
        both.append((scene.arena, scene.attend(make_indexed_kernels(name, threads=2))))
    np.testing.assert_array_equal(both[0][0], both[1][0])
    np.testing.assert_allclose(both[1][1], both[0][1], rtol=0, atol=0.02 * np.abs(both[0][1]).max())


def test_a_token_takes_scales_for_its_latent_and_its_key() -> None:
    layout = indexed_layout(64, 1, 576, 128, "float8_e4m3fn", rotated=64)
    assert layout.slot_bytes == 64 * (512 + 2 * 64 + 4 + 128 + 4)
    assert index_layout(64, 1, 128, "float8_e4m3fn").slot_bytes == 64 * (128 + 4)
    assert index_layout(64, 1, 128, "int4").roles[0].dtype == "int8"
    assert layout.slot_bytes < 0.56 * indexed_layout(64, 1, 576, 128, "bfloat16").slot_bytes


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_queries_and_scores_at_a_time_are_bounded(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    case = kept_in(dtype, IndexedCase((60, 1, 40), (150, 70, 40), heads=4, top=30))
    expected = IndexedScene(case)
    numba_kernels = make_indexed_kernels("numba", threads=2)
    expected.write(numba_kernels)
    together = expected.attend(numba_kernels)
    monkeypatch.setattr(dsa_attention, "SCORES", 3 * 150)
    monkeypatch.setattr(dsa_attention, "ABSORBED_BYTES", 7 * 4 * 4 * 48)
    monkeypatch.setattr(dsa_attention, "COPIED_BYTES", 5 * 30 * 192)
    np.testing.assert_allclose(expected.attend(numba_kernels), together, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_sequence_says_the_same_in_any_company(threads: int) -> None:
    numba_kernels = make_indexed_kernels("numba", threads)
    scene = IndexedScene(IndexedCase((70, 1, 40), (290, 300, 40), heads=8, rank=64))
    scene.index = replace(scene.index, query=np.random.default_rng(3).standard_normal((111, 3, 32), np.float32))
    scene.write(numba_kernels)
    together = scene.attend(numba_kernels)
    cu, lens, tables = scene.batch.cu_seqlens_q, scene.batch.seq_lens, scene.batch.block_tables
    for index in range(3):
        rows = slice(cu[index], cu[index + 1])
        alone = replace(
            scene.batch,
            cu_seqlens_q=np.array([0, cu[index + 1] - cu[index]], np.int32),
            seq_lens=lens[index : index + 1],
            block_tables=tables[2 * index : 2 * index + 2],
        )
        out, of_index = np.empty_like(together[rows]), scene.index
        asked = IndexQueries(of_index.query[rows], of_index.weights[rows], of_index.top)
        where = scene.arena, scene.layout, alone, scene.heads
        chosen_alone = numba_kernels.choose(asked, *where)
        numba_kernels.attend_chosen(scene.query[rows], scene.up, chosen_alone, *where, scale=scene.scale, out=out)
        np.testing.assert_allclose(out, together[rows], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_unmapped_tokens_are_neither_written_nor_chosen(kernels: IndexedKernels, dtype: str) -> None:
    scene = IndexedScene(kept_in(dtype, IndexedCase((1, 50), (90, 80))))
    scene.batch.block_tables[:, 1:3] = -1
    scene.write(kernels)
    mapped = set(scene.batch.block_tables[1::2].ravel().tolist()) - {-1}
    views = (latent_scale_view, index_scale_view) if dtype != "float32" else (latent_view, index_view)
    for view in (view(scene.arena, scene.layout) for view in views):
        untouched = [block for block in range(len(view)) if block not in mapped]
        assert untouched
        assert np.isnan(view[untouched]).all()
    reference = make_indexed_kernels("reference", threads=1)
    right = scene.attend(reference)
    atol = 0.02 * np.abs(right).max() if dtype != "float32" else 1e-4
    np.testing.assert_allclose(scene.attend(kernels), right, rtol=0, atol=atol)
    scene.batch.block_tables[:] = -1
    assert (scene.attend(kernels) == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_a_key_that_was_never_written_makes_what_is_computed_of_it_nan(kernels: IndexedKernels, dtype: str) -> None:
    scene = IndexedScene(kept_in(dtype, IndexedCase((2, 2), (90, 80))))
    scene.write(kernels)
    block = scene.batch.block_tables[1, 1]
    (index_scale_view if dtype != "float32" else index_view)(scene.arena, scene.layout)[block] = np.nan
    out = scene.attend(kernels)
    assert np.isnan(out[:2]).all()
    assert np.isfinite(out[2:]).all()


def test_of_equal_scores_the_first_are_chosen() -> None:
    scores = np.array([[2, 5, 2, -np.inf, 2, 7], [-np.inf, -np.inf, 1, -np.inf, -np.inf, -np.inf]], np.float32)
    for top, first, second in ((3, [0, 1, 5], [2]), (4, [0, 1, 2, 5], [2]), (9, [0, 1, 2, 4, 5], [2])):
        both = chosen(scores, top)
        assert [np.flatnonzero(row).tolist() for row in both] == [first, second]
        np.testing.assert_array_equal(both, best(scores.astype(np.float64), scores > -np.inf, top))


def test_wrong_use_is_refused_with_the_remedy() -> None:
    scene, numba_kernels = IndexedScene(IndexedCase((1,), (9,))), make_indexed_kernels("numba", threads=1)
    scene.write(numba_kernels)
    for index in (
        IndexQueries(scene.index.query[:, :2], scene.index.weights, 20),
        IndexQueries(scene.index.query[:, :, :16], scene.index.weights, 20),
        replace(scene.index, top=0),
    ):
        scene.index = index
        with pytest.raises(ValueError, match="do not fit"):
            scene.attend(numba_kernels)
    with pytest.raises(ConfigError, match=r"int2 cannot hold latents.*int8, bfloat16"):
        indexed_layout(16, 1, 64, 32, "int2")
    with pytest.raises(ConfigError, match=r"no keys of an indexer.*indexed_layout"):
        index_view(scene.arena, latent_layout(16, 1, 64))
    with pytest.raises(ConfigError, match="auto, numba, reference"):
        make_indexed_kernels("triton", threads=1)
