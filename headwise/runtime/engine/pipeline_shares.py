"""What steps take of sequences where workers are stages of a pipeline, and several are on their way through it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.engine.sequence_table import Index, SequenceTable
from headwise.runtime.engine.step_budget import Tokens, chunk_of_stage, wanted_of_stage


@dataclass(frozen=True)
class PipelineShares:
    """stages:      of the workers' pipeline; 1: there is none
    takes_known: whether steps take known tokens alone, and none that those in flight will sample
    """

    stages: int = 1
    takes_known: bool = False

    def chunk(self, left: int, most: int) -> int:
        """Most tokens of a prompt in a step, of ``left`` to compute."""
        return most if self.stages == 1 else chunk_of_stage(left, self.stages, most)

    def of_step(
        self, wanted: Tokens, decoding: NDArray[np.bool_], table: SequenceTable, rows: Index, next_step: int, done: int
    ) -> Tokens:
        """``wanted`` tokens of the ``rows`` in one step: of those that decode, a share, as all are shared out to as
        many steps as there are stages.

        Of unknown tokens a sequence has at most two on their way: the second one's step waits for the first, and is at
        the first stage before the engine knows of it. Between them are steps of others, if these have any, so that no
        stage waits. Of known ones there are no more steps than stages: the same tokens in smaller steps take longer.

        next_step: the step that is planned; done: the latest one that came back
        """
        if self.stages == 1:
            return wanted
        pending, last_step = table.pending[rows], table.last_step[rows]
        said = table.length[rows] - table.num_prompt[rows]
        every = int(np.count_nonzero(said > 0))
        most = -(-every // self.stages)
        if self.takes_known:
            under_way = {*last_step[(pending > 0) & (said > pending)].tolist()}
            return wanted_of_stage(wanted, decoding, last_step, most if len(under_way) < self.stages else 0)
        has_prompts = bool((wanted[~decoding] > 0).any())
        apart = self.stages if has_prompts or not most else -(-every // most)
        may = (pending < 2) & (last_step <= max(done, next_step - apart))
        return wanted_of_stage(np.where(decoding & ~may, 0, wanted), decoding, last_step, most)


NO_PIPELINE = PipelineShares()
