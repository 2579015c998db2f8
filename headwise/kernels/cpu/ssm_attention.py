"""State space models on CPU cores: the thin Python half (the compiled half is `ssm_jit`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cpu import records
from headwise.kernels.cpu.records import address_of
from headwise.kernels.cpu.state_attention import StateCalls
from headwise.kernels.ssm_base import SsmWeights
from headwise.kernels.state_layout import StateSizes, sizes_of


class NumbaSsmKernels(StateCalls):
    """`SsmKernels` for float32 arrays in host memory."""

    name = "numba"

    def attend_ssm(
        self,
        projected: NDArray[np.float32],
        weights: SsmWeights,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        out: NDArray[np.float32],
    ) -> None:
        """See `SsmKernels.attend_ssm`."""
        sizes, members = sizes_of(layout), len(heads.group)
        states = ssm_record(weights, sizes, members)
        width = weights.groups * 2 * sizes.key_dim + members * sizes.share * (2 * sizes.value_dim + 1)
        self.take_on(states, width, projected, arena, layout, batch, heads, out)


def ssm_record(weights: SsmWeights, sizes: StateSizes, members: int) -> NDArray[np.int64]:
    """A `records.STATES`, which is good for as long as the weights are there.

    Raises:
        ValueError: the weights are of other sizes.
    """
    of_channels, of_heads = (weights.convolution, weights.convolution_bias), (weights.speed, weights.bias, weights.skip)
    given = tuple(array.shape for array in (*of_channels, *of_heads, weights.group))
    each = members, sizes.share
    wanted = (members, sizes.convolution, sizes.channels), (members, sizes.channels), each, each, each, (members,)
    if given != wanted or weights.group.max(initial=0) >= weights.groups:
        raise ValueError(
            f"weights of a state space model are {given}, of {weights.groups} groups; this layout's are {wanted}"
        )
    convolution, convolution_bias, speed, bias, skip = (
        address_of(array, np.float32) for array in (*of_channels, *of_heads)
    )
    return records.filled(
        records.STATES, rule=records.SSM, heads=members, share=sizes.share, key_dim=sizes.key_dim,
        value_dim=sizes.value_dim, convolution=sizes.convolution, weights=convolution,
        convolution_bias=convolution_bias, speed=speed, bias=bias, skip=skip, groups=weights.groups,
        group=address_of(weights.group, np.int32),
    )  # fmt: skip
