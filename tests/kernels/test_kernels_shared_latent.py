"""Latents that ranks keep together: what each has of them, and that all see what one rank with all of them would."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.latent_scene import LatentCase, LatentScene, kept_in
from support.ranks_in_threads import RankInThread, on_each

from headwise.cache_controller.token_share import TokenShare
from headwise.kernels import shared_context
from headwise.kernels.base import AttentionBatch
from headwise.kernels.cpu import mla_attention
from headwise.kernels.mla import latent_view
from headwise.kernels.mla_base import SharedLatentKernels
from headwise.kernels.select import make_latent_kernels
from headwise.kernels.token_ranks import merged, rows_over_share


@pytest.fixture(scope="module", params=["reference", "numba"])
def kernels(request: pytest.FixtureRequest) -> SharedLatentKernels:
    found = make_latent_kernels(request.param, threads=2)
    assert isinstance(found, SharedLatentKernels)
    return found


class SharedScene(LatentScene):
    """A case whose latents ``parts`` ranks keep together, and whose heads they share."""

    def __init__(self, case: LatentCase, parts: int) -> None:
        super().__init__(case)
        self.parts = parts
        self.layout = replace(self.layout, parts=parts)
        blocks = len(self.arena) // replace(self.layout, parts=1).block_bytes
        self.arenas = [np.full(blocks * self.layout.block_bytes, 0xFF, np.uint8) for _ in range(parts)]

    def write_shared(self, kernels: SharedLatentKernels) -> None:
        """Prompts first, then token by token what the batch asks with."""
        before = [length - queries for length, queries in zip(self.case.seq_lens, self.case.query_lens, strict=True)]
        self._write_up_to(kernels, [0] * len(before), before)
        self._write_up_to(kernels, before, list(self.case.seq_lens))

    def _write_up_to(self, kernels: SharedLatentKernels, starts: list[int], ends: list[int]) -> None:
        cu = np.cumsum([0, *np.subtract(ends, starts)], dtype=np.int32)
        batch = AttentionBatch(cu, np.array(ends, np.int32), self.batch.block_tables, 2)
        latents = np.concatenate([rows[a:b] for rows, a, b in zip(self.latents, starts, ends, strict=True)])
        for part, arena in enumerate(self.arenas):
            kernels.write_own(latents, arena, self.layout.own, batch, self.heads, TokenShare(part, self.parts))

    def attend_on(self, ranks: RankInThread, kernels: SharedLatentKernels) -> np.ndarray:
        heads = self.case.heads // self.parts
        some = slice(ranks.share.part * heads, (ranks.share.part + 1) * heads)
        query, up = np.ascontiguousarray(self.query[:, some]), self.up.of_heads(some)
        out = np.full((len(query), heads, self.case.value_dim), np.nan, np.float32)
        where = self.arenas[ranks.share.part], self.layout.own, self.batch, self.heads
        kernels.attend_shared(query, up, *where, ranks, scale=self.scale, out=out)
        return out

    def attend_together(self, kernels: SharedLatentKernels) -> np.ndarray:
        return np.concatenate(on_each(self.parts, lambda ranks: self.attend_on(ranks, kernels)), axis=1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[LatentCase, int]:
    parts = draw(st.sampled_from([1, 2, 3, 4]))
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    case = LatentCase(
        query_lens=tuple(draw(st.one_of(st.integers(0, 1), st.integers(1, length))) for length in lengths),
        seq_lens=tuple(lengths),
        heads=parts * draw(st.sampled_from([1, 3])),
        rank=draw(st.sampled_from([16, 80])),
        plain=draw(st.sampled_from([8, 48])),
        block_size=parts * draw(st.sampled_from([1, 4, 16])),
        has_sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
    return case, parts


def assert_right(kernels: SharedLatentKernels, case: LatentCase, parts: int, atol: float = 1e-4) -> None:
    scene = SharedScene(case, parts)
    scene.write_shared(kernels)
    right = scene.expected()
    np.testing.assert_allclose(scene.attend_together(kernels), right, rtol=0, atol=atol * np.abs(right).max(initial=1))


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=cases())
def test_any_batch_matches_dense_attention(kernels: SharedLatentKernels, drawn: tuple[LatentCase, int]) -> None:
    assert_right(kernels, *drawn)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=cases())
def test_so_does_it_where_latents_are_gathered_and_expanded(
    drawn: tuple[LatentCase, int],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_context, "MANY_QUERIES", 2)
        patch.setattr(mla_attention, "EXPANDED_QUERIES", 2)
        patch.setattr(mla_attention, "EXPANSION_COST", -np.inf)
        assert_right(make_latent_kernels("numba", threads=2), *drawn)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn", "int4"])
def test_caches_of_fewer_bits(kernels: SharedLatentKernels, dtype: str) -> None:
    case = kept_in(dtype, LatentCase((1, 40, 3), (90, 90, 7), heads=4, rank=64, block_size=16))
    assert_right(kernels, case, 2, atol=0.02)


def test_a_rank_keeps_its_own_tokens_and_nothing_else(kernels: SharedLatentKernels) -> None:
    scene = SharedScene(LatentCase((1, 5), (37, 21), block_size=8), parts=2)
    scene.write_shared(kernels)
    for part, arena in enumerate(scene.arenas):
        view = latent_view(arena, scene.layout.own)
        assert view.shape[2] == 4
        slot, kept = int(scene.heads.slot[0]), np.isfinite(view).all(axis=3)
        for sequence, latents in enumerate(scene.latents):
            table = scene.batch.block_tables[2 * sequence + 1]
            for position in range(part, len(latents), 2):
                at = table[position // 8], slot, position // 2 % 4
                np.testing.assert_array_equal(view[at], latents[position])
                kept[at] = False
        assert not kept.any()


def test_rows_are_exchanged_piece_by_piece_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, case = make_latent_kernels("numba", threads=1), LatentCase((1, 1, 30), (5, 60, 31), heads=4)
    monkeypatch.setattr(shared_context, "EXCHANGED_BYTES", 4 * 4 * 48 * 10)
    scene = SharedScene(case, parts=2)
    scene.write_shared(kernels)
    asked = on_each(2, lambda ranks: (scene.attend_on(ranks, kernels), ranks.asked)[1])
    assert [shape[0] for shape in asked[0][::2]] == [10, 10, 10, 2]  # absorbed queries of so many rows
    assert_right(kernels, case, 2)


def test_tokens_of_a_sequence_that_follow_each_other_are_said_to() -> None:
    batch = AttentionBatch(
        np.array([0, 4, 5], np.int32), np.array([9, 3], np.int32), np.zeros((2, 2), np.int32), groups=1
    )
    _, own = rows_over_share(batch, TokenShare(1, 2), np.arange(5))
    assert own.seq_lens.tolist() == [3, 3, 4, 4, 1]  # of positions 5 to 8, and 2
    assert own.follows is not None
    assert own.follows.tolist() == [0, 0, 1, 0, 0]
    seeing, own = rows_over_share(batch, TokenShare(3, 4), np.array([3, 4]))
    assert seeing.tolist() == [0]  # the other one sees three tokens, none of which is the fourth
    assert own.seq_lens.tolist() == [2]


def test_means_are_merged_by_the_sums_of_their_weights() -> None:
    means = np.array([[[[1.0, 2.0]], [[9.0, 9.0]]], [[[5.0, 6.0]], [[7.0, 7.0]]]], np.float32)
    sums = np.array([[[200.0], [-np.inf]], [[201.0], [-np.inf]]], np.float32)
    np.testing.assert_allclose(merged(means, sums), [[[11 / 3, 14 / 3]], [[0, 0]]], rtol=1e-6)
