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
from headwise.kernels.gqa import QUANTISED, role_view

LATENT = "latent"


def latent_layout(block_size: int, slots: int, width: int, dtype: str = "float32") -> BlockLayout:
    """The layout of blocks that hold, per member and token, one ``latent`` of ``width`` numbers.

    Raises:
        ConfigError: the dtype is a quantised one.
    """
    if dtype in QUANTISED:
        raise ConfigError(
            f"kv_dtype {dtype} cannot hold latents (MLA): one scale for compressed and rotated parts would cost "
            "accuracy; choose kv_dtype bfloat16 or float32"
        )
    return BlockLayout(block_size=block_size, slots=slots, roles=(Role(LATENT, (width,), dtype),))


def is_latent(layout: BlockLayout) -> bool:
    """Whether the layout is one of latents, whatever else it keeps beside them."""
    return layout.roles[0].name == LATENT


def latent_width(layout: BlockLayout) -> int:
    """Numbers of a latent.

    Raises:
        ConfigError: the layout is that of another attention variant.
    """
    if not is_latent(layout):
        raise ConfigError(f"layout {layout.identity} is not one of latents; build it with latent_layout()")
    return layout.roles[0].shape[0]


def latent_view(arena: NDArray[np.uint8], layout: BlockLayout) -> NDArray[Any]:
    """Latents of an arena as stored, ``[num_blocks, slots, block_size, width]``, sharing its memory.

    Those of a bfloat16 arena are its bits, uint16: see `headwise.kernels.bfloat16`.

    Raises:
        ConfigError: the arena is not a whole number of blocks, or the layout is of another attention variant.
    """
    latent_width(layout)
    role = layout.roles[0]
    return role_view(arena, layout, replace(role, dtype="uint16") if role.dtype == "bfloat16" else role)
