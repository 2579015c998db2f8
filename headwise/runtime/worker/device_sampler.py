"""Draws tokens where their scores are: of a step, no more than the tokens leaves the device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.cuda.sampling import CudaSampling, rows_of
from headwise.runtime.ops.base import Tensor, TensorOps
from headwise.runtime.worker.sampler import Draws, only_usable


class DeviceSampler:
    """`sampler.sample` on a GPU. Where rounding decides, it may draw a neighbour of what a host would."""

    def __init__(self, ops: TensorOps, kernel: CudaSampling) -> None:
        self._ops, self._kernel = ops, kernel
        self._upload = ops.step_upload()

    def sample(self, scores: Tensor, cap: float, draws: Draws) -> NDArray[np.int32] | None:
        """A token for each row of ``scores [n, vocab]``; logits are these, capped at ``cap`` if it is not 0.

        `NO_TOKEN` for a row whose logits are not usable. None where the kernel does not take such scores: then the host
        is to draw.
        """
        array = self._ops.kernel_array(scores)
        if not self._kernel.takes(array):
            return None
        count = len(draws.params)
        (rows,) = self._upload(_rows(draws).view(np.int32))
        drawn = self._ops.empty_bytes(8 * count).view(np.int32)
        self._kernel.draw(array, rows, cap, drawn[:count], drawn[count:])
        tokens, best = np.split(self._ops.host(drawn), 2)
        return only_usable(tokens, best.view(np.float32))


def _rows(draws: Draws) -> NDArray[np.void]:
    params = draws.params
    return rows_of(
        np.array([param.temperature for param in params]),
        np.array([param.top_k for param in params], dtype=np.int32),
        np.array([param.top_p for param in params]),
        np.array([param.min_p for param in params]),
        draws.seeds,
        draws.positions,
    )
