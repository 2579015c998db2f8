"""A KV head that ranks keep together: all see what one rank with all of its tokens would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.attention_scene import Case
from support.shared_heads import SharedScene

from headwise.kernels.base import AttentionBatch
from headwise.kernels.gqa import kv_views
from headwise.kernels.select import make_kernels
from headwise.kernels.shared_base import SharedKernels


@pytest.fixture(scope="module", params=["reference", "numba"])
def kernels(request: pytest.FixtureRequest) -> SharedKernels:
    found = make_kernels(request.param, threads=2)
    assert isinstance(found, SharedKernels)
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, int]:
    parts = draw(st.sampled_from([1, 2, 3, 4]))
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    case = Case(
        query_lens=tuple(draw(st.one_of(st.integers(0, 1), st.integers(1, length))) for length in lengths),
        seq_lens=tuple(lengths),
        policies=((0, 0),),
        share=parts * draw(st.sampled_from([1, 3])),
        head_dim=draw(st.sampled_from([16, 64])),
        value_dim=draw(st.sampled_from([0, 16])),
        block_size=parts * draw(st.sampled_from([1, 4, 16])),
        softcap=draw(st.sampled_from([0.0, 5.0])),
        has_sink_logits=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
    return case, parts


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=cases())
def test_any_batch_matches_dense_attention(kernels: SharedKernels, drawn: tuple[Case, int]) -> None:
    scene = SharedScene(*drawn)
    scene.write_shared(kernels)
    np.testing.assert_allclose(scene.attend_together(kernels), scene.expected(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn", "int4"])
def test_caches_of_fewer_bits(kernels: SharedKernels, dtype: str) -> None:
    case = Case((1, 40, 3), (90, 90, 7), ((0, 0),), share=4, head_dim=32, block_size=16, dtype=dtype)
    scene = SharedScene(case, 2)
    scene.write_shared(kernels)
    np.testing.assert_allclose(scene.attend_together(kernels), scene.expected(), rtol=0, atol=0.03)


def test_a_rank_keeps_its_own_tokens_and_nothing_else(kernels: SharedKernels) -> None:
    scene = SharedScene(Case((1, 5), (37, 21), ((0, 0),), share=2, block_size=8), parts=2)
    scene.write_shared(kernels)
    for part, arena in enumerate(scene.arenas):
        views = kv_views(arena, scene.layout.own)
        assert views[0].shape[2] == 4
        kept = [np.isfinite(view).all(axis=3) for view in views]
        for sequence, kv in enumerate(scene.kv):
            for position in range(part, len(kv[0]), 2):
                at = scene.batch.block_tables[sequence, position // 8], 0, position // 2 % 4
                for role, view in enumerate(views):
                    np.testing.assert_array_equal(view[at], kv[role][position, 0])
                    kept[role][at] = False
        assert not np.any(kept)


def test_steps_without_blocks_see_nothing() -> None:
    """As those that measure how much memory they take, before there is any cache."""
    kernels = make_kernels("numba", threads=1)
    assert isinstance(kernels, SharedKernels)
    scene = SharedScene(Case((1, 40), (1, 40), ((0, 0),), share=2, block_size=8), parts=2)
    scene.arenas = [np.empty(0, np.uint8) for _ in range(2)]
    tables = np.full_like(scene.batch.block_tables, -1)
    scene.batch = AttentionBatch(scene.batch.cu_seqlens_q, scene.batch.seq_lens, tables, 1)
    scene.write_shared(kernels)
    assert not scene.attend_together(kernels).any()
