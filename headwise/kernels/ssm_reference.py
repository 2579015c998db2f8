"""State space models in plain NumPy: the definition that every other implementation is tested against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.ssm_base import SsmWeights
from headwise.kernels.state_layout import StateSizes, sizes_of
from headwise.kernels.state_reference import Doubles, silu, walk


class ReferenceSsmKernels:
    """Clarity over speed: one (sequence, member, token) at a time, in float64 but for what the cache keeps."""

    name = "reference"

    def attend_ssm(
        self,
        projected: NDArray[Any],
        weights: SsmWeights,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        out: NDArray[Any],
    ) -> None:
        """See `SsmKernels.attend_ssm`."""
        sizes = sizes_of(layout)
        inputs, share = SsmInputs.of(projected, weights, sizes), sizes.share
        speed, skip = weights.speed.astype(np.float64), weights.skip
        made = out.reshape(len(out), len(weights.group), share, sizes.value_dim)

        def take_on(row: int, member: int, before: Doubles, state: Doubles) -> tuple[Doubles, Doubles]:
            window = np.vstack([before, inputs.mixed[row, member]])
            convolved = silu((window * weights.convolution[member]).sum(axis=0) + weights.convolution_bias[member])
            query, key = np.split(convolved[: 2 * state.shape[1]], 2)
            values, step = convolved[2 * len(key) :].reshape(share, -1), inputs.step[row, member]
            kept = np.exp(-speed[member] * step)[:, None, None] * state
            state = kept + key[:, None] * (step[:, None] * values)[:, None, :]
            made[row, member] = (query @ state + skip[member][:, None] * values) * silu(inputs.gates[row, member])
            return window[1:], state

        walk(arena, layout, batch, heads, take_on)


@dataclass(frozen=True)
class SsmInputs:
    """What `SsmProjected.numbers` are made of.

    mixed: ``[tokens, members, channels]``, before the convolution
    gates: ``[tokens, members, share, value]``
    step:  ``[tokens, members, share]``, at least 0
    """

    mixed: Doubles
    gates: Doubles
    step: Doubles

    @staticmethod
    def of(projected: NDArray[Any], weights: SsmWeights, sizes: StateSizes) -> SsmInputs:
        tokens, (members, share) = len(projected), weights.speed.shape
        keys = weights.groups * 2 * sizes.key_dim
        values = sizes.share * sizes.value_dim
        numbers = projected.astype(np.float64)
        of_group = numbers[:, :keys].reshape(tokens, weights.groups, 2 * sizes.key_dim)
        of_member = numbers[:, keys : keys + 2 * members * values].reshape(tokens, members, 2, values)
        told = numbers[:, keys + 2 * members * values :].reshape(tokens, members, share)
        return SsmInputs(
            mixed=np.concatenate([of_group[:, weights.group], of_member[:, :, 0]], axis=2),
            gates=of_member[:, :, 1].reshape(tokens, members, share, sizes.value_dim),
            step=np.logaddexp(0, told + weights.bias),
        )
