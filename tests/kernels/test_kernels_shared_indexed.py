"""Latents with an indexer that ranks keep together: what is chosen is the best of all ranks' tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.indexed_scene import IndexedCase, IndexedScene
from support.latent_scene import kept_in
from support.ranks_in_threads import RankInThread, on_each

from headwise.cache_controller.token_share import TokenShare
from headwise.kernels import shared_context
from headwise.kernels.base import AttentionBatch
from headwise.kernels.cpu.chosen import best_of_all
from headwise.kernels.dsa_base import SharedIndexedKernels
from headwise.kernels.select import make_indexed_kernels


@pytest.fixture(scope="module", params=["reference", "numba"])
def kernels(request: pytest.FixtureRequest) -> SharedIndexedKernels:
    found: SharedIndexedKernels = make_indexed_kernels(request.param, threads=2)
    return found


class SharedScene(IndexedScene):
    """A case whose latents and keys ``parts`` ranks keep together, and whose heads they share."""

    def __init__(self, case: IndexedCase, parts: int) -> None:
        super().__init__(case)
        self.parts = parts
        blocks = len(self.arena) // self.layout.block_bytes
        self.layout, self.key_layout = case.layouts(parts)
        self.arenas = [np.full(blocks * self.layout.block_bytes, 0xFF, np.uint8) for _ in range(parts)]

    def write_shared(self, kernels: SharedIndexedKernels) -> None:
        cu = np.cumsum([0, *self.case.seq_lens], dtype=np.int32)
        whole = AttentionBatch(cu, self.batch.seq_lens, self.batch.block_tables, 2)
        for part, arena in enumerate(self.arenas):
            share = TokenShare(part, self.parts)
            kernels.write_own(np.concatenate(self.latents), arena, self.layout.own, whole, self.heads, share)
            of_keys = arena, self.key_layout.own, whole, self.key_heads, share
            kernels.write_index_own(np.concatenate(self.keys), *of_keys)

    def attend_on(self, ranks: RankInThread, kernels: SharedIndexedKernels) -> np.ndarray:
        heads = self.case.heads // self.parts
        some = slice(ranks.share.part * heads, (ranks.share.part + 1) * heads)
        query, up = np.ascontiguousarray(self.query[:, some]), self.up.of_heads(some)
        out = np.full((len(query), heads, self.case.value_dim), np.nan, np.float32)
        where = self.arenas[ranks.share.part], self.layout.own, self.batch, self.heads
        of_keys = where[0], self.key_layout.own, self.batch, self.key_heads
        chosen = kernels.choose_shared(query, up, self.index, *of_keys, ranks)
        kernels.attend_chosen_shared(query, up, chosen, *where, ranks, scale=self.scale, out=out)
        return out

    def attend_together(self, kernels: SharedIndexedKernels) -> np.ndarray:
        return np.concatenate(on_each(self.parts, lambda ranks: self.attend_on(ranks, kernels)), axis=1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[IndexedCase, int]:
    parts = draw(st.sampled_from([1, 2, 3, 4]))
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    case = IndexedCase(
        query_lens=tuple(draw(st.one_of(st.integers(0, 1), st.integers(1, length))) for length in lengths),
        seq_lens=tuple(lengths),
        heads=parts * draw(st.sampled_from([1, 3])),
        rank=draw(st.sampled_from([16, 80])),
        block_size=parts * draw(st.sampled_from([1, 4, 16])),
        index_heads=draw(st.sampled_from([1, 4])),
        top=draw(st.sampled_from([1, 2, 20, 64])),
        has_sinks=draw(st.booleans()),
        is_apart=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
    return case, parts


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=cases(), many=st.sampled_from([2, 32]))
def test_any_batch_matches_dense_attention_to_the_best_tokens(
    kernels: SharedIndexedKernels, drawn: tuple[IndexedCase, int], many: int
) -> None:
    """Whose tokens are gathered for many queries, or for few of a sequence already."""
    scene = SharedScene(*drawn)
    scene.write_shared(kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_context, "MANY_QUERIES", many)
        found = scene.attend_together(kernels)
    right = scene.expected()
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-4 * np.abs(right).max(initial=1))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn", "int4"])
def test_caches_of_fewer_bits(kernels: SharedIndexedKernels, dtype: str) -> None:
    case = kept_in(dtype, IndexedCase((1, 40, 3), (90, 90, 7), heads=4, rank=64, block_size=16, top=20))
    for is_apart in (False, True):
        scene = SharedScene(replace(case, is_apart=is_apart), 2)
        scene.write_shared(kernels)
        right = scene.expected()
        np.testing.assert_allclose(scene.attend_together(kernels), right, rtol=0, atol=0.02 * np.abs(right).max())


def test_a_score_that_is_nan_on_one_rank_breaks_its_query_on_all(kernels: SharedIndexedKernels) -> None:
    scene = SharedScene(IndexedCase((1, 1), (60, 50), heads=2, block_size=8, top=20), 2)
    scene.keys[0][7] = np.nan  # of the second rank
    scene.write_shared(kernels)
    found = scene.attend_together(kernels)
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1]).all()


def test_of_equal_scores_the_earlier_tokens_are_the_best_of_all() -> None:
    """Three of each rank's own best, of which the first of the second one comes before all others."""
    scores = {0: [[5.0, 5.0, 4.0]], 1: [[5.0, 4.0, -np.inf]]}
    at = {0: [[1, 2, 0]], 1: [[0, 1, -1]]}

    def choose(ranks: RankInThread) -> list[bool]:
        part = ranks.share.part
        is_best, is_broken = best_of_all(np.array(scores[part], np.float32), np.array(at[part], np.int32), ranks)
        assert not is_broken.any()
        return is_best[0].tolist()

    assert on_each(2, choose) == [[True, True, False], [True, False, False]]
