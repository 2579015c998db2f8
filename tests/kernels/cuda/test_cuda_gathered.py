"""Contexts that ranks keep together, gathered on each of their GPUs: the same as in host memory, on the shim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.gpu.emulated_gpu import poisoned_array
from support.gpu.machine_code import TARGETS, accesses, machine_code, spilled
from support.ranks_in_threads import on_each

from headwise.cache_controller.layout import BlockLayout, Role
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable, HostLengths
from headwise.kernels.cuda import gathered
from headwise.kernels.cuda.gathered import GatheredContexts
from headwise.kernels.dsa import indexed_layout, key_roles, latent_roles
from headwise.kernels.gqa import gqa_layout
from headwise.kernels.shared_context import gather_context

pytest.importorskip("triton")

from support.gpu.interpreted_latents import gpu_parts

LAYOUTS = [
    *(indexed_layout(8, 3, 48, 32, dtype, 16) for dtype in ("float32", "bfloat16", "int8", "float8_e4m3fn")),
    indexed_layout(8, 3, 64, 32, "int4", 32),
    *(gqa_layout(8, 2, 32, dtype) for dtype in ("float32", "float16", "int8", "int4")),
]

PARTS_OF_MEMBERS = [
    (replace(layout, lead_bytes=lead, tail_bytes=64), roles(layout))
    for lead, layout in zip((0, 64, 192), LAYOUTS, strict=False)
    for roles in (key_roles, latent_roles)
]

HEADS = HeadTable(*(np.array([value], np.int32) for value in (1, 1, 0, 0)))


def batch_of(context: int) -> AttentionBatch:
    """A sequence of so many tokens behind another one, in the second of two groups, without its second block."""
    tables = np.array([[0, 0, 0, 0], [1, 2, 3, 9], [0, 0, 0, 0], [5, -1, 7, 9]], np.int32)
    lengths = HostLengths(np.array([0, 1, 4], np.int32), np.array([3, context], np.int32))
    return AttentionBatch(lengths.cu_seqlens_q, lengths.seq_lens, tables, 2, on_host=lengths)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.roles[0].name + " " + layout.roles[0].dtype)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_contexts_are_gathered_as_in_host_memory_whatever_blocks_have(layout: BlockLayout, parts: int) -> None:
    layout, batch = replace(layout, block_size=4 * parts, parts=parts), batch_of(4 * parts * 2 + 1)

    def gather(ranks: Any) -> None:
        arena = poisoned_array((10 * layout.own.block_bytes,), np.uint8)
        arena[:] = np.random.default_rng(ranks.share.part).integers(0, 256, len(arena))
        where = ranks, arena, layout.own, batch, HEADS
        found, wanted = GatheredContexts(gpu_parts())(*where, range(1, 2)), gather_context(*where, 1)
        assert (found.layout, found.rows) == (wanted.layout, slice(1, 4))
        for name in ("cu_seqlens_q", "seq_lens"):
            np.testing.assert_array_equal(getattr(found.batch, name), getattr(wanted.batch, name))
            np.testing.assert_array_equal(getattr(found.batch.on_host, name), getattr(wanted.batch, name))
        assert (found.batch.groups, found.batch.max_query_len) == (1, 3)
        assert found.batch.block_tables.tolist() == [[0, -1, 2]]
        assert [int(each[0]) for each in (found.heads.group, found.heads.slot)] == [0, 0]
        blocks = found.arena.reshape(3, -1)[[0, 2]], wanted.arena.reshape(2, -1)  # which has no others
        for role in layout.roles:
            at = slice(first := wanted.layout.role_offsets[role.name], first + role.token_bytes * layout.block_size)
            np.testing.assert_array_equal(blocks[0][:, at], blocks[1][:, at])

    on_each(parts, gather)


@pytest.mark.parametrize(("layout", "roles"), PARTS_OF_MEMBERS)
def test_some_of_a_members_roles_are_gathered_wherever_it_lies_in_a_block(
    layout: BlockLayout, roles: tuple[Role, ...]
) -> None:
    layout, batch = replace(layout, block_size=8, parts=2), batch_of(17)

    def gather(ranks: Any) -> None:
        arena = poisoned_array((10 * layout.own.block_bytes,), np.uint8)
        arena[:] = np.random.default_rng(ranks.share.part).integers(0, 256, len(arena))
        where = ranks, arena, layout.own, batch, HEADS
        found = GatheredContexts(gpu_parts())(*where, range(1, 2), roles)
        some, every = gather_context(*where, 1, roles), gather_context(*where, 1)
        assert found.layout == some.layout
        assert found.layout.roles == roles
        for role in roles:
            parts = [
                context.arena.reshape(blocks, -1)[:: -(-blocks // 2)][:, at : at + role.token_bytes * layout.block_size]
                for context, blocks in ((found, 3), (some, 2), (every, 2))
                for at in [context.layout.role_offsets[role.name]]
            ]
            np.testing.assert_array_equal(parts[0], parts[2])
            np.testing.assert_array_equal(parts[1], parts[2])

    on_each(2, gather)


def test_a_role_that_is_no_whole_words_is_refused() -> None:
    odd = indexed_layout(16, 2, 48, 30, "int8", 16)

    def gather(ranks: Any) -> None:
        arena = poisoned_array((10 * odd.block_bytes,), np.uint8)
        with pytest.raises(ConfigError, match="indexer of 30 bytes a token is not in words of 4"):
            GatheredContexts(gpu_parts())(ranks, arena, odd, batch_of(9), HEADS, range(1, 2))

    on_each(1, gather)


@pytest.mark.parametrize("sm", TARGETS)
def test_what_gathers_moves_whole_vectors_and_does_not_spill(sm: int) -> None:
    compiled = machine_code(gathered.SOURCE, {}, sm)
    assert spilled(compiled) == []
    assert {"v4.u32"} <= accesses(compiled, "ld") & accesses(compiled, "st")
