"""Chooses the tokens that a step samples: where the scores are, if nothing of them is wanted on the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.models.base import Model
from headwise.runtime.ops.base import Fetch, Fetched, KernelArray, Tensor, TensorOps
from headwise.runtime.ops.comm import Collectives, Communicator, Sampled
from headwise.runtime.protocol.batch import BatchRequest, NewSequence
from headwise.runtime.protocol.request import TokenLogprobs
from headwise.runtime.worker.decode_graphs import Scored
from headwise.runtime.worker.device_sampler import DeviceSampler
from headwise.runtime.worker.drafts import SampledRows
from headwise.runtime.worker.last_sampled import NO_TOKEN, LastSampled
from headwise.runtime.worker.logit_editor import LogitEditor
from headwise.runtime.worker.sampler import Draws, sample, token_logprobs

NOTHING: Fetch = Fetched(np.empty(0, np.int32))


@dataclass(frozen=True)
class Chosen:
    """The next tokens of a step's sequences.

    wanted:   whose they are, by index into the batch: one with drafts has several
    tokens:   int32 ``[len(wanted)]``, `NO_TOKEN` where there is none
    logprobs: by index into the batch, where asked for
    failures: by index, why there is no token, where it is not for the logits
    """

    wanted: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    tokens: Fetch = NOTHING
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)


class NextTokens:
    """Of one rank's rows. Rank 0 chooses, and tells the others, who need the tokens as the next step's input.

    collectives: tell them; where these only enqueue, no host waits for a token
    last:        has the tokens of earlier steps, and is given those of this one
    sampler:     draws where the scores are; None: the host does
    """

    def __init__(
        self,
        ops: TensorOps,
        comm: Communicator,
        collectives: Collectives,
        last: LastSampled,
        sampler: DeviceSampler | None,
        editor: LogitEditor,
    ) -> None:
        self._ops, self._comm, self._collectives = ops, comm, collectives
        self._last, self._sampler, self._editor = last, sampler, editor
        self._sequences: dict[int, NewSequence] = {}
        self._more: set[int] = set()  # rows of which more is wanted than the likeliest token

    def open(self, sequences: Iterable[NewSequence]) -> None:
        """These sequences have got their rows."""
        new = list(sequences)
        for sequence in new:
            self._sequences[sequence.row] = sequence
            is_likeliest = sequence.sampling.greedy and sequence.sampling.logprobs is None
            (self._more.discard if is_likeliest else self._more.add)(sequence.row)
        if self._comm.rank == 0:
            self._editor.open(new)

    def choose(self, batch: BatchRequest, model: Model, found: Tensor | Scored | None) -> Chosen:
        """``found`` is of the `SampledRows`, in order: their hidden rows; or already their scores, of a step that
        samples behind each token.

        Where the device chooses, and tells the other ranks, the host does not wait for it.
        """
        if found is None:
            return Chosen()
        sampled = SampledRows.of(batch)
        wanted, rows = sampled.sequences, batch.rows[sampled.sequences]
        if not isinstance(found, Scored):
            found = Scored(model.step_scores(found), None)
        scores, uploaded = found.scores, found.table_rows
        if scores is None:
            return Chosen(wanted, self._keep(rows, uploaded, None))
        if not self._more or self._more.isdisjoint(rows.tolist()):
            tokens, best = found.likeliest or self._ops.greedy(scores)
            return Chosen(wanted, self._keep(rows, uploaded, (_first(tokens, len(rows)), _first(best, len(rows)))))
        scores = _first(scores, len(rows))
        sequences = [self._sequences[row] for row in rows.tolist()]
        seeds = np.array([sequence.seed for sequence in sequences], dtype=np.uint64)
        positions = sampled.positions(batch)
        draws = Draws([sequence.sampling for sequence in sequences], seeds, positions)
        drawn = self._draw(rows, uploaded, draws, model, scores)
        failures = self._follow(rows, drawn)
        return Chosen(
            wanted,
            drawn,
            {int(wanted[at]): logprobs for at, logprobs in self._logprobs(draws, drawn, model, scores).items()},
            {int(wanted[at]): failure for at, failure in failures.items()},
        )

    def _keep(self, rows: NDArray[np.int32], uploaded: KernelArray | None, sampled: Sampled | None) -> Fetch:
        """Tokens of ``rows``, entered among the last ones on all ranks. uploaded: see `LastSampled.keep`"""
        return self._last.keep(rows, *self._collectives.share(sampled, len(rows)), uploaded)

    def _draw(
        self, rows: NDArray[np.int32], uploaded: KernelArray | None, draws: Draws, model: Model, scores: Tensor
    ) -> Fetch:
        """Draw tokens of ``rows``, and keep them."""
        ops, cap = self._ops, model.config.logit_softcap
        edits = self._editor.edits(rows, draws.positions)
        on_device = None if self._sampler is None else self._sampler.draw(scores, cap, draws, edits)
        if on_device is not None:
            return self._keep(rows, uploaded, on_device)
        by_host = sample(model.capped(ops.numpy(scores)), draws, edits)
        if self._comm.size > 1:
            best = np.where(by_host == NO_TOKEN, np.float32(np.nan), np.float32(0))
            return self._keep(rows, uploaded, (ops.upload(by_host), ops.upload(best)))
        self._last.enter(rows, by_host)
        return Fetched(by_host)

    def _follow(self, rows: NDArray[np.int32], drawn: Fetch) -> dict[int, str]:
        """Let the editor know the tokens of rows that it edits; why rows have none, where the editor knows."""
        if not self._editor.edits_any(rows):
            return {}
        tokens = drawn.get()
        self._editor.sampled(rows, tokens)
        why = {at: self._editor.failure(int(rows[at])) for at in np.flatnonzero(tokens == NO_TOKEN).tolist()}
        return {at: failure for at, failure in why.items() if failure is not None}

    def _logprobs(self, draws: Draws, drawn: Fetch, model: Model, scores: Tensor) -> dict[int, TokenLogprobs]:
        """By row of ``scores``, where asked for."""
        wants = np.array([param.logprobs is not None for param in draws.params])
        if not wants.any():
            return {}
        tokens, ops = drawn.get(), self._ops
        asked = np.flatnonzero(wants & (tokens != NO_TOKEN))
        if not len(asked):
            return {}
        logits = model.capped(ops.numpy(ops.take_rows(scores, asked)))
        return {
            row: token_logprobs(logits[at], int(tokens[row]), draws.params[row].logprobs or 0)
            for at, row in enumerate(asked.tolist())
        }


def _first(array: KernelArray, rows: int) -> KernelArray:
    """The first ``rows`` of an array, which takes no time where there are no others."""
    return array if len(array) == rows else array[:rows]
