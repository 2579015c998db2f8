"""Logits of experts that tokens are looked up in a table for, on a GPU: the host half of `named_experts.cu`."""

from __future__ import annotations

from typing import Any

import numpy as np

from headwise.errors import ConfigError
from headwise.kernels.cuda.elementwise import MOST_THREADS, NUMBERS
from headwise.kernels.cuda.launch import Array, Kernel, addresses_of
from headwise.kernels.cuda.programs import Defines, Programs

SOURCE, KERNEL = "named_experts.cu", "keep_named"
THREADS = 256


class CudaNamedExperts:
    """One launch, on the current stream; its grid depends on shapes alone."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._kernels: dict[np.dtype[Any], Kernel] = {}

    def prepare(self, dtype: np.dtype[Any]) -> Kernel:
        """Compile or load what calls on logits of ``dtype`` need, so that they only enqueue."""
        if dtype not in self._kernels:
            self._kernels[dtype] = self._programs(SOURCE, variant_of(dtype)).kernel(KERNEL, THREADS)
        return self._kernels[dtype]

    def keep(self, logits: Array, table: Array, ids: Array, out: Array, never: float) -> None:
        """``out [tokens, experts]``: of ``logits`` those of experts ``table[ids]``, and of others ``never``.

        table: int64 ``[vocabulary, experts of a token]``; ids: int32 ``[tokens]``, known to be rows of it

        Raises:
            ValueError: the arrays do not fit each other.
        """
        tokens, experts = out.shape
        fits = logits.shape == out.shape and ids.shape == (tokens,) and logits.strides[1] == logits.itemsize
        typed = logits.dtype == out.dtype and table.dtype == np.int64 and ids.dtype == np.int32
        dense = all(array.flags.c_contiguous for array in (table, ids, out))
        if not (fits and typed and dense and out.size <= MOST_THREADS):
            raise ValueError(
                f"logits {logits.dtype} {logits.shape}, a table {table.dtype} {table.shape}, ids {ids.dtype} "
                f"{ids.shape} and out {out.dtype} {out.shape} do not fit each other"
            )
        self.prepare(logits.dtype)(
            (-(-out.size // THREADS), 1, 1),
            (
                *addresses_of(logits, table, ids, out), logits.strides[0] // logits.itemsize, out.size, experts,
                table.shape[1], never,
            ),
        )  # fmt: skip


def variant_of(dtype: np.dtype[Any]) -> Defines:
    """The macros of `named_experts.cu` for logits of ``dtype``.

    Raises:
        ConfigError: there is no such variant.
    """
    if str(dtype) not in NUMBERS:
        raise ConfigError(f"a GPU does not compute in {dtype}: choose {', '.join(NUMBERS)}")
    return {"NUMBER": NUMBERS[str(dtype)]}
