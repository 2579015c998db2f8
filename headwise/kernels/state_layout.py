"""The layout of blocks of recurrent states, and typed views of an arena of such blocks.

A member is what a layer keeps for one key and the value heads that share it, in float32: the last inputs of the causal
convolution before it, and a matrix for each value head. So it is of gated delta-nets (`headwise.kernels.delta_base`),
of Kimi Delta Attention (`headwise.kernels.kda_base`), and of state space models (`headwise.kernels.ssm_base`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout, Role
from headwise.errors import ConfigError

CONVOLUTION, RECURRENT = "convolution", "recurrent"

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class StateSizes:
    """Sizes of one member's part of a layer.

    share:       value heads that share a key
    convolution: tokens that the convolution spans, the newest among them
    """

    key_dim: int
    value_dim: int
    share: int
    convolution: int

    @property
    def channels(self) -> int:
        """Numbers that are convolved of a token: ``[query | key | values]``."""
        return 2 * self.key_dim + self.share * self.value_dim


def state_layout(block_size: int, slots: int, sizes: StateSizes) -> BlockLayout:
    """The layout of blocks of states: ``convolution [inputs, channels]`` and ``recurrent [share, key, value]``."""
    roles = (
        Role(CONVOLUTION, (sizes.convolution - 1, sizes.channels), "float32", is_state=True),
        Role(RECURRENT, (sizes.share, sizes.key_dim, sizes.value_dim), "float32", is_state=True),
    )
    return BlockLayout(block_size, slots, roles)


def sizes_of(layout: BlockLayout) -> StateSizes:
    """Those of a layout of states.

    Raises:
        ConfigError: the layout is that of another attention variant.
    """
    if [role.name for role in layout.roles] != [CONVOLUTION, RECURRENT]:
        raise ConfigError(f"layout {layout.identity} is not one of recurrent states; build it with state_layout()")
    (inputs, _), (share, key_dim, value_dim) = (role.shape for role in layout.roles)
    return StateSizes(key_dim, value_dim, share, inputs + 1)


def state_views(arena: NDArray[np.uint8], layout: BlockLayout) -> tuple[Floats, Floats]:
    """What an arena holds of both roles, ``[num_blocks, slots, *shape]``, sharing its memory.

    Raises:
        ConfigError: the arena is not a whole number of blocks, or the layout is of another attention variant.
    """
    sizes_of(layout)
    if arena.nbytes % layout.block_bytes:
        raise ConfigError(f"an arena of {arena.nbytes} bytes is not a whole number of {layout.block_bytes}-byte blocks")
    blocks = arena.nbytes // layout.block_bytes
    convolution, recurrent = (
        np.ndarray(
            (blocks, layout.slots, *role.shape),
            np.float32,
            buffer=arena,
            offset=layout.role_offsets[role.name],
            strides=(layout.block_bytes, layout.slot_bytes, *np.empty(role.shape, np.float32).strides),
        )
        for role in layout.roles
    )
    return convolution, recurrent
