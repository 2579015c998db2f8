"""Hyper-connections on a GPU: the host half of `streams.cu`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.kernels.cuda.elementwise import MOST_THREADS, NUMBERS, VECTOR_BYTES, is_computed, is_dense
from headwise.kernels.cuda.launch import Array, Kernel, addresses_of
from headwise.kernels.cuda.programs import Defines, Programs

SOURCE = "streams.cu"
THREADS = 256
COUNTS = (1, 2, 4)
"""Of streams: a warp has the matrix that mixes them."""


@dataclass(frozen=True)
class _Kernels:
    mix: Kernel
    add: Kernel


class CudaStreams:
    """One launch each, on the current stream. Streams are float16, bfloat16 or float32, without gaps; arithmetic is in
    float32, with one rounding at the end. Grids depend on shapes alone."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._kernels: dict[tuple[np.dtype[Any], int], _Kernels] = {}

    @staticmethod
    def takes(count: int, hidden: int, dtype: np.dtype[Any]) -> bool:
        """Whether there are kernels for as many streams of ``hidden`` numbers."""
        return count in COUNTS and is_computed(dtype) and not hidden * dtype.itemsize % VECTOR_BYTES

    def prepare(self, dtype: np.dtype[Any], count: int) -> _Kernels:
        """Compile or load what calls on as many streams of ``dtype`` need, so that they only enqueue."""
        key = dtype, count
        if key not in self._kernels:
            program = self._programs(SOURCE, variant_of(dtype, count))
            kernels = program.kernel("mix_streams", THREADS), program.kernel("add_to_streams", THREADS)
            self._kernels[key] = _Kernels(*kernels)
        return self._kernels[key]

    def mix(
        self,
        streams: Array,
        made: Array,
        base: Array,
        scale: Array,
        mixed: Array,
        mixing: tuple[Array, Array] | None,
        *,
        iterations: int,
        eps: float,
        norm_eps: float,
    ) -> None:
        """``mixed [tokens, hidden]`` of ``streams [tokens, n, hidden]``; see `runtime.models.hyper`.

        made:   float32 ``[tokens, (2 + n) * n]``, products with ``streams`` before these are normed; or ``[tokens, n]``
        mixing: float32 ``[tokens, n]`` and ``[tokens, n, n]``, where these go; None: streams join

        Raises:
            ValueError: the arrays do not fit each other.
        """
        tokens, count, hidden = streams.shape
        numbers = count if mixing is None else (2 + count) * count
        shapes = (tokens, numbers), (numbers,), (1 if mixing is None else 3,)
        dense = (is_dense(array, shape) for array, shape in zip((made, base, scale), shapes, strict=True))
        if not (all(dense) and is_dense(mixed, (tokens, hidden), streams.dtype) and self._are_streams(streams)):
            raise ValueError(
                f"streams {streams.dtype} {streams.shape}, {made.dtype} {made.shape} made of them, base {base.shape}, "
                f"scale {scale.shape} and mixed {mixed.shape} do not fit each other"
            )
        self.prepare(streams.dtype, count).mix(
            (tokens, 1, 1),
            (
                *addresses_of(streams, made, base, scale, mixed, *(mixing or (None, None))),
                hidden * streams.itemsize // VECTOR_BYTES, iterations, eps, norm_eps,
            ),
        )  # fmt: skip

    def add(self, streams: Array, made: Array, given: Array, between: Array) -> None:
        """``streams[:, j] = sum over i of between[:, i, j] * streams[:, i] + given[:, j] * made``, in place.

        ``made [tokens, hidden]`` may have gaps between tokens; ``given``, ``between`` are as `mix` gives them.

        Raises:
            ValueError: the arrays do not fit each other.
        """
        tokens, count, hidden = streams.shape
        vectors = hidden * streams.itemsize // VECTOR_BYTES
        has_rows = made.strides[1] == made.itemsize and not made.strides[0] % VECTOR_BYTES
        fits = made.shape == (tokens, hidden) and made.dtype == streams.dtype and has_rows
        fits = fits and is_dense(given, (tokens, count)) and is_dense(between, (tokens, count, count))
        if not (fits and self._are_streams(streams) and tokens * vectors <= MOST_THREADS):
            raise ValueError(
                f"streams {streams.dtype} {streams.shape}, {made.dtype} {made.shape} of a part, given {given.shape} "
                f"and between {between.shape} do not fit each other"
            )
        self.prepare(streams.dtype, count).add(
            (-(-tokens * vectors // THREADS), 1, 1),
            (*addresses_of(streams, made, given, between), made.strides[0], tokens * vectors, vectors),
        )

    def _are_streams(self, streams: Array) -> bool:
        _, count, hidden = streams.shape
        return self.takes(count, hidden, streams.dtype) and is_dense(streams, streams.shape, streams.dtype)


def variant_of(dtype: np.dtype[Any], count: int) -> Defines:
    """The macros of `streams.cu` for ``count`` streams of ``dtype``."""
    return {"NUMBER": NUMBERS[str(dtype)], "STREAMS": count}


def all_variants() -> Iterator[Defines]:
    """The macros of every variant of `streams.cu`, to compile them ahead."""
    for number in NUMBERS.values():
        for count in COUNTS:
            yield {"NUMBER": number, "STREAMS": count}
