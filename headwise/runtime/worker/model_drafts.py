"""Drafts by the layer that a model has for them, or a head beside it: behind each step, of what it has sampled.

The layer takes a token's hidden state, or what a head makes of several, and the token that comes next, and predicts the
one behind that. It keeps keys
and values of its own, in the blocks of the decoder's: so it takes every token that is computed, whether anything is
drafted or not. What it keeps of a token stands in that token's place, though it is of the next one, too: of a cached
prefix's last token it may be of the next one of another request, which may cost a draft and never changes a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.models.base import Embeds, Model
from headwise.runtime.ops.base import Fetch, KernelArray, Tensor, TensorOps
from headwise.runtime.ops.comm import Collectives
from headwise.runtime.protocol.batch import LAST_SAMPLED, NOTHING_PROPOSED, BatchRequest
from headwise.runtime.worker.drafts import SampledRows, Spread, check_drafts, spread
from headwise.runtime.worker.last_sampled import NO_TOKEN
from headwise.runtime.worker.model_runner import ModelRunner
from headwise.runtime.worker.next_tokens import Chosen


@dataclass(frozen=True)
class Drafted:
    """What was drafted in a step.

    passes: of the first, second, ... draft of each sequence: whose, by index into the batch, and the tokens
    """

    passes: tuple[tuple[NDArray[np.int64], Fetch], ...] = ()

    @property
    def is_done(self) -> bool:
        return all(tokens.is_done for _, tokens in self.passes)

    def of(self, sequences: int) -> NDArray[np.int32]:
        """See `StepResult.proposed`."""
        if not self.passes:
            return NOTHING_PROPOSED
        proposed = np.full((sequences, len(self.passes)), NO_TOKEN, np.int32)
        for number, (which, tokens) in enumerate(self.passes):
            proposed[which, number] = tokens.get()
        return proposed


class ModelDrafts:
    """Of one rank; all ranks draft alike."""

    def __init__(self, ops: TensorOps, collectives: Collectives, runner: ModelRunner) -> None:
        self._ops, self._collectives, self._runner = ops, collectives, runner
        self._upload, self._upload_places = ops.step_upload(), ops.step_upload()

    @property
    def _model(self) -> Model:
        return self._runner.model

    def behind(self, batch: BatchRequest, chosen: Chosen, hidden: Tensor) -> Drafted:
        """Take in a step of which these tokens were chosen, and draft as many tokens as it asks for.

        hidden: what `Model.for_drafts` gave of the step's tokens, ``[T, hidden]``, maybe with padding behind them

        Where the step has drafts itself the host waits for what was sampled, since only that says what the next ones
        come behind; and for each draft that a further one is made of. Otherwise it waits for nothing.
        """
        sampled, rows = (chosen.tokens.get() if len(batch.drafts) else None), SampledRows.of(batch)
        places = rows.places(batch)
        following = self._following(batch, places, sampled)
        each = spread(batch)
        step = self._runner.on_device(each, following, self._upload)
        if sampled is None and len(places):
            self._fill(step.tokens, places, batch.rows[rows.sequences])
        wanting = np.flatnonzero(batch.proposals) if len(batch.proposals) else np.zeros(0, np.int64)
        last = _last_known(batch, rows, sampled)[wanting]
        hidden = hidden if hidden.shape[0] == batch.num_tokens else hidden[: batch.num_tokens]
        given = _embeds_behind(batch)
        made = self._model.draft(step.tokens, step.positions, hidden, self._runner.attention(step.batch), last, given)
        positions, _ = each.positions(batch.num_tokens)
        turned = None if each.places is None else each.places[last]
        return self._go_on(batch, wanting, positions[last], turned, made)

    def _following(
        self, batch: BatchRequest, places: NDArray[np.int64], sampled: NDArray[np.int32] | None
    ) -> NDArray[np.int32]:
        """The token behind each one of the step; `LAST_SAMPLED` where only the device knows."""
        following = np.append(batch.token_ids[1:], np.int32(0))
        ends = np.cumsum(batch.query_lens, dtype=np.int64) - 1
        if len(batch.following):
            following[ends] = batch.following
        following[places] = LAST_SAMPLED if sampled is None else np.maximum(sampled, 0)
        return following

    def _fill(self, tokens: KernelArray, places: NDArray[np.int64], rows: NDArray[np.int32]) -> None:
        """Complete what `_following` leaves open, on the device."""
        begins = np.append(places, len(tokens)).astype(np.int32)
        self._runner.last.fill(tokens, *self._upload_places(begins, rows))

    def _go_on(
        self,
        batch: BatchRequest,
        wanting: NDArray[np.int64],
        positions: NDArray[np.int32],
        places: NDArray[np.int32] | None,
        made: Tensor,
    ) -> Drafted:
        """Draft one token after the other, each out of what the one before was drafted from. positions, places: of the
        wanting sequences' last tokens; see `Spread`"""
        passes: list[tuple[NDArray[np.int64], Fetch]] = []
        while len(wanting):
            tokens, _ = self._collectives.share(self._model.drafted(made), len(wanting))
            passes.append((wanting, self._ops.fetch(tokens)))
            going_on = np.flatnonzero(batch.proposals[wanting] > len(passes))
            if not len(going_on):
                break
            wanting, positions = wanting[going_on], positions[going_on] + np.int32(1)
            places = None if places is None else places[going_on] + np.int32(1)
            each = Spread(positions, np.ones_like(positions), batch.rows[wanting], places=places)
            step = self._runner.on_device(each, passes[-1][1].get()[going_on], self._upload)
            made = self._ops.take_rows(made, going_on)
            made = self._model.draft(step.tokens, step.positions, made, self._runner.attention(step.batch))
        return Drafted(tuple(passes))


def _embeds_behind(batch: BatchRequest) -> Embeds | None:
    """The embeddings that came with the tokens behind those of the step, as far as the step has them, too: not of the
    one behind a prompt's part."""
    if batch.embeds is None:
        return None
    begins = np.cumsum(batch.query_lens) - batch.query_lens
    is_behind_one = ~np.isin(batch.embeds.rows, begins)
    return batch.embeds.rows[is_behind_one] - np.int32(1), batch.embeds.values[is_behind_one]


def _last_known(batch: BatchRequest, rows: SampledRows, sampled: NDArray[np.int32] | None) -> NDArray[np.int64]:
    """Of each sequence, its last token in the step behind which no guess was wrong, by place."""
    last: NDArray[np.int64] = np.cumsum(batch.query_lens, dtype=np.int64) - 1
    if sampled is not None and len(sampled):
        _, accepted = check_drafts(batch, rows, sampled)
        which = np.flatnonzero(batch.sample)
        last[which] -= batch.drafts[which] - accepted
    return last
