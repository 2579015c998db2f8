"""What all kernels of latent attention promise, by a dense oracle that knows nothing of blocks, on poisoned arenas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.latent_scene import LatentCase, LatentScene, kept_in

from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch
from headwise.kernels.cpu import mla_attention
from headwise.kernels.gqa import gqa_layout
from headwise.kernels.mla import latent_layout, latent_view
from headwise.kernels.mla_base import LatentKernels, UpProjections
from headwise.kernels.mla_reference import ReferenceLatentKernels
from headwise.kernels.select import make_latent_kernels


@pytest.fixture(scope="module", params=["reference", "numba"])
def kernels(request: pytest.FixtureRequest) -> LatentKernels:
    return make_latent_kernels(request.param, threads=2)


@pytest.fixture
def always_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The expanded form from two queries on, of two heads at a time."""
    monkeypatch.setattr(mla_attention, "EXPANDED_QUERIES", 2)
    monkeypatch.setattr(mla_attention, "EXPANSION_COST", -np.inf)
    monkeypatch.setattr(mla_attention, "EXPANDED_BYTES", 2 * 8 * 100 * 32)


def assert_right(kernels: LatentKernels, case: LatentCase, atol: float = 1e-4) -> None:
    scene = LatentScene(case)
    scene.write(kernels)
    np.testing.assert_allclose(scene.attend(kernels), scene.expected(), rtol=0, atol=atol)


@st.composite
def cases(draw: st.DrawFn) -> LatentCase:
    lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
    query_lens = [draw(st.one_of(st.integers(0, 1), st.integers(1, length))) for length in lengths]
    window = st.tuples(st.integers(1, 80), st.integers(0, 70))
    return LatentCase(
        query_lens=tuple(query_lens),
        seq_lens=tuple(lengths),
        policy=draw(st.one_of(st.just((0, 0)), window)),
        heads=draw(st.sampled_from([1, 2, 3, 8])),
        rank=draw(st.sampled_from([16, 32, 80])),
        plain=draw(st.sampled_from([8, 16, 48])),
        value_dim=draw(st.sampled_from([12, 16, 80])),
        block_size=draw(st.sampled_from([1, 3, 16, 64])),
        has_sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


def test_any_batch_matches_dense_attention(kernels: LatentKernels) -> None:
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(case=cases())
    def check(case: LatentCase) -> None:
        assert_right(kernels, case)

    check()


@pytest.mark.usefixtures("always_expanded")
def test_any_batch_matches_dense_attention_where_latents_are_expanded() -> None:
    numba_kernels = make_latent_kernels("numba", threads=2)

    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(case=cases())
    def check(case: LatentCase) -> None:
        assert_right(numba_kernels, case)

    check()


@pytest.mark.parametrize("queries", [(1, 1), (60, 1), (60, 90)])
def test_the_geometry_of_published_models(kernels: LatentKernels, queries: tuple[int, int]) -> None:
    case = LatentCase(queries, (120, 90), heads=4, rank=512, plain=128, rotated=64, value_dim=128, block_size=64)
    assert_right(kernels, case, atol=2e-3)


def test_a_cache_of_bfloat16(kernels: LatentKernels) -> None:
    # Queries and probabilities are rounded to bfloat16, too, where a CPU multiplies it.
    assert_right(kernels, LatentCase((1, 60), (300, 90), dtype="bfloat16", rank=64), atol=0.15)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "int4"])
def test_any_batch_over_a_quantised_cache(kernels: LatentKernels, dtype: str) -> None:
    """As exactly as over one of bfloat16: queries of a chunk are that, too, and of int8 those of one token integers."""

    @settings(max_examples=15, suppress_health_check=list(HealthCheck))
    @given(case=cases(), rotated_size=st.sampled_from([0.1, 1.0, 8.0]))
    def check(case: LatentCase, rotated_size: float) -> None:
        scene = LatentScene(kept_in(dtype, replace(case, rotated_size=rotated_size)))
        scene.write(kernels)
        right = scene.expected()
        np.testing.assert_allclose(scene.attend(kernels), right, rtol=0, atol=0.02 * np.abs(right).max(initial=1))

    check()


def test_both_forms_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, numba_kernels = LatentScene(LatentCase((70, 5), (90, 40))), make_latent_kernels("numba", threads=1)
    scene.write(numba_kernels)
    expanded = scene.attend(numba_kernels)
    monkeypatch.setattr(mla_attention, "EXPANDED_QUERIES", 1000)
    absorbed = scene.attend(numba_kernels)
    np.testing.assert_allclose(absorbed, expanded, rtol=0, atol=1e-4)
    assert (absorbed[:70] != expanded[:70]).any()  # they are two ways
    # The few queries are absorbed in both, to the bit as they are alone: beside others a BLAS may add up otherwise.
    of_few = AttentionBatch(np.array([0, 5], np.int32), scene.batch.seq_lens[1:], scene.batch.block_tables[2:], 2)
    alone = np.empty_like(expanded[70:])
    where = scene.arena, scene.layout, of_few, scene.heads
    numba_kernels.attend_latent(scene.query[70:], scene.up, *where, scale=scene.scale, out=alone)
    np.testing.assert_array_equal(expanded[70:], alone)


def test_a_context_that_would_take_too_much_memory_is_not_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_attention, "MOST_EXPANDED", 89)
    monkeypatch.setattr(mla_attention.NumbaLatentKernels, "_attend_expanded", None)  # to be called by none
    assert_right(make_latent_kernels("numba", threads=1), LatentCase((70,), (90,)))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_sequence_says_the_same_in_any_company(threads: int) -> None:
    numba_kernels = make_latent_kernels("numba", threads)
    scene = LatentScene(LatentCase((70, 1, 40), (90, 300, 40), heads=8, rank=64))
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
        out = np.empty_like(together[rows])
        where = scene.arena, scene.layout, alone, scene.heads
        numba_kernels.attend_latent(scene.query[rows], scene.up, *where, scale=scene.scale, out=out)
        np.testing.assert_allclose(out, together[rows], rtol=0, atol=1e-6)


def test_unmapped_tokens_are_neither_written_nor_seen(kernels: LatentKernels) -> None:
    scene = LatentScene(LatentCase((1, 50), (90, 80)))
    scene.batch.block_tables[:, 1:3] = -1
    scene.write(kernels)
    view = latent_view(scene.arena, scene.layout)
    mapped = set(scene.batch.block_tables[1::2].ravel().tolist()) - {-1}
    untouched = [block for block in range(len(view)) if block not in mapped]
    assert untouched
    assert np.isnan(view[untouched]).all()
    np.testing.assert_allclose(scene.attend(kernels), scene.attend(ReferenceLatentKernels()), rtol=0, atol=1e-4)
    scene.batch.block_tables[:] = -1
    assert (scene.attend(kernels) == 0).all()


def test_wrong_use_is_refused_with_the_remedy() -> None:
    scene, numba_kernels = LatentScene(LatentCase((1,), (9,))), make_latent_kernels("numba", threads=1)
    scene.write(numba_kernels)
    scene.up = UpProjections(scene.up.key[:2], scene.up.value)
    with pytest.raises(ValueError, match="do not fit"):
        scene.attend(numba_kernels)
    scene.up = replace(LatentScene(scene.case).up, sink_logits=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="do not fit"):
        scene.attend(numba_kernels)
    with pytest.raises(ConfigError, match=r"int2 cannot hold latents.*int8, bfloat16"):
        latent_layout(16, 1, 64, "int2")
    with pytest.raises(ConfigError, match=r"int4 takes latents \(MLA\) of a multiple of 32 .*not of 48: choose .*int8"):
        latent_layout(16, 1, 48, "int4", 16)
    with pytest.raises(ConfigError, match="latent_layout"):
        latent_view(scene.arena, gqa_layout(16, 1, 16))
    with pytest.raises(ConfigError, match="auto, numba, reference"):
        make_latent_kernels("triton", threads=1)
