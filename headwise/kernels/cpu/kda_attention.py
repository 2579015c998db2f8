"""Kimi Delta Attention on CPU cores: the thin Python half (the compiled half is `kda_jit`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cpu import records
from headwise.kernels.cpu.records import address_of
from headwise.kernels.cpu.state_attention import StateCalls
from headwise.kernels.kda_base import KdaProjected, KdaWeights
from headwise.kernels.state_layout import StateSizes, sizes_of


class NumbaKdaKernels(StateCalls):
    """`KdaKernels` for float32 arrays in host memory."""

    name = "numba"

    def attend_kda(
        self,
        projected: KdaProjected,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        out: NDArray[np.float32],
    ) -> None:
        """See `KdaKernels.attend_kda`.

        Raises:
            ValueError: the arrays do not fit the layout.
        """
        sizes, count = sizes_of(layout), len(heads.group)
        states, numbers = kda_record(projected.weights, sizes, count), projected.numbers
        given = projected.decays.shape, projected.gates.shape
        wanted = (len(numbers), count * sizes.key_dim), (len(numbers), count * sizes.value_dim)
        least = count * (sizes.channels + 1)
        if given != wanted or numbers.shape[1] < least:
            raise ValueError(
                f"decays and gates are {given}, rows have {numbers.shape[1]}; this layout's are {wanted}, and at least "
                f"{least}"
            )
        self.take_on(
            states, numbers.shape[1], numbers, arena, layout, batch, heads, out,
            key=address_of(projected.decays, np.float32), key_row=given[0][1],
            value=address_of(projected.gates, np.float32), value_row=given[1][1],
        )  # fmt: skip


def kda_record(weights: KdaWeights, sizes: StateSizes, heads: int) -> NDArray[np.int64]:
    """A `records.STATES`, which is good for as long as the weights are there.

    Raises:
        ValueError: the weights are of other sizes.
    """
    given = weights.convolution.shape, weights.speed.shape, weights.bias.shape, weights.norm.shape
    wanted = (heads, sizes.convolution, sizes.channels), (heads,), (heads, sizes.key_dim), (sizes.value_dim,)
    if given != wanted or sizes.share != 1:
        raise ValueError(f"weights of Kimi Delta Attention are {given}; this layout's are {wanted}, of a head each")
    convolution, speed, bias, norm = (
        address_of(array, np.float32) for array in (weights.convolution, weights.speed, weights.bias, weights.norm)
    )
    return records.filled(
        records.STATES, rule=records.KDA, heads=heads, share=1, key_dim=sizes.key_dim, value_dim=sizes.value_dim,
        convolution=sizes.convolution, weights=convolution, speed=speed, bias=bias, norm=norm, eps=weights.eps,
    )  # fmt: skip


def kda_sizes(weights: KdaWeights) -> StateSizes:
    """Those of the heads that they are of."""
    return StateSizes(weights.bias.shape[1], len(weights.norm), 1, weights.convolution.shape[1])
