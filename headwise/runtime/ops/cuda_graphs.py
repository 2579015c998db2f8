"""CUDA graphs through CuPy: what is enqueued on its current stream, recorded and launched again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cupy

from headwise.runtime.ops.base import Between, Cut, KernelArray


class CudaGraphs:
    """Records graphs, all of which compute in the same memory.

    They have a memory pool of their own, since a graph uses the addresses that it was captured with. They share it:
    they run one after the other, and one's results are read before the next begins. So the largest is best recorded
    first: what the others need is then there.
    """

    def __init__(self) -> None:
        self._blocks: list[Any] = []
        self._memory = cupy.cuda.MemoryPool(partial(_kept_block, self._blocks))

    def record(self, work: Callable[[Cut], Sequence[KernelArray]]) -> Callable[[Between], Sequence[KernelArray]]:
        """See `CapturingOps.capture_pieces`."""
        work(_nothing)  # compiles, loads and allocates what a capture must not
        stream, graphs = cupy.cuda.get_current_stream(), []

        def cut() -> None:
            graphs.append(stream.end_capture())
            stream.begin_capture()

        with cupy.cuda.using_allocator(self._memory.malloc):
            stream.begin_capture()
            try:
                results = [borrowed(array) for array in work(cut)]
            except BaseException:
                with contextlib.suppress(Exception):  # the capture is void already
                    stream.end_capture()
                raise
            *pieces, last = [*graphs, stream.end_capture()]

        def replay(between: Between) -> Sequence[KernelArray]:
            for number, piece in enumerate(pieces):
                piece.launch()
                if not between(number):
                    return results
            last.launch()
            return results

        return replay

    def give_back(self) -> None:
        """Let go of the memory. No graph is launched any more."""
        self._memory.free_all_blocks()
        self._blocks.clear()


def borrowed(array: Any) -> Any:
    """The same array, but it does not keep its memory: the pool may give that to others."""
    memory = cupy.cuda.UnownedMemory(array.data.ptr, array.nbytes, None, array.device.id)
    start = cupy.cuda.MemoryPointer(memory, 0)
    if array.flags.c_contiguous:
        return cupy.ndarray(array.shape, array.dtype, start)
    return cupy.ndarray(array.shape, array.dtype, start, array.strides)


def _nothing() -> None:
    pass


def _kept_block(blocks: list[Any], num_bytes: int) -> Any:
    """Device memory for a pool, which ``blocks`` keeps alive: a pool gives back what is free when memory is short, but
    captured graphs still use that whenever they are launched."""
    block = cupy.cuda.MemoryPointer(cupy.cuda.Memory(num_bytes), 0)
    blocks.append(block)
    return block
