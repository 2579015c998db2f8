"""Draws tokens on a GPU, where the scores are: the host half of `sampling.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.cuda.elementwise import variant_of
from headwise.kernels.cuda.launch import Kernel, address_of
from headwise.kernels.cuda.likeliest import PART_TOKENS, THREADS, is_in_rows, launches_of, parts_of
from headwise.kernels.cuda.programs import Programs

Array = Any

SOURCE = "sampling.cu"
MOST_TOKENS = 2**19
"""Of a vocabulary: more of them could weigh more than 64 bits hold."""

MOST_ROWS = 128
"""Of a launch: for so many there is memory."""

BLOCKS = 264
"""That run side by side on an H100 or H200: two on each of 132 processors. More would begin when these end."""

SCRATCH_BYTES = MOST_ROWS << 16
"""What the kernels keep of rows."""

ROW = np.dtype(
    [
        ("top_p", np.float64),
        ("seed", np.uint64),
        ("position", np.uint64),
        ("inverse_temperature", np.float32),
        ("log_min_p", np.float32),
        ("top_k", np.int32),
        ("unused", np.int32),
    ]
)
"""How a row of scores draws, as `sampling.cu` reads it. top_k 0 keeps all, and 1 is greedy."""

LEAST_LOG = -30.6
"""Of a weight that is anything in units of 2**-44, and a bit less: what is beyond it is not computed."""


@dataclass(frozen=True)
class _Kernels:
    survey: Kernel
    count_keys: Kernel
    bin_all: Kernel
    bin_range: Kernel
    draw: Kernel


class CudaSampling:
    """Tokens out of scores of ``dtype`` on the device, on the current stream.

    What is launched depends on shapes, and on how many thresholds a row has at most.

    scratch:     `SCRATCH_BYTES` of zeros on the device, which others of this class may share on one stream
    threads:     of a block, 2 to 16 warps
    part_tokens: see `parts_of`

    Raises:
        ConfigError: there is no kernel for ``dtype``.
    """

    def __init__(
        self,
        programs: Programs,
        dtype: np.dtype[Any],
        scratch: Array,
        threads: int = THREADS,
        part_tokens: int = PART_TOKENS,
    ) -> None:
        self._dtype, self._scratch, self._part_tokens = dtype, scratch, part_tokens
        variant = variant_of(dtype)
        self._counts = variant["NUMBER"] == "BF16"
        program = programs(SOURCE, variant)
        self._kernels = _Kernels(*(program.kernel(name, threads) for name in _Kernels.__annotations__))

    def takes(self, scores: Array) -> bool:
        """Whether `draw` can: of its dtype, the vocabulary not too large, each row in one piece."""
        return is_in_rows(scores, self._dtype) and scores.shape[1] <= MOST_TOKENS

    def draw(self, scores: Array, rows: Array, thresholds: int, cap: float, tokens: Array, best: Array) -> None:
        """Draw for each row of ``scores [rows, vocab]`` that `takes` accepts.

        rows:       C-contiguous, of as many bytes as there are `ROW`
        thresholds: as `thresholds_of` says of them
        cap:        logits are ``cap * tanh(scores / cap)``; 0 for none
        tokens:     int32 ``[rows]``, what is drawn
        best:       float32 ``[rows]``, each row's largest logit, or NaN; where it is not finite, its token is told
        """
        vocab, kernels = scores.shape[1], self._kernels
        shape = np.int64(scores.strides[0]), np.int32(vocab), np.float32(cap)
        counted = self._counts and not cap
        refined = thresholds * (3 if cap or self._dtype.itemsize == 4 else 2)
        for some in launches_of(len(scores), MOST_ROWS):
            rows_here = some.stop - some.start
            grid = parts_of((rows_here, vocab), self._part_tokens, BLOCKS), rows_here, 1
            scored, drawn, largest = (np.uint64(address_of(array[some])) for array in (scores, tokens, best))
            told, kept = np.uint64(address_of(rows) + some.start * ROW.itemsize), np.uint64(address_of(self._scratch))
            kernels.survey(grid, (scored, told, drawn, largest, kept, *shape))
            if thresholds and counted:
                kernels.count_keys(grid, (scored, told, kept, *shape[:2]))
            elif thresholds:
                kernels.bin_all(grid, (scored, told, kept, *shape))
                for _ in range(refined):
                    kernels.bin_range(grid, (scored, told, kept, *shape))
            kernels.draw(grid, (scored, told, drawn, kept, *shape))


def rows_of(
    temperature: NDArray[np.float64],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
    seed: NDArray[np.uint64],
    position: NDArray[np.int64],
) -> NDArray[np.void]:
    """`ROW`s of sampling parameters; a temperature of 0 is greedy."""
    rows = np.zeros(len(seed), ROW)
    greedy = temperature == 0
    with np.errstate(divide="ignore", over="ignore"):
        inverse = 1 / np.where(greedy, 1.0, temperature)
        rows["log_min_p"] = np.maximum(np.log(min_p), LEAST_LOG)
    # Not infinite: the likeliest token's distance from itself, 0, stays 0.
    rows["inverse_temperature"] = np.minimum(inverse, float(np.finfo(np.float32).max))
    rows["top_k"] = np.where(greedy, 1, top_k)
    rows["top_p"], rows["seed"], rows["position"] = top_p, seed, position
    return rows


def thresholds_of(rows: NDArray[np.void]) -> int:
    """The most that one of these `ROW`s has to search for: of top-k, of top-p, 0 to 2."""
    drawn = rows[rows["top_k"] != 1]
    return int(((drawn["top_k"] > 0).astype(int) + (drawn["top_p"] < 1)).max(initial=0))
