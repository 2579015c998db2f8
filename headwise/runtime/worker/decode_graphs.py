"""Decode steps as CUDA graphs: the hundreds of launches of a step become one.

A graph is recorded for one batch size and one width of the block tables; batches are padded up to it. What changes from
step to step (tokens, positions, lengths, rows of the block tables) is in a buffer at fixed addresses; the tables are
gathered by the graph, so that blocks that were loaded, recycled or allocated meanwhile are found without a new one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_tables import BlockTables
from headwise.errors import first_line
from headwise.kernels.base import AttentionBatch
from headwise.runtime.ops.base import CapturingOps, KernelArray, Tensor
from headwise.runtime.worker.last_sampled import LastSampled

log = logging.getLogger(__name__)

FINE_ROWS, ROWS_STEP = 8, 8
"""Batch sizes up to the first are padded to powers of two, larger ones to multiples of the second."""

MIN_COLUMNS = 16
"""Of block tables; wider ones are padded to powers of two."""


@dataclass(frozen=True)
class Scored:
    """Scores of the tokens that may come next, on the device; None on ranks that have none.

    scores:    ``[rows, vocab_size]``, as `Model.scores` says
    likeliest: of each row, as `TensorOps.greedy` says
    """

    scores: Tensor | None
    likeliest: tuple[KernelArray, KernelArray] | None

    @property
    def arrays(self) -> Sequence[KernelArray]:
        """All there are; see `of`."""
        return () if self.scores is None or self.likeliest is None else (self.scores, *self.likeliest)

    @classmethod
    def of(cls, arrays: Sequence[KernelArray]) -> Scored:
        """The reverse of `arrays`."""
        return cls(arrays[0], (arrays[1], arrays[2])) if arrays else cls(None, None)

    def first(self, rows: int) -> Tensor | None:
        """The scores of the first ``rows``."""
        return None if self.scores is None else self.scores[:rows]


Compute = Callable[[KernelArray, KernelArray, AttentionBatch], Scored]
"""From token ids, positions and the batch; only enqueues."""


class _Bucket:
    """One padded shape of decode steps."""

    def __init__(self) -> None:
        self.replay: Callable[[], Scored] | None = None
        self.uses = 0


class DecodeGraphs:
    """Runs decode steps: the first of a shape as it is, which loads what it needs, later ones as a graph.

    compute:   a step's forward pass
    tables:    the worker's, changed between steps only, on the stream that steps run on
    last:      tokens of the steps before, likewise
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
    ) -> None:
        self._ops, self._compute, self._tables, self._last, self._all_ranks = ops, compute, tables, last, all_ranks
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        # One for all shapes, none of which it has to grow for: graphs read where it wrote when they were recorded.
        self._upload = ops.step_upload(capacity=5 * padded_rows(tables.shape.max_rows) + 1)
        self._may_capture = True

    @property
    def captured(self) -> int:
        """Graphs that there are."""
        return sum(bucket.replay is not None for bucket in self._buckets.values())

    def step(
        self,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        table_rows: NDArray[np.int32],
    ) -> Scored:
        """One token of each of ``[batch]`` sequences, whose block tables are at ``table_rows``.

        The first ``batch`` rows of what comes of it are the sequences'. It is valid until the next step.
        """
        batch = len(token_ids)
        rows = padded_rows(batch)
        columns = padded_columns(self._tables.shape.columns(int(seq_lens.max())))
        starts = np.minimum(np.arange(rows + 1, dtype=np.int32), np.int32(batch))
        padded = (_padded(array, rows) for array in (token_ids, positions, seq_lens, table_rows))
        arrays = self._upload(starts, *padded)
        bucket = self._buckets.setdefault((rows, columns), _Bucket())
        return self._run(bucket, self._work(columns, *arrays))

    def _work(
        self,
        columns: int,
        starts: KernelArray,
        tokens: KernelArray,
        positions: KernelArray,
        seq_lens: KernelArray,
        table_rows: KernelArray,
    ) -> Callable[[], Scored]:
        """What the step enqueues. Does not hold its graphs: these go, and their memory, with the last other holder."""
        compute, tables, last = self._compute, self._tables, self._last

        def work() -> Scored:
            last.fill(tokens, starts, table_rows)
            gathered = tables.gather(table_rows, seq_lens, columns)  # of padding, nothing: it has no tokens
            batch = AttentionBatch(starts, seq_lens, gathered, tables.shape.groups, max_query_len=1)
            return compute(tokens, positions, batch)

        return work

    def _run(self, bucket: _Bucket, compute: Callable[[], Scored]) -> Scored:
        bucket.uses += 1
        if bucket.replay is None and bucket.uses == 2 and self._may_capture:
            bucket.replay = self._capture(compute)
            self._may_capture = bucket.replay is not None
        return compute() if bucket.replay is None else bucket.replay()

    def _capture(self, compute: Callable[[], Scored]) -> Callable[[], Scored] | None:
        """A graph of the step; None if it cannot be recorded on every rank: steps are right without, too."""
        replay, trouble = None, "they cannot be recorded on another rank"
        try:
            replay = self._ops.capture(lambda: compute().arrays)
        except Exception as error:  # CuPy's own kinds
            trouble = first_line(error)
        if self._all_ranks(replay is not None) and replay is not None:
            return lambda: Scored.of(replay())
        log.warning("decode steps run without CUDA graphs: %s", trouble)
        return None


def padded_rows(batch: int) -> int:
    """The batch size that a batch is padded to."""
    if batch <= FINE_ROWS:
        return 1 << (batch - 1).bit_length()
    return -(-batch // ROWS_STEP) * ROWS_STEP


def padded_columns(columns: int) -> int:
    """The width that block tables are padded to."""
    return max(MIN_COLUMNS, 1 << (columns - 1).bit_length())


def _padded(array: NDArray[np.int32], length: int) -> NDArray[np.int32]:
    padded = np.zeros(length, dtype=np.int32)
    padded[: len(array)] = array
    return padded
