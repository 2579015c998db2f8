"""The block layout of latent attention with an indexer (DSA), and typed views of an arena of such blocks.

Beside a token's latent a layer keeps a key that the token is chosen by: a few light heads score all tokens before a
query, and it attends to the best of them alone (DeepSeek-V3.2-Exp, 2025).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout, Role
from headwise.errors import ConfigError
from headwise.kernels.gqa import QUANTISED, role_view
from headwise.kernels.mla import is_latent, latent_layout

INDEXER = "indexer"


def indexed_layout(block_size: int, slots: int, width: int, index_dim: int, dtype: str = "float32") -> BlockLayout:
    """The layout of blocks that hold, per member and token, one ``latent`` of ``width`` numbers and one key of an
    ``indexer`` of ``index_dim``.

    Raises:
        ConfigError: the dtype is a quantised one.
    """
    if dtype in QUANTISED:
        raise ConfigError(
            f"kv_dtype {dtype} cannot hold latents with an indexer (DSA): choose kv_dtype bfloat16 or float32"
        )
    latents = latent_layout(block_size, slots, width, dtype)
    return replace(latents, roles=(*latents.roles, Role(INDEXER, (index_dim,), dtype)))


def index_role(layout: BlockLayout) -> Role:
    """The role of the indexer's keys.

    Raises:
        ConfigError: the layout has none.
    """
    last = layout.roles[-1]
    if not is_latent(layout) or last.name != INDEXER:
        raise ConfigError(f"layout {layout.identity} has no keys of an indexer; build it with indexed_layout()")
    return last


def index_view(arena: NDArray[np.uint8], layout: BlockLayout) -> NDArray[Any]:
    """Keys of the indexer as stored, ``[num_blocks, slots, block_size, index_dim]``, sharing the arena's memory.

    Those of a bfloat16 arena are its bits, uint16: see `headwise.kernels.bfloat16`.

    Raises:
        ConfigError: the arena is not a whole number of blocks, or the layout has no such keys.
    """
    role = index_role(layout)
    return role_view(arena, layout, replace(role, dtype="uint16") if role.dtype == "bfloat16" else role)
