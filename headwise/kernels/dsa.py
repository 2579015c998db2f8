"""The block layout of latent attention with an indexer (DSA), and typed views of an arena of such blocks.

Beside a token's latent a layer keeps a key that the token is chosen by: a few light heads score all tokens before a
query, and it attends to the best of them alone (DeepSeek-V3.2-Exp, 2025). Where layers share an indexer, a key is a
member of its own, and only the layer with the indexer has one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout, Role
from headwise.errors import ConfigError
from headwise.kernels.bfloat16 import to_bits, to_float32
from headwise.kernels.gqa import role_view
from headwise.kernels.mla import LATENT, LATENT_SCALE, QUANTISED_LATENTS, Index, bits_view, latent_layout
from headwise.kernels.mla_quantised import INT8, dequantise_keys, quantise_keys
from headwise.kernels.nibbles import INT4

INDEXER, INDEXER_SCALE = "indexer", "indexer_scale"


def indexed_layout(
    block_size: int, slots: int, width: int, index_dim: int, dtype: str = "float32", rotated: int = 0
) -> BlockLayout:
    """The layout of blocks that hold, per member and token, one ``latent`` of ``width`` numbers and one key of an
    ``indexer`` of ``index_dim``.

    In int8 and E4M3 both have scales, and the last ``rotated`` numbers of a latent take two bytes each: see
    `latent_layout`. Those of keys, which lose no more by it, take one. Beside latents in int4 keys are int8: four bits
    would have other tokens chosen.

    Raises:
        ConfigError: latents are not kept in this dtype.
    """
    latents = latent_layout(block_size, slots, width, dtype, rotated)
    return replace(latents, roles=(*latents.roles, *_key_roles(index_dim, dtype)))


def index_layout(block_size: int, slots: int, index_dim: int, dtype: str = "float32") -> BlockLayout:
    """The layout of blocks that hold, per member and token, one key of an ``indexer``, kept as beside latents of
    ``dtype``."""
    return BlockLayout(block_size, slots, _key_roles(index_dim, dtype))


def _key_roles(index_dim: int, dtype: str) -> tuple[Role, ...]:
    keys = Role(INDEXER, (index_dim,), index_dtype(dtype))
    return (keys, Role(INDEXER_SCALE, (), "float32")) if dtype in QUANTISED_LATENTS else (keys,)


def latent_roles(layout: BlockLayout) -> tuple[Role, ...]:
    """What of a member is of latents."""
    return tuple(role for role in layout.roles if role.name in (LATENT, LATENT_SCALE))


def key_roles(layout: BlockLayout) -> tuple[Role, ...]:
    """What of a member is of keys of an indexer."""
    return tuple(role for role in layout.roles if role.name in (INDEXER, INDEXER_SCALE))


def has_key_scales(layout: BlockLayout) -> bool:
    """Whether keys of the indexer are stored with a scale for each."""
    return INDEXER_SCALE in layout.role_offsets


def index_dtype(dtype: str) -> str:
    """What keys of an indexer are kept in beside latents of ``dtype``."""
    return INT8 if dtype == INT4 else dtype


def index_role(layout: BlockLayout) -> Role:
    """The role of the indexer's keys.

    Raises:
        ConfigError: the layout has none.
    """
    found = [role for role in layout.roles if role.name == INDEXER]
    if not found:
        raise ConfigError(
            f"layout {layout.identity} has no keys of an indexer; build it with indexed_layout() or index_layout()"
        )
    return found[0]


def index_view(arena: NDArray[np.uint8], layout: BlockLayout) -> NDArray[Any]:
    """Keys of the indexer as stored, ``[num_blocks, slots, block_size, index_dim]``, sharing the arena's memory.

    Those of a bfloat16 or E4M3 arena are its bits, as of `latent_view`.

    Raises:
        ConfigError: the arena is not a whole number of blocks, or the layout has no such keys.
    """
    return bits_view(arena, layout, index_role(layout))


def index_scale_view(arena: NDArray[np.uint8], layout: BlockLayout) -> NDArray[np.float32]:
    """Scales of a quantised arena's keys, ``[num_blocks, slots, block_size]``, sharing its memory."""
    return role_view(arena, layout, key_roles(layout)[-1])


def store_keys(arena: NDArray[np.uint8], layout: BlockLayout, at: Index, keys: NDArray[Any]) -> None:
    """Store ``keys [tokens, index_dim]`` at these places, as the layout has them."""
    view = index_view(arena, layout)
    if has_key_scales(layout):
        view[at], index_scale_view(arena, layout)[at] = quantise_keys(keys, index_role(layout).dtype)
    else:
        view[at] = to_bits(keys) if view.dtype == np.uint16 else keys


def load_keys(arena: NDArray[np.uint8], layout: BlockLayout, at: Index, dtype: Any = np.float32) -> NDArray[Any]:
    """Keys at these places, ``[*places, index_dim]`` of ``dtype``, float32 or wider."""
    stored = index_view(arena, layout)[at]
    if has_key_scales(layout):
        return dequantise_keys(stored, index_scale_view(arena, layout)[at], dtype)
    return (to_float32(stored) if stored.dtype == np.uint16 else stored).astype(dtype, copy=False)
