"""Tokens on their way from a pipeline's last stage, which samples them, to the first one, which embeds them.

The engine sends steps ahead that have tokens which it does not know yet. So these need not come and go through it
before a sequence's next step begins.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.ops.stage_links import HostLink
from headwise.runtime.protocol.batch import LAST_SAMPLED, BatchRequest
from headwise.runtime.worker.drafts import SampledRows
from headwise.runtime.worker.last_sampled import LastSampled


class ReturnedTokens:
    """Of a rank of the first stage.

    link:  from the rank in its place in the last stage, which sends what it samples in each step: `give_back`
    last:  this rank's last tokens, among which they are entered
    ahead: most steps that the engine has on their way
    """

    def __init__(self, link: HostLink, last: LastSampled, max_rows: int, ahead: int) -> None:
        self._link, self._last, self._ahead = link, last, ahead
        self._begun = 0
        self._sampled_in: NDArray[np.int64] = np.zeros(max_rows, np.int64)  # the latest step, by row
        self._missing: deque[tuple[int, NDArray[np.int32]]] = deque()  # steps that sample, and rows of which they do

    def before(self, batch: BatchRequest) -> None:
        """To be called before each step that has rows begins, in order: waits for the tokens that it needs.

        What steps have sampled that are no longer on their way is taken, too: it is there, and would pile up.

        Raises:
            StageLostError: they do not come.
        """
        unknown = batch.token_rows[batch.token_ids == LAST_SAMPLED]
        self._take(max(int(self._sampled_in[unknown].max(initial=0)), self._begun - self._ahead))
        self._begun += 1
        rows = batch.rows[SampledRows.of(batch).sequences]
        if len(rows):
            self._sampled_in[rows] = self._begun
            self._missing.append((self._begun, rows))

    def settle(self) -> None:
        """Take all that is on its way. Raises as `before`."""
        self._take(self._begun)

    def _take(self, last: int) -> None:
        """What steps have sampled up to this one."""
        while self._missing and self._missing[0][0] <= last:
            _, rows = self._missing.popleft()
            self._last.enter(rows, self._link.receive((len(rows),)).astype(np.int32))


def give_back(link: HostLink, tokens: NDArray[np.int32]) -> None:
    """Send what a step of the last stage has sampled, if anything, to the first one. tokens: below 2**24"""
    if len(tokens):
        link.send(tokens.astype(np.float32))
