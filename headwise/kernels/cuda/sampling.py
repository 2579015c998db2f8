"""Draws tokens on a GPU, where the scores are: the host half of `sampling.cu`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.cuda.elementwise import variant_of
from headwise.kernels.cuda.launch import Kernel, address_of
from headwise.kernels.cuda.programs import Programs

Array = Any

SOURCE = "sampling.cu"
THREADS = 1024
MOST_TOKENS = 2**19
"""Of a vocabulary: more of them could weigh more than 64 bits hold."""

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
"""How a row of scores draws, as `sampling.cu` reads it. No min-p is -inf; top_k 0 keeps all, and 1 is greedy."""


class CudaSampling:
    """Tokens out of scores of ``dtype`` on the device, on the current stream. What is launched depends on shapes alone.

    threads: of a block, 2 to 32 warps

    Raises:
        ConfigError: there is no kernel for ``dtype``.
    """

    def __init__(self, programs: Programs, dtype: np.dtype[Any], threads: int = THREADS) -> None:
        self._dtype = dtype
        program = programs(SOURCE, variant_of(dtype))
        self._draw: Kernel = program.kernel("draw", threads)
        self._likeliest: Kernel = program.kernel("likeliest", threads)

    def takes(self, scores: Array) -> bool:
        """Whether the other methods can: of its dtype, the vocabulary not too large, each row in one piece."""
        itemsize = self._dtype.itemsize
        return bool(scores.dtype == self._dtype and scores.shape[1] <= MOST_TOKENS and scores.strides[1] == itemsize)

    def draw(self, scores: Array, rows: Array, cap: float, tokens: Array, best: Array) -> None:
        """Draw for each row of ``scores [rows, vocab]`` that `takes` accepts.

        rows:   C-contiguous, of as many bytes as there are `ROW`
        cap:    logits are ``cap * tanh(scores / cap)``; 0 for none
        tokens: int32 ``[rows]``, what is drawn
        best:   float32 ``[rows]``, each row's largest logit, or NaN; where it is not finite, its token is told
        """
        count, vocab = scores.shape
        self._draw(
            (count, 1, 1),
            (
                *(np.uint64(address_of(array)) for array in (scores, rows, tokens, best)),
                np.int64(scores.strides[0]), np.int32(vocab), np.float32(cap),
            ),
        )  # fmt: skip

    def likeliest(self, scores: Array, tokens: Array, best: Array) -> None:
        """The likeliest token of each row, the first of equals, or its first NaN, as `draw` gives them."""
        count, vocab = scores.shape
        self._likeliest(
            (count, 1, 1),
            (
                *(np.uint64(address_of(array)) for array in (scores, tokens, best)),
                np.int64(scores.strides[0]), np.int32(vocab),
            ),
        )  # fmt: skip


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
        rows["log_min_p"] = np.log(min_p)
    # Not infinite: the likeliest token's distance from itself, 0, stays 0.
    rows["inverse_temperature"] = np.minimum(inverse, float(np.finfo(np.float32).max))
    rows["top_k"] = np.where(greedy, 1, top_k)
    rows["top_p"], rows["seed"], rows["position"] = top_p, seed, position
    return rows
