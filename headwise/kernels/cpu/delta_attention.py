"""Gated delta-nets on CPU cores: the thin Python half (the compiled half is `delta_jit`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cpu import records
from headwise.kernels.cpu.records import address_of
from headwise.kernels.cpu.state_attention import StateCalls
from headwise.kernels.delta_base import DeltaWeights
from headwise.kernels.state_layout import StateSizes, sizes_of


class NumbaDeltaKernels(StateCalls):
    """`ProjectedDeltaKernels` for float32 arrays in host memory."""

    name = "numba"

    def attend_projected(
        self,
        projected: NDArray[np.float32],
        weights: DeltaWeights,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        out: NDArray[np.float32],
    ) -> None:
        """See `ProjectedDeltaKernels.attend_projected`."""
        sizes, key_heads = sizes_of(layout), len(heads.group)
        states = delta_record(weights, sizes, key_heads)
        width = key_heads * (sizes.channels + sizes.share * sizes.value_dim + 2 * sizes.share)
        self.take_on(states, width, projected, arena, layout, batch, heads, out)


def delta_record(weights: DeltaWeights, sizes: StateSizes, key_heads: int) -> NDArray[np.int64]:
    """A `records.STATES`, which is good for as long as the weights are there.

    Raises:
        ValueError: the weights are of other sizes.
    """
    given = weights.convolution.shape, weights.speed.shape, weights.bias.shape, weights.norm.shape
    each = key_heads, sizes.share
    wanted = (key_heads, sizes.convolution, sizes.channels), each, each, (sizes.value_dim,)
    if given != wanted:
        raise ValueError(f"weights of a delta-net are {given}; this layout's are {wanted}")
    convolution, speed, bias, norm = (
        address_of(array, np.float32) for array in (weights.convolution, weights.speed, weights.bias, weights.norm)
    )
    return records.filled(
        records.STATES, rule=records.DELTA_NET, heads=key_heads, share=sizes.share, key_dim=sizes.key_dim,
        value_dim=sizes.value_dim, convolution=sizes.convolution, weights=convolution, speed=speed, bias=bias,
        norm=norm, eps=weights.eps,
    )  # fmt: skip


def sizes_of_weights(weights: DeltaWeights) -> StateSizes:
    """Those of the delta-net that they are of."""
    (_, convolution, channels), (_, share) = weights.convolution.shape, weights.speed.shape
    value_dim = len(weights.norm)
    return StateSizes((channels - share * value_dim) // 2, value_dim, share, convolution)
