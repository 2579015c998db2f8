"""Draws tokens where their scores are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.cuda import likeliest, logit_edits
from headwise.kernels.cuda.logit_edits import CudaLogitEdits
from headwise.kernels.cuda.programs import Programs
from headwise.kernels.cuda.sampling import SCRATCH_BYTES, CudaSampling, rows_of, thresholds_of
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps
from headwise.runtime.worker.logit_edits import LogitEdits
from headwise.runtime.worker.sampler import Draws


class DeviceSampler:
    """`sampler.sample` on a GPU. Where rounding decides, it may draw a neighbour of what a host would."""

    def __init__(self, ops: TensorOps, programs: Programs, dtype: np.dtype[Any], threads: int | None = None) -> None:
        """dtype: of scores; threads: of a block, if not as many as the kernels want. Raises `ConfigError`: no kernel is
        for them."""
        self._ops = ops
        scratch = ops.upload(np.zeros(SCRATCH_BYTES // 4, np.int32))
        of_draws = threads or likeliest.THREADS
        self._scores = CudaSampling(programs, dtype, scratch, of_draws)
        self._logits = CudaSampling(programs, np.dtype(np.float32), scratch, of_draws)
        self._edits = CudaLogitEdits(programs, dtype, threads or logit_edits.THREADS)
        self._upload, self._upload_edits = ops.step_upload(), ops.step_upload()

    def draw(
        self, scores: Tensor, cap: float, draws: Draws, edits: LogitEdits | None = None
    ) -> tuple[KernelArray, KernelArray] | None:
        """A token for each row of ``scores [n, vocab]``, int32 ``[n]``, and its largest logit, float32 ``[n]``.

        Logits are the scores, capped at ``cap`` if it is not 0, then changed by ``edits``. A token counts if its row's
        largest one is finite.

        None where the kernel does not take such scores: then the host is to draw.
        """
        array, kernel = self._ops.kernel_array(scores), self._scores
        if not kernel.takes(array):
            return None
        if edits is not None:
            array, kernel, cap = self._edited(array, cap, edits), self._logits, 0.0
        count = len(draws.params)
        told = _rows(draws)
        (rows,) = self._upload(told.view(np.int32))
        drawn = self._ops.empty_bytes(8 * count)
        tokens, best = drawn[: 4 * count].view(np.int32), drawn[4 * count :].view(np.float32)
        kernel.draw(array, rows, thresholds_of(told), cap, tokens, best)
        return tokens, best

    def _edited(self, scores: KernelArray, cap: float, edits: LogitEdits) -> KernelArray:
        """The edited logits, float32; ``scores`` stay as they are."""
        count, vocab = scores.shape
        logits = self._ops.empty_bytes(4 * count * vocab).view(np.float32).reshape(count, vocab)
        columns = (
            edits.mask_of, edits.masks, edits.biases.begins, edits.biases.tokens, edits.biases.values,
            edits.seen.begins, edits.seen.tokens, edits.seen.values, edits.penalties,
        )  # fmt: skip
        self._edits.edit(scores, cap, logits, *self._upload_edits(*(column.view(np.int32) for column in columns)))
        return logits


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
