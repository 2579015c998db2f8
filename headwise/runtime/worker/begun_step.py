"""What a worker has of a step that it has begun, until its result is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.ops.base import Fetch
from headwise.runtime.protocol.batch import BatchRequest, StepResult
from headwise.runtime.protocol.request import TokenLogprobs
from headwise.runtime.worker.drafts import of_sequences
from headwise.runtime.worker.last_sampled import NO_TOKEN
from headwise.runtime.worker.model_drafts import Drafted
from headwise.runtime.worker.next_tokens import NOTHING, Chosen
from headwise.runtime.worker.sampler import NOT_FINITE


@dataclass(frozen=True)
class Computed:
    """What a step computes, as a `StepResult` tells it; its tokens may be on their way still.

    passed:   of another stage than the last: see `ModelRunner.passed`
    unusable: sequences whose prompts have no usable logits, by index
    """

    chosen: Chosen = field(default_factory=Chosen)
    drafted: Drafted = field(default_factory=Drafted)
    passed: Fetch = NOTHING
    unusable: Sequence[int] = ()
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return self.passed.is_done and self.chosen.tokens.is_done and self.drafted.is_done

    def tokens(self, batch: BatchRequest) -> tuple[NDArray[np.int32], NDArray[np.int32], dict[int, str]]:
        """Of each sequence of the step, `NO_TOKEN` where it does not sample; how many of each one's drafts are right;
        and why sequences failed, by index."""
        self.passed.get()
        sampled = self.chosen.tokens.get()
        tokens, accepted = of_sequences(batch, self.chosen.wanted, sampled)
        lacks = tokens == NO_TOKEN
        lacking = np.flatnonzero(lacks & batch.sample).tolist() if len(sampled) and lacks.any() else ()
        broken = dict.fromkeys([*lacking, *self.unusable], NOT_FINITE) | self.chosen.failures
        return tokens, accepted, broken


class BegunStep:
    """The `RunningStep` of a worker.

    end: waits for it, and says what came of it
    """

    def __init__(self, computed: Computed, end: Callable[[], StepResult]) -> None:
        self._computed, self._end = computed, end
        self._result: StepResult | None = None

    @property
    def is_done(self) -> bool:
        return self._result is not None or self._computed.is_done

    def result(self) -> StepResult:
        if self._result is None:
            self._result = self._end()
        return self._result
