"""The block layout of multi-head latent attention (MLA), and typed views of an arena of such blocks.

A layer keeps one vector per token for all of its query heads: the compressed keys and values, ``rank`` numbers, and
behind them the part of the keys that is rotated, which all heads share (DeepSeek-V2, arXiv 2405.04434, section 2.1).
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
from headwise.kernels.mla_nibbles import pack_latents, stored_width, unpack_latents
from headwise.kernels.mla_quantised import FLOAT8, INT8, dequantise_latents, quantise_latents
from headwise.kernels.nibbles import GROUP, INT4, SCALE_DTYPE

LATENT, LATENT_SCALE = "latent", "latent_scale"
QUANTISED_LATENTS = (INT8, FLOAT8, INT4)
LATENT_DTYPES = ("float32", "float16", "bfloat16", *QUANTISED_LATENTS)
"""Dtypes of latents, and of those that have scales."""

Index = tuple[Any, Any, Any]
"""Of tokens: their blocks, their slot, and their places in the blocks."""


def latent_layout(block_size: int, slots: int, width: int, dtype: str = "float32", rotated: int = 0) -> BlockLayout:
    """The layout of blocks that hold, per member and token, one ``latent`` of ``width`` numbers.

    In int8 and E4M3 a latent is a row of `headwise.kernels.mla_quantised`, and ``latent_scale`` has its scale. The last
    ``rotated`` of its numbers take two bytes each. In int4 it is one of `headwise.kernels.mla_nibbles`, and
    ``latent_scale`` has its groups' scales and minima.

    Raises:
        ConfigError: latents are not kept in this dtype, or those of this width are not.
    """
    if dtype not in LATENT_DTYPES:
        raise ConfigError(f"kv_dtype {dtype} cannot hold latents (MLA): choose kv_dtype int8, bfloat16 or float32")
    if dtype == INT4:
        stored = stored_width(width, rotated)
        scales = Role(LATENT_SCALE, (stored // GROUP, 2), SCALE_DTYPE)
        return BlockLayout(block_size, slots, (Role(LATENT, (stored,), dtype), scales))
    is_quantised = dtype in QUANTISED_LATENTS
    roles = [Role(LATENT, (width + rotated * is_quantised,), dtype)]
    if is_quantised:
        roles.append(Role(LATENT_SCALE, (), "float32"))
    return BlockLayout(block_size=block_size, slots=slots, roles=tuple(roles))


def is_latent(layout: BlockLayout) -> bool:
    """Whether the layout is one of latents, whatever else it keeps beside them."""
    return layout.roles[0].name == LATENT


def latent_width(layout: BlockLayout) -> int:
    """Numbers of a latent as they are stored.

    Raises:
        ConfigError: the layout is that of another attention variant.
    """
    if not is_latent(layout):
        raise ConfigError(f"layout {layout.identity} is not one of latents; build it with latent_layout()")
    return layout.roles[0].shape[0]


def has_scales(layout: BlockLayout) -> bool:
    """Whether latents are stored in int8, E4M3 or int4, with scales for each."""
    return LATENT_SCALE in layout.role_offsets


def latent_view(arena: NDArray[np.uint8], layout: BlockLayout) -> NDArray[Any]:
    """Latents of an arena as stored, ``[num_blocks, slots, block_size, width]``, sharing its memory.

    Those of a bfloat16 or E4M3 arena are its bits, uint16 or uint8: see `headwise.kernels.bfloat16` and `e4m3`. Those
    of int4 are ``uint8 [..., width / 2]``.

    Raises:
        ConfigError: the arena is not a whole number of blocks, or the layout is of another attention variant.
    """
    latent_width(layout)
    return bits_view(arena, layout, layout.roles[0])


def bits_view(arena: NDArray[np.uint8], layout: BlockLayout, role: Role) -> NDArray[Any]:
    """What an arena holds of a role, of dtypes that NumPy lacks as bits: see `headwise.kernels.gqa.role_view`."""
    if role.dtype == INT4:
        return role_view(arena, layout, replace(role, shape=(role.shape[0] // 2,), dtype="uint8"))
    bits = {"bfloat16": "uint16", FLOAT8: "uint8"}
    return role_view(arena, layout, replace(role, dtype=bits.get(role.dtype, role.dtype)))


def latent_scale_view(arena: NDArray[np.uint8], layout: BlockLayout) -> NDArray[Any]:
    """Scales of a quantised arena's latents, ``[num_blocks, slots, block_size]``, sharing its memory.

    Those of int4 are ``[..., width / 32, 2]``: a scale and a minimum for each group.
    """
    return role_view(arena, layout, layout.roles[1])


def store_latents(arena: NDArray[np.uint8], layout: BlockLayout, at: Index, latents: NDArray[Any]) -> None:
    """Store ``latents [tokens, width]`` at these places, as the layout has them."""
    view = latent_view(arena, layout)
    if has_scales(layout):
        dtype, twice = layout.roles[0].dtype, latent_width(layout) - latents.shape[1]
        stored = pack_latents(latents, twice) if dtype == INT4 else quantise_latents(latents, twice, dtype)
        view[at], latent_scale_view(arena, layout)[at] = stored
    else:
        view[at] = to_bits(latents) if view.dtype == np.uint16 else latents


def load_latents(
    arena: NDArray[np.uint8], layout: BlockLayout, at: Index, width: int, dtype: Any = np.float32
) -> NDArray[Any]:
    """Latents of ``width`` numbers at these places, ``[*places, width]`` of ``dtype``, float32 or wider."""
    view = latent_view(arena, layout)
    stored = view[at]
    if has_scales(layout):
        read = unpack_latents if layout.roles[0].dtype == INT4 else dequantise_latents
        return read(stored, latent_scale_view(arena, layout)[at], latent_width(layout) - width, dtype)
    return (to_float32(stored) if stored.dtype == np.uint16 else stored).astype(dtype, copy=False)
