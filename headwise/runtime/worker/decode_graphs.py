"""Decode steps as CUDA graphs: the hundreds of launches of a step become one.

A graph is recorded for one batch size and one width of the block tables, all of them at start; batches are padded up
to it. What changes from step to step (tokens, positions, lengths, rows of the block tables) is in a buffer at fixed
addresses; the tables are gathered by the graph, so that blocks that were loaded, recycled or allocated meanwhile are
found without a new one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_tables import BlockTables
from headwise.cache_controller.radix_tree import NOWHERE
from headwise.errors import first_line
from headwise.kernels.base import AttentionBatch
from headwise.runtime.ops.base import CapturingOps, KernelArray, Tensor
from headwise.runtime.worker.drafts import turned
from headwise.runtime.worker.last_sampled import LastSampled
from headwise.runtime.worker.padding import all_sizes, padded

log = logging.getLogger(__name__)

FINE_ROWS, ROWS_STEP = 8, 8
"""Batch sizes up to the first are padded to powers of two, larger ones to multiples of the second, and where these are
less than an eighth of them, to multiples of an eighth of a power of two."""

LEAST_CHANGES = 16
"""Changes of block tables for which there is room in a graph, and for as many as rows, if that is more: most steps have
fewer, as most sequences begin no block."""

TABLE_ROWS = 5
"""Which of the arrays of a step is that."""

MIN_COLUMNS, COLUMNS_FACTOR = 16, 4
"""Of block tables; wider ones are padded to as many times that. What is not reached costs nothing but its place."""


@dataclass(frozen=True)
class Scored:
    """Scores of the tokens that may come next, on the device; None on ranks that have none.

    scores:     ``[rows, vocab_size]``, as `Model.scores` says
    likeliest:  of each row, as `TensorOps.greedy` says
    table_rows: int32 ``[rows]``, where the sequences' block tables are, and all else that is kept by row
    hidden:     what drafts are made of, on every rank, where the model makes some: see `Model.for_drafts`. Of another
                stage than a pipeline's last, the residual stream, and nothing else
    """

    scores: Tensor | None
    likeliest: tuple[KernelArray, KernelArray] | None
    table_rows: KernelArray | None = None
    hidden: KernelArray | None = None

    @property
    def arrays(self) -> Sequence[KernelArray]:
        """What a step computes; see `of`."""
        scored = () if self.scores is None or self.likeliest is None else (self.scores, *self.likeliest)
        return scored if self.hidden is None else (*scored, self.hidden)

    @classmethod
    def of(cls, arrays: Sequence[KernelArray], table_rows: KernelArray | None = None) -> Scored:
        """The reverse of `arrays`."""
        hidden = arrays[-1] if len(arrays) in (1, 4) else None
        if len(arrays) < 3:
            return cls(None, None, table_rows, hidden)
        return cls(arrays[0], (arrays[1], arrays[2]), table_rows, hidden)


Compute = Callable[[KernelArray, KernelArray, AttentionBatch], Scored]
"""From token ids, positions and the batch; only enqueues."""

_NO_UPDATE: NDArray[np.int32] = np.zeros((0, 4), np.int32)


class DecodeGraphs:
    """Runs decode steps, as graphs once they are recorded.

    compute:   a step's forward pass
    tables:    the worker's, changed between steps only, on the stream that steps run on
    last:      tokens of the steps before, likewise
    tells_follows: whether steps say which sequences follow others, as of models that keep states they must; then graphs
               know it of each step
    axes:      positions of a token
    reads_jointly: whether steps may say which sequences read tokens together: those that do have graphs of their own,
               of the widest tables alone
    all_ranks: whether what it is given is so on every rank. All ranks run the same steps, so all ask it of the same
               graph: NCCL wants its operations recorded, and launched as graphs, by all ranks or by none
    """

    def __init__(
        self,
        ops: CapturingOps,
        compute: Compute,
        tables: BlockTables,
        last: LastSampled,
        all_ranks: Callable[[bool], bool] = bool,
        tells_follows: bool = False,
        axes: int = 1,
        reads_jointly: bool = False,
    ) -> None:
        self._ops, self._compute, self._tables, self._last, self._all_ranks = ops, compute, tables, last, all_ranks
        self._tells_follows, self._axes, self._reads_jointly = tells_follows, axes, reads_jointly
        self._replays: dict[tuple[int, int, bool], Callable[[], Sequence[KernelArray]]] = {}
        # By padded rows and batch: where sequences begin, and changes of the tables that are none.
        self._constants: dict[tuple[int, int], tuple[NDArray[np.int32], NDArray[np.int32]]] = {}
        # One for all shapes, none of which it has to grow for: graphs read where it wrote when they were recorded.
        rows = padded_rows(tables.shape.max_rows)
        of_each = 4 + axes + tells_follows + 3 * reads_jointly
        self._upload = ops.step_upload(capacity=4 * changes_of(rows) + of_each * rows + 1)

    @property
    def captured(self) -> int:
        """Graphs that there are."""
        return len(self._replays)

    def record(self) -> None:
        """Record steps of all shapes, the largest first, or as many as can be on every rank."""
        nobody = np.zeros(0, np.int32)
        nowhere = turned(nobody, self._axes)
        shape = self._tables.shape
        batches, widths = all_sizes(padded_rows, shape.max_rows), all_sizes(self._width, shape.max_blocks)
        log.info("recording decode steps of %d batch sizes and %d widths as CUDA graphs", len(batches), len(widths))
        nothing = np.zeros((3, 0), np.int32)
        for rows in reversed(batches):
            together = [(widths[-1], nothing)] if self._reads_jointly and rows > 1 else []
            for columns, joint in (*together, *((columns, None) for columns in reversed(widths))):
                arrays = self._uploaded(rows, joint, _NO_UPDATE, nobody, nowhere, nobody, nobody, nobody)
                replay = self._capture(self._work(columns, joint is not None, *arrays))
                if replay is None:
                    return
                self._replays[rows, columns, joint is not None] = replay

    def step(
        self,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        table_rows: NDArray[np.int32],
        updates: NDArray[np.int32] = _NO_UPDATE,
        follows: NDArray[np.int32] | None = None,
        joint: NDArray[np.int32] | None = None,
    ) -> Scored:
        """One token of each of ``[batch]`` sequences, whose block tables are at ``table_rows``, once ``updates`` of the
        tables are applied: as a part of the graph, where that has room for as many. positions: `turned` by as many
        as a token has; follows, joint: see `AttentionBatch`

        The first ``batch`` rows of what comes of it are the sequences'. It is valid until the next step.
        """
        rows = padded_rows(len(token_ids))
        columns = self._width(self._tables.shape.columns(int(seq_lens.max())))
        if len(updates) > changes_of(rows):
            self._tables.apply(updates)
            updates = _NO_UPDATE
        if joint is not None:
            columns = self._width(self._tables.shape.max_blocks)
        told = np.zeros_like(table_rows) if follows is None else follows
        arrays = self._uploaded(rows, joint, updates, token_ids, positions, seq_lens, table_rows, told)
        kind = joint is not None
        replay = self._replays.get((rows, columns, kind)) or self._work(columns, kind, *arrays)
        return Scored.of(replay(), arrays[TABLE_ROWS])

    def _width(self, columns: int) -> int:
        return min(padded_columns(columns), max(MIN_COLUMNS, self._tables.shape.max_blocks))

    def _uploaded(
        self, rows: int, joint: NDArray[np.int32] | None, updates: NDArray[np.int32], *each: NDArray[np.int32]
    ) -> Sequence[KernelArray]:
        """What `_work` is given, padded to so many rows. each: as many numbers as sequences; the last, what follows"""
        arrays = each if self._tells_follows else each[:-1]
        batch = len(arrays[0])
        constants = self._constants.get((rows, batch))
        if constants is None:
            starts = np.minimum(np.arange(rows + 1, dtype=np.int32), np.int32(batch))
            constants = self._constants[rows, batch] = starts, np.full((changes_of(rows), 4), NOWHERE, np.int32)
        starts, changes = constants
        if len(updates):
            changes = changes.copy()
            changes[: len(updates)] = self._tables.in_any_order(updates)
        if batch < rows:
            arrays = tuple(padded(array, rows) for array in arrays)
        if joint is not None:
            arrays = (*arrays, np.pad(joint, ((0, 0), (0, rows - batch))))
        return self._upload(changes, starts, *arrays)

    def _work(
        self,
        columns: int,
        is_joint: bool,
        changes: KernelArray,
        starts: KernelArray,
        tokens: KernelArray,
        positions: KernelArray,
        seq_lens: KernelArray,
        table_rows: KernelArray,
        *more: KernelArray,
    ) -> Callable[[], Sequence[KernelArray]]:
        """What the step enqueues. Does not hold its graphs: these go, and their memory, with the last other holder.

        more: what follows, if steps tell it; what is read together, if it ``is_joint``
        """
        compute, tables, last = self._compute, self._tables, self._last
        told = {"follows_on_device": more[0]} if self._tells_follows else {}
        if is_joint:
            told["joint"] = more[-1]

        def work() -> Sequence[KernelArray]:
            tables.enter(changes)
            last.fill(tokens, starts, table_rows)
            gathered = tables.gather(table_rows, seq_lens, columns)  # of padding, nothing: it has no tokens
            shape = gathered, tables.shape.groups
            batch = AttentionBatch(starts, seq_lens, *shape, max_query_len=1, **told)
            return compute(tokens, positions, batch).arrays

        return work

    def _capture(self, work: Callable[[], Sequence[KernelArray]]) -> Callable[[], Sequence[KernelArray]] | None:
        """A graph of the step; None if it cannot be recorded on every rank: steps are right without, too."""
        replay, trouble = None, "they cannot be recorded on another rank"
        try:
            replay = self._ops.capture(work)
        except Exception as error:  # CuPy's own kinds
            trouble = first_line(error)
        if self._all_ranks(replay is not None) and replay is not None:
            return replay
        which = f"those of {self.captured} shapes" if self._replays else "none"
        log.warning("decode steps run without CUDA graphs, but for %s: %s", which, trouble)
        return None


def padded_rows(batch: int) -> int:
    """The batch size that a batch is padded to."""
    if batch <= FINE_ROWS:
        return 1 << (batch - 1).bit_length()
    step = max(ROWS_STEP, (1 << (batch - 1).bit_length()) // 8)
    return -(-batch // step) * step


def changes_of(rows: int) -> int:
    """Changes of block tables for which a graph of so many rows has room."""
    return max(LEAST_CHANGES, rows)


def padded_columns(columns: int) -> int:
    """The width that block tables are padded to, where they are as wide."""
    width = MIN_COLUMNS
    while width < columns:
        width *= COLUMNS_FACTOR
    return width
