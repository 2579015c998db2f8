"""The block layout of grouped-query attention, and typed views of an arena of such blocks.

Multi-head and multi-query attention are its two ends: one query head per KV head, or one KV head in all.

Keys and values of dtype ``int8`` or ``float8_e4m3fn`` are quantised: each has a scale per member and token, in the
roles ``key_scale`` and ``value_scale``. What is read is ``stored * scale``. Of ``int4`` these roles hold a scale and a
minimum for each group of 32 elements, see `headwise.kernels.nibbles`.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout, Role
from headwise.errors import ConfigError
from headwise.kernels.nibbles import GROUP, INT4, SCALE_DTYPE

QUANTISED = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The quantised dtypes, and the largest value each stores: a token's largest element becomes this."""


def gqa_layout(
    block_size: int, slots: int, head_dim: int, dtype: str = "float32", value_dim: int | None = None
) -> BlockLayout:
    """The layout of blocks that hold, per member and token, one ``key`` of ``(head_dim,)`` and one ``value``.

    Quantised dtypes add one float32 ``key_scale`` and ``value_scale`` per member and token, int4 a float16 scale and
    minimum for each of its groups.

    value_dim: of a value; None: ``head_dim``

    Raises:
        ConfigError: a head is no whole number of int4's groups.
    """
    dims = {"key": head_dim, "value": head_dim if value_dim is None else value_dim}
    odd = next((dim for dim in dims.values() if dtype == INT4 and dim % GROUP), None)
    if odd is not None:
        raise ConfigError(
            f"kv_dtype int4 takes heads of a multiple of {GROUP} elements, not of {odd}: choose kv_dtype int8"
        )
    roles = [Role(name, (dim,), dtype) for name, dim in dims.items()]
    if dtype in QUANTISED:
        roles += [Role("key_scale", (), "float32"), Role("value_scale", (), "float32")]
    if dtype == INT4:
        roles += [Role(f"{name}_scale", (dim // GROUP, 2), SCALE_DTYPE) for name, dim in dims.items()]
    return BlockLayout(block_size=block_size, slots=slots, roles=tuple(roles))


def head_dim_of(layout: BlockLayout) -> int:
    """The head dimension of a grouped-query layout: of keys.

    Raises:
        ConfigError: the layout is that of another attention variant.
    """
    return _dims_of(layout)[0]


def value_dim_of(layout: BlockLayout) -> int:
    """The same of values."""
    return _dims_of(layout)[1]


def _dims_of(layout: BlockLayout) -> tuple[int, int]:
    dims = tuple(role.shape[0] for role in layout.roles[:2] if len(role.shape) == 1)
    if len(dims) < 2 or layout.roles != gqa_layout(1, 1, dims[0], layout.roles[0].dtype, dims[1]).roles:
        raise ConfigError(f"layout {layout.identity} is not one of grouped-query attention; build it with gqa_layout()")
    return dims[0], dims[1]


def kv_dtype_of(layout: BlockLayout) -> str:
    """The name of the dtype that a grouped-query layout keeps keys and values in."""
    return layout.roles[0].dtype


def kv_views(arena: NDArray[np.uint8], layout: BlockLayout) -> tuple[NDArray[Any], NDArray[Any]]:
    """Keys and values of an arena as stored, each ``[num_blocks, slots, block_size, its size]``, sharing its memory.

    Those of int4 are ``uint8 [..., size / 2]``.

    Raises:
        ConfigError: the arena is not a whole number of blocks, or the layout is of another attention variant.
    """
    dims, pair = _dims_of(layout), layout.roles[:2]
    if kv_dtype_of(layout) == INT4:
        pair = tuple(replace(role, shape=(dim // 2,), dtype="uint8") for role, dim in zip(pair, dims, strict=True))
    return role_view(arena, layout, pair[0]), role_view(arena, layout, pair[1])


def bit_views(arena: NDArray[np.uint8], layout: BlockLayout) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """The same of a bfloat16 arena, as bits: see `headwise.kernels.bfloat16`. ml_dtypes is not needed.

    Raises:
        ConfigError: as `kv_views`, or the layout is not bfloat16.
    """
    head_dim_of(layout)
    if kv_dtype_of(layout) != "bfloat16":
        raise ConfigError(f"a layout of dtype {kv_dtype_of(layout)} does not hold bfloat16: see its kv_views()")
    key, value = (replace(role, dtype="uint16") for role in layout.roles[:2])
    return role_view(arena, layout, key), role_view(arena, layout, value)


def scale_views(arena: NDArray[np.uint8], layout: BlockLayout) -> tuple[NDArray[Any], NDArray[Any]]:
    """Scales of the keys and values of a quantised arena, each ``[num_blocks, slots, block_size]``, sharing its memory.

    Those of int4 are ``[..., size / 32, 2]``: a scale and a minimum for each group.

    Raises:
        ConfigError: as `kv_views`, or the layout is not quantised.
    """
    head_dim_of(layout)
    scaled = (*QUANTISED, INT4)
    if kv_dtype_of(layout) not in scaled:
        raise ConfigError(f"a layout of dtype {kv_dtype_of(layout)} has no scales: only {', '.join(scaled)} have")
    return role_view(arena, layout, layout.roles[2]), role_view(arena, layout, layout.roles[3])


def quantise(rows: NDArray[Any], dtype: str) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """``rows [..., head_dim]`` as stored in quantised ``dtype``, and their scales ``[...]``.

    Symmetric, per row: ``scale = absmax / largest`` (1 where a row is all zeros), ``stored = rows / scale`` rounded
    half to even and clipped to ``+-largest``. Computed in float32, so that every implementation rounds alike.
    """
    largest = np.float32(QUANTISED[dtype])
    exact = rows.astype(np.float32)
    absmax = np.abs(exact).max(axis=-1)
    scale = np.where(absmax > 0, absmax / largest, np.float32(1.0)).astype(np.float32)
    scaled = np.clip(exact / scale[..., None], -largest, largest)
    return (np.rint(scaled) if dtype == "int8" else scaled).astype(numpy_dtype(dtype)), scale


def role_view(arena: NDArray[np.uint8], layout: BlockLayout, role: Role) -> NDArray[Any]:
    """What an arena holds of a role, ``[num_blocks, slots, block_size, *shape]``, sharing its memory.

    Raises:
        ConfigError: the arena is not a whole number of blocks.
    """
    if arena.nbytes % layout.block_bytes:
        raise ConfigError(f"an arena of {arena.nbytes} bytes is not a whole number of {layout.block_bytes}-byte blocks")
    dtype = numpy_dtype(role.dtype)
    shape = (arena.nbytes // layout.block_bytes, layout.slots, layout.block_size, *role.shape)
    within = tuple(prod(role.shape[axis + 1 :]) * dtype.itemsize for axis in range(len(role.shape)))
    strides = (layout.block_bytes, layout.slot_bytes, role.token_bytes, *within)
    return np.ndarray(shape, dtype, buffer=arena, offset=layout.role_offsets[role.name], strides=strides)
