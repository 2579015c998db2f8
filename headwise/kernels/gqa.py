"""The block layout of grouped-query attention, and typed views of an arena of such blocks.

Multi-head and multi-query attention are its two ends: one query head per KV head, or one KV head in all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout, Role
from headwise.errors import ConfigError


def gqa_layout(block_size: int, slots: int, head_dim: int, dtype: str = "float32") -> BlockLayout:
    """The layout of blocks that hold, per member and token, one ``key`` and one ``value`` of ``(head_dim,)``."""
    roles = (Role("key", (head_dim,), dtype), Role("value", (head_dim,), dtype))
    return BlockLayout(block_size=block_size, slots=slots, roles=roles)


def head_dim_of(layout: BlockLayout) -> int:
    """The head dimension of a grouped-query layout.

    Raises:
        ConfigError: the layout is that of another attention variant.
    """
    if [role.name for role in layout.roles] != ["key", "value"] or layout.roles[0].shape != layout.roles[1].shape:
        raise ConfigError(f"layout {layout.identity} is not one of grouped-query attention; build it with gqa_layout()")
    return layout.roles[0].shape[0]


def kv_views(arena: NDArray[np.uint8], layout: BlockLayout) -> tuple[NDArray[Any], NDArray[Any]]:
    """Keys and values of an arena, each ``[num_blocks, slots, block_size, head_dim]``, sharing its memory.

    Raises:
        ConfigError: the arena is not a whole number of blocks, or the layout is of another attention variant.
    """
    head_dim = head_dim_of(layout)
    if arena.nbytes % layout.block_bytes:
        raise ConfigError(f"an arena of {arena.nbytes} bytes is not a whole number of {layout.block_bytes}-byte blocks")
    shape = (arena.nbytes // layout.block_bytes, layout.slots, layout.block_size, head_dim)

    def view(role: Role) -> NDArray[Any]:
        strides = (layout.block_bytes, layout.slot_bytes, role.token_bytes, np.dtype(role.dtype).itemsize)
        return np.ndarray(shape, role.dtype, buffer=arena, offset=layout.role_offsets[role.name], strides=strides)

    return view(layout.roles[0]), view(layout.roles[1])
