"""The likeliest token of each row of scores, on a GPU: the host half of `likeliest.cu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from headwise.kernels.cuda.elementwise import variant_of
from headwise.kernels.cuda.launch import Kernel, address_of
from headwise.kernels.cuda.programs import Programs

Array = Any

SOURCE = "likeliest.cu"
THREADS = 512
"""Of a block: the most that the kernels here take."""

MOST_PARTS = 32
"""That a row is cut into, each a block's."""

BLOCKS = 512
"""About as many run side by side on a large card: four on each of 128 processors."""

PART_TOKENS = 4096
"""The fewest tokens of a part."""

MOST_ROWS = 1024
"""Of a launch: for so many there is memory."""

Zeros = Callable[[int], Array]
"""So many bytes of zeros on the device, aligned to 16."""


class CudaLikeliest:
    """Of scores of ``dtype``, on the current stream. What is launched, and what with, depends on shapes alone.

    zeros:       memory for the kernel, for as long as this lives; one launch uses it after the other
    threads:     of a block, whole warps
    part_tokens: see `parts_of`

    Raises:
        ConfigError: there is no kernel for ``dtype``.
    """

    def __init__(
        self,
        programs: Programs,
        dtype: np.dtype[Any],
        zeros: Zeros,
        threads: int = THREADS,
        part_tokens: int = PART_TOKENS,
    ) -> None:
        self._dtype, self._part_tokens = dtype, part_tokens
        self._kernel: Kernel = programs(SOURCE, variant_of(dtype)).kernel("likeliest", threads)
        self._of_parts, self._arrived = zeros(8 * MOST_ROWS * MOST_PARTS), zeros(4 * MOST_ROWS)

    def takes(self, scores: Array) -> bool:
        """Whether `__call__` can: of its dtype, each row in one piece."""
        return is_in_rows(scores, self._dtype)

    def __call__(self, scores: Array, tokens: Array, best: Array) -> None:
        """For each row of ``scores [rows, vocab]`` that `takes` accepts.

        tokens: int32 ``[rows]``, the first of a row's largest scores, or its first NaN
        best:   float32 ``[rows]``, its score
        """
        vocab = scores.shape[1]
        for some in launches_of(len(scores), MOST_ROWS):
            arrays = scores[some], tokens[some], best[some], self._of_parts, self._arrived
            self._kernel(
                (parts_of(arrays[0].shape, self._part_tokens), len(arrays[0]), 1),
                (*(np.uint64(address_of(array)) for array in arrays), np.int64(scores.strides[0]), np.int32(vocab)),
            )


def parts_of(shape: tuple[int, int], part_tokens: int, blocks: int = BLOCKS) -> int:
    """Into how many parts each row of ``[rows, vocab]`` is cut: as many as make ``blocks``, of no less than
    ``part_tokens``."""
    rows, vocab = shape
    return max(1, min(MOST_PARTS, blocks // max(rows, 1), -(-vocab // part_tokens)))


def launches_of(rows: int, most: int) -> Iterator[slice]:
    """``rows`` in slices of at most ``most``."""
    return (slice(begin, min(begin + most, rows)) for begin in range(0, rows, most))


def is_in_rows(scores: Array, dtype: np.dtype[Any]) -> bool:
    """Whether ``scores`` have ``dtype``, and each row lies in one piece."""
    return bool(scores.dtype == dtype and scores.strides[1] == dtype.itemsize)
