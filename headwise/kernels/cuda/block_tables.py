"""Block tables in a GPU's memory: the host half of `block_tables.cu`."""

from __future__ import annotations

from typing import Any

from headwise.cache_controller.block_tables import TableShape
from headwise.kernels.cuda.launch import Kernel, addresses_of
from headwise.kernels.cuda.programs import Programs

Array = Any

SOURCE = "block_tables.cu"
THREADS = 256
EACH = 8
"""Cells of a thread: ``EACH`` of the source."""


class CudaBlockTables:
    """Changes and gathers ``tables``, int32 of ``shape``'s cells without gaps, on the current stream.

    All arrays are int32 on the device, C-contiguous. What is launched depends on shapes alone, and nothing is
    allocated. Rows, groups and block indexes are known to be of ``shape``.
    """

    def __init__(self, programs: Programs, threads: int = THREADS) -> None:
        program = programs(SOURCE, {})
        self._threads = threads
        self._clear: Kernel = program.kernel("clear", threads)
        self._apply: Kernel = program.kernel("apply", threads)
        self._gather: Kernel = program.kernel("gather", threads)

    def clear(self, tables: Array, shape: TableShape, rows: Array) -> None:
        """Let ``rows [n]`` name no block."""
        cells = shape.groups * shape.max_blocks
        grid = (len(rows), self._pieces(cells), 1)
        self._clear(grid, (*addresses_of(tables, rows), cells))

    def apply(self, tables: Array, shape: TableShape, updates: Array) -> None:
        """Enter ``updates [k, 4]`` of (row, group, block index, block id). Those of one cell are equal; those of row -1
        are padding.
        """
        count = len(updates)
        arguments = (*addresses_of(tables, updates), count, shape.groups, shape.max_blocks)
        self._apply((-(-count // self._threads), 1, 1), arguments)

    def gather(self, tables: Array, shape: TableShape, rows: Array, seq_lens: Array, out: Array) -> None:
        """See `BlockTables.gather`: into ``out [len(rows) * groups, columns]``."""
        columns = out.shape[1]
        sizes = (shape.groups, shape.max_blocks, columns, shape.block_size)
        self._gather((len(out), self._pieces(columns), 1), (*addresses_of(tables, rows, seq_lens, out), *sizes))

    def _pieces(self, cells: int) -> int:
        return -(-cells // (EACH * self._threads))
