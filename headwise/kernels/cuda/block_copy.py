"""Block copy between a GPU's memory and pinned host memory: which pieces go which way.

    pieces that are few            cudaMemcpyAsync, a call each; coalesced runs mostly end here
    many of at least a crossover   the copy engines, by cuMemcpyBatchAsync
    many smaller ones              a kernel that reads and writes pinned host memory directly (`block_copy.cu`)

The copy engines take none of the multiprocessors, and copy an H200's pieces of 32 KiB as fast as any; but the driver
takes the host a microsecond for each piece. Where that is more than the kernel takes to copy one differs by host and
bus, and is measured at start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.cuda.copy_driver import CopyDriver, CupyCopyDriver
from headwise.kernels.cuda.copy_plan import Pieces, plan_pieces, split_pieces
from headwise.kernels.cuda.launch import address_of
from headwise.kernels.cuda.programs import CudaPrograms, Programs
from headwise.kernels.cuda.staging import StagingRing

CROSSOVER_BYTES = 48 << 10
"""Pieces of this size on go to the copy engines, where it was not measured."""

CANDIDATES = tuple(kib << 10 for kib in (2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128))
"""Sizes of pieces at which the two ways are compared."""

PIECE_BYTES = 128 << 10
"""Of a block, which the copy engines bring in more time than the host takes to ask for it."""

BATCH_PIECES = 128
"""Of a call to the copy engines: they begin when it returns."""

FEW = 4
"""Up to so many pieces are not worth gathering: a call of cudaMemcpyAsync takes 2 us."""

RING_BYTES = 4 << 20
"""Staging memory for tables of pieces: 170,000 pieces may be in flight."""

SOURCE, KERNEL = "block_copy.cu", "copy_pieces"
CHUNK_BYTES = 2048
"""Bytes a warp copies at a time: ``CHUNK`` of the source."""

THREADS = 1024
BLOCKS = 4
"""Blocks of the kernel at most: 256 KiB in flight fill any bus. Where one of them is, however small, a multiprocessor
has no room for a prompt's attention: so they are few and large."""

_MEASURED_PIECES, _REPEATS = 64, 3
_TABLE_ROW_BYTES = 3 * 8
log = logging.getLogger(__name__)


class CudaBlockCopy:
    """`BlockCopy` on the calling thread's current stream. It returns when all is enqueued.

    Arenas are on the device or in host memory. Host memory should be pinned and mapped: with other memory, right after
    a start say, every piece is a call of its own that the host waits for.

    crossover_bytes: pieces of this size on go to the copy engines

    It owns memory that copies go through: keep it until they are done.
    """

    name = "cuda"
    piece_bytes = PIECE_BYTES

    def __init__(self, driver: CopyDriver, programs: Programs, crossover_bytes: int = CROSSOVER_BYTES) -> None:
        self.crossover_bytes = crossover_bytes
        self._driver = driver
        self._kernel = programs(SOURCE, {}).kernel(KERNEL, THREADS)
        self._ring = StagingRing(driver, RING_BYTES)
        self._lock = threading.Lock()
        self._told = False

    def __call__(
        self, source: Any, target: Any, pairs: NDArray[np.int32], ranges: NDArray[np.int64], block_bytes: int
    ) -> None:
        """See `BlockCopy`."""
        pieces = plan_pieces(pairs, ranges, block_bytes, source.nbytes, target.nbytes)
        if not pieces.shape[1]:
            return
        addresses = address_of(source), address_of(target)
        mapped = [
            self._driver.device_address(*at) for at in zip(addresses, (source.nbytes, target.nbytes), strict=True)
        ]
        if mapped[0] is None or mapped[1] is None:
            self._tell()
            self.copy_each(_placed(pieces, *addresses))
            return
        split = split_pieces(pieces, self.crossover_bytes, FEW)
        if split.kernel.shape[1]:
            self.copy_by_kernel(_placed(split.kernel, mapped[0], mapped[1]))
        if split.batch.shape[1]:
            self.copy_by_engines(_placed(split.batch, *addresses))
        if split.single.shape[1]:
            self.copy_each(_placed(split.single, *addresses))

    def copy_each(self, placed: Pieces) -> None:
        """Enqueue a copy of every piece, given by addresses."""
        for source, target, size in placed.T.tolist():
            self._driver.copy(target, source, size)

    def copy_by_engines(self, placed: Pieces) -> None:
        """Enqueue copies of pieces, given by addresses, by the copy engines: many at once where that is to be had."""
        for first in range(0, placed.shape[1], BATCH_PIECES):
            some = placed[:, first : first + BATCH_PIECES]
            sources, targets, sizes = some.view(np.uint64)
            if not self._driver.copy_batch(targets, sources, sizes):
                self.copy_each(some)

    def copy_by_kernel(self, placed: Pieces) -> None:
        """Enqueue kernels that copy pieces, given by the addresses at which kernels find them."""
        most = self._ring.num_bytes // 4 // _TABLE_ROW_BYTES
        with self._lock:
            for first in range(0, placed.shape[1], most):
                self._launch(np.ascontiguousarray(placed[:, first : first + most]))

    def _launch(self, placed: Pieces) -> None:
        count, chunks = placed.shape[1], -(-int(placed[2].max()) // CHUNK_BYTES)
        blocks = min(BLOCKS, -(-count * chunks * 32 // THREADS))
        with self._ring.staged(placed) as sources:
            rows = [sources + row * placed.strides[0] for row in range(3)]
            self._kernel((blocks, 1, 1), (*rows, count, chunks))

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            log.warning("block copy: host memory is not pinned; until it is, blocks are copied one at a time")


def make_cuda_block_copy(cubins: Path) -> CudaBlockCopy:
    """The block copy of CuPy's current device, its crossover measured in some milliseconds. ``cubins``: where machine
    code is kept.

    Raises:
        ConfigError: as `programs.cubin_path`.
    """
    import cupy

    driver = CupyCopyDriver()
    copy = CudaBlockCopy(driver, CudaPrograms(cubins))
    with cupy.cuda.Stream(non_blocking=True):
        copy.crossover_bytes = measure_crossover(copy, driver)
    log.info("block copy: a kernel copies pieces of less than %d bytes, the copy engines others", copy.crossover_bytes)
    return copy


def measure_crossover(copy: CudaBlockCopy, driver: CopyDriver, clock: Callable[[], float] = time.perf_counter) -> int:
    """The first of `CANDIDATES` that the host enqueues on the copy engines in no more time than the kernel takes to
    copy them, both directions together. clock: in seconds"""
    memory = driver.allocate(2 * _MEASURED_PIECES * CANDIDATES[-1])
    host, device = memory.host.ctypes.data, memory.device
    mapped = driver.device_address(host, memory.host.nbytes)
    if mapped is None:
        return CROSSOVER_BYTES
    for size in CANDIDATES:
        begins = np.arange(_MEASURED_PIECES) * 2 * size
        pieces = np.stack([begins, begins, np.full_like(begins, size)])
        _, copied = _seconds(driver, copy.copy_by_kernel, pieces, mapped, device, clock)
        enqueued, _ = _seconds(driver, copy.copy_by_engines, pieces, host, device, clock)
        if enqueued <= copied:
            return size
    return 2 * CANDIDATES[-1]


def _seconds(
    driver: CopyDriver,
    way: Callable[[Pieces], None],
    pieces: Pieces,
    host: int,
    device: int,
    clock: Callable[[], float],
) -> tuple[float, float]:
    """What it takes to enqueue, and to copy, to the device and back: the best of some runs; the first, which wakes
    things up, is not counted."""
    enqueued = list[float]()

    def there_and_back() -> None:
        began = clock()
        way(_placed(pieces, host, device))
        way(_placed(pieces, device, host))
        enqueued.append(clock() - began)

    copied = [driver.seconds(there_and_back) for _ in range(1 + _REPEATS)]
    return min(enqueued[1:]), min(copied[1:])


def _placed(pieces: Pieces, source: int, target: int) -> Pieces:
    """Pieces by address, of arenas at ``source`` and ``target``."""
    at: Pieces = np.array([[source], [target], [0]])
    return pieces + at
