"""KV writes: every token lands where its block table says, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.gpu.cuda_shim import ShimPrograms

from headwise.cache_controller.layout import BlockLayout, Role
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.kv_write import CudaKvWrite
from headwise.kernels.gqa import gqa_layout, kv_views
from headwise.kernels.select import make_kernels

Write = Callable[[np.ndarray, np.ndarray, np.ndarray, BlockLayout, AttentionBatch, HeadTable], None]


@pytest.fixture(scope="module", params=["reference", "numba", "cuda"])
def write_kv(request: pytest.FixtureRequest) -> Write:
    """That of a GPU is executed by a host shim."""
    if request.param == "cuda":
        return CudaKvWrite(ShimPrograms()).write_kv
    return make_kernels(request.param, threads=2).write_kv


@pytest.fixture
def head_dims(request: pytest.FixtureRequest) -> tuple[int, int]:
    return (64, 96) if request.node.callspec.params["write_kv"] == "cuda" else (16, 64)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 3, 16, 64]),
    is_large=st.booleans(),
    tail_bytes=st.sampled_from([0, 64]),
    seed=st.integers(0, 2**16),
)
def test_tokens_land_in_their_blocks_and_nothing_else_changes(
    write_kv: Write,
    head_dims: tuple[int, int],
    lengths: list[tuple[int, int]],
    block_size: int,
    is_large: bool,
    tail_bytes: int,
    seed: int,
) -> None:
    rng, head_dim = np.random.default_rng(seed), head_dims[is_large]
    seq_lens = np.array([queries + before for queries, before in lengths], np.int32)
    cu = np.concatenate([[0], np.cumsum([queries for queries, _ in lengths])]).astype(np.int32)
    columns = -(-int(seq_lens.max()) // block_size)
    rows = 2 * len(lengths)
    tables = rng.permutation(rows * columns + 3)[: rows * columns].reshape(rows, columns).astype(np.int32)
    tables[rng.random(tables.shape) < 0.3] = -1
    layout = replace(gqa_layout(block_size, 2, head_dim), tail_bytes=tail_bytes)
    arena = rng.integers(0, 256, (rows * columns + 3) * layout.block_bytes, dtype=np.uint8)
    heads = HeadTable(*(np.array(column, np.int32) for column in ([1, 0, 1], [0, 1, 1], [0, 0, 0], [0, 0, 0])))
    key, value = rng.standard_normal((2, int(cu[-1]), 3, head_dim)).astype(np.float32)

    expected = arena.copy()
    for views, tokens in zip(kv_views(expected, layout), (key, value), strict=True):
        for sequence, (queries, before) in enumerate(lengths):
            for token in range(queries):
                for head in range(3):
                    block = tables[sequence * 2 + heads.group[head], (before + token) // block_size]
                    if block >= 0:
                        offset = (before + token) % block_size
                        views[block, heads.slot[head], offset] = tokens[cu[sequence] + token, head]

    write_kv(key, value, arena, layout, AttentionBatch(cu, seq_lens, tables, 2), heads)
    np.testing.assert_array_equal(arena, expected)


def test_views_share_the_arena_and_skip_the_padding_of_each_role() -> None:
    layout = gqa_layout(block_size=3, slots=2, head_dim=4)  # 48 bytes a role, padded to 64
    arena = np.zeros(5 * layout.block_bytes, np.uint8)
    keys, values = kv_views(arena, layout)
    assert keys.shape == values.shape == (5, 2, 3, 4)
    keys[:], values[:] = 1.0, 2.0
    floats = arena.view(np.float32).reshape(5, 2, 2, 16)
    assert (floats[:, :, 0, :12] == 1.0).all()
    assert (floats[:, :, 1, :12] == 2.0).all()
    assert (floats[:, :, :, 12:] == 0.0).all()


def test_views_refuse_what_is_not_an_arena_of_the_layout() -> None:
    layout = gqa_layout(block_size=2, slots=1, head_dim=16)
    with pytest.raises(ConfigError, match=f"{layout.block_bytes + 1} bytes"):
        kv_views(np.zeros(layout.block_bytes + 1, np.uint8), layout)
    latent = BlockLayout(block_size=2, slots=1, roles=(Role("latent", (16,), "float32"),))
    with pytest.raises(ConfigError, match="gqa_layout"):
        kv_views(np.zeros(latent.block_bytes, np.uint8), latent)
