"""Log-probabilities of prompts' tokens, out of the hidden rows that steps compute anyway."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.models.base import Model
from headwise.runtime.ops.base import Tensor, TensorOps
from headwise.runtime.protocol.batch import BatchRequest, NewSequence
from headwise.runtime.protocol.request import TokenLogprobs
from headwise.runtime.worker.sampler import token_logprobs

MAX_ROWS = 64
"""Most rows of logits at once."""


class PromptScorer:
    """Of one rank. All ranks take part in the logits, and rank 0 has them.

    max_rows: most rows of logits at once
    """

    def __init__(self, ops: TensorOps, max_rows: int) -> None:
        self._ops = ops
        self._max_rows = min(MAX_ROWS, max_rows)
        self._asked: dict[int, NewSequence] = {}

    def open(self, sequences: Iterable[NewSequence]) -> None:
        """These sequences have got their rows."""
        for new in sequences:
            self._asked.pop(new.row, None)
            if new.asked is not None:
                self._asked[new.row] = new

    def wants(self, batch: BatchRequest) -> bool:
        """Whether any of a step's tokens is looked at by `scores`."""
        return bool(self._asked) and not self._asked.keys().isdisjoint(batch.rows.tolist())

    def scores(
        self, model: Model, batch: BatchRequest, hidden: Tensor
    ) -> tuple[dict[int, tuple[TokenLogprobs, ...]], list[int]]:
        """Log-probabilities of the tokens behind those of a step, by the sequence's index in it; and the indices of the
        sequences whose logits are not usable.

        hidden: a row for each token of the step
        """
        found: dict[int, tuple[TokenLogprobs, ...]] = {}
        broken: list[int] = []
        if not self._asked:
            return found, broken
        begins = np.cumsum(batch.query_lens, dtype=np.int64) - batch.query_lens
        for index, row in enumerate(batch.rows.tolist()):
            if row not in self._asked:
                continue
            start, count = int(batch.starts[index]), int(batch.query_lens[index])
            logprobs = self._of_one(model, self._asked[row], start, count, hidden, int(begins[index]))
            if logprobs is None:
                broken.append(index)
            elif logprobs:
                found[index] = logprobs
        return found, broken

    def _of_one(
        self, model: Model, new: NewSequence, start: int, count: int, hidden: Tensor, begin: int
    ) -> tuple[TokenLogprobs, ...] | None:
        """Those behind the tokens at ``[start, start + count)``, whose hidden rows are at ``begin``. None if logits are
        not usable; on ranks that have no logits, nothing."""
        asked = new.asked
        assert asked is not None
        first, end = max(start, asked.begin - 1), min(start + count, len(asked.tokens) - 1)
        if start + count >= len(asked.tokens):
            del self._asked[new.row]
        top = new.sampling.prompt_logprobs or 0
        logprobs: list[TokenLogprobs] = []
        is_usable = True
        for places in _slices(first, end, self._max_rows):
            scores = model.scores(self._ops.take_rows(hidden, places - start + begin))
            if scores is None:
                continue
            logits = model.capped(self._ops.numpy(scores))
            is_usable = is_usable and bool(np.isfinite(logits.max(axis=1)).all())
            if is_usable:
                following = asked.tokens[places + 1].tolist()
                logprobs += [token_logprobs(row, token, top) for row, token in zip(logits, following, strict=True)]
        return tuple(logprobs) if is_usable else None


def _slices(first: int, end: int, size: int) -> Iterator[NDArray[np.int64]]:
    for at in range(first, end, size):
        yield np.arange(at, min(at + size, end))
