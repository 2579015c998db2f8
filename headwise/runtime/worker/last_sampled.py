"""The token that each row was given last: a step takes it as input before the engine has seen it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.ops.base import Fetch, Fetched, KernelArray, TensorOps
from headwise.runtime.protocol.batch import LAST_SAMPLED, BatchRequest

if TYPE_CHECKING:
    from headwise.kernels.cuda.step_tokens import CudaStepTokens

NO_TOKEN = -1
"""In place of a token: the row's logits are not usable."""


class LastSampled(Protocol):
    """Of one worker's rows. A row without a token goes on with some other, which nobody listens to."""

    def inputs(self, batch: BatchRequest) -> NDArray[np.int32]:
        """The step's tokens, as they are to be uploaded."""

    def fill(self, tokens: KernelArray, begins: KernelArray, rows: KernelArray) -> None:
        """Complete the uploaded tokens ``[T]``, in place: ``begins [n + 1]`` of the sequences, ``rows [n]`` of each.

        Only enqueues. A sequence that begins where the next one does is padding.
        """

    def keep(
        self, rows: NDArray[np.int32], tokens: KernelArray, best: KernelArray, uploaded: KernelArray | None = None
    ) -> Fetch:
        """Enter ``tokens int32 [n]`` of ``rows [n]``, sampled from logits the largest of which were ``best``.

        What comes to the host is the tokens, `NO_TOKEN` where ``best`` is not finite.

        uploaded: begins with ``rows``, where the tokens are; None: they are not there yet
        """

    def enter(self, rows: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """The same of tokens that the host has, `NO_TOKEN` among them."""


class HostLastSampled:
    """`LastSampled` in the host's memory. max_rows: of the worker"""

    def __init__(self, max_rows: int) -> None:
        self._last: NDArray[np.int32] = np.zeros(max_rows, np.int32)

    def inputs(self, batch: BatchRequest) -> NDArray[np.int32]:
        return np.where(batch.token_ids == LAST_SAMPLED, self._last[batch.token_rows], batch.token_ids)

    def fill(self, tokens: KernelArray, begins: KernelArray, rows: KernelArray) -> None:
        first = begins[:-1]
        is_open = (begins[1:] > first) & (tokens.take(first, mode="clip") == LAST_SAMPLED)
        if is_open.any():  # not of a step's `inputs`
            tokens[first[is_open]] = self._last[rows[is_open]]

    def keep(
        self, rows: NDArray[np.int32], tokens: KernelArray, best: KernelArray, uploaded: KernelArray | None = None
    ) -> Fetch:
        told = only_usable(tokens, best)
        self.enter(rows, told)
        return Fetched(told)

    def enter(self, rows: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        self._last[rows] = np.maximum(tokens, 0)


class DeviceLastSampled:
    """`LastSampled` on a GPU, where steps sample and read it: one follows the other without the host."""

    def __init__(self, ops: TensorOps, kernel: CudaStepTokens, max_rows: int) -> None:
        self._ops, self._kernel, self._upload = ops, kernel, ops.step_upload()
        self._last = ops.upload(np.zeros(max_rows, np.int32))
        self._told: dict[int, KernelArray] = {}  # by how many: a step's are on their way before the next one's come

    def inputs(self, batch: BatchRequest) -> NDArray[np.int32]:
        return batch.token_ids

    def fill(self, tokens: KernelArray, begins: KernelArray, rows: KernelArray) -> None:
        self._kernel.fill(tokens, begins, rows, self._last)

    def keep(
        self, rows: NDArray[np.int32], tokens: KernelArray, best: KernelArray, uploaded: KernelArray | None = None
    ) -> Fetch:
        on_device = self._upload(rows)[0] if uploaded is None else uploaded
        told = self._told_of(len(rows))
        self._kernel.keep(on_device, tokens, best, self._last, told)
        return self._ops.fetch(told)

    def enter(self, rows: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        usable = np.zeros(len(rows), np.float32).view(np.int32)
        on_device, sampled, best = self._upload(rows, np.maximum(tokens, 0).astype(np.int32), usable)
        self._kernel.keep(on_device, sampled, best, self._last, self._told_of(len(rows)))

    def _told_of(self, rows: int) -> KernelArray:
        told = self._told.get(rows)
        if told is None:
            told = self._told[rows] = self._ops.empty_bytes(4 * rows).view(np.int32)
        return told


def only_usable(tokens: NDArray[np.int32], best: NDArray[np.float32]) -> NDArray[np.int32]:
    """The rows' tokens, or `NO_TOKEN` where the largest logit ``best`` is not finite."""
    return np.where(np.isfinite(best), tokens, np.int32(NO_TOKEN))
