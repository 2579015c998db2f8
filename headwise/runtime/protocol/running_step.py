"""Steps that workers have begun, and who begins them: the next one before the last has ended, where a device allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headwise.runtime.protocol.batch import BatchRequest, StepResult

LOOK_S = 0.001
"""How long a step that runs is left before it is looked at again, while no other has come that could be begun."""

MOST_BEGUN = 2
"""Steps that may be begun and not told: as many as an engine sends ahead."""


class RunningStep(Protocol):
    """A step that a worker has begun."""

    @property
    def is_done(self) -> bool:
        """Whether `result` need not wait."""

    def result(self) -> StepResult:
        """Wait for it. Results are asked for in the order in which steps were begun; once each."""


@dataclass(frozen=True)
class DoneStep:
    """A step that was over when it had been begun."""

    of: StepResult
    is_done: bool = True

    def result(self) -> StepResult:
        return self.of


class StepRunner:
    """Begins a worker's steps as they come, and tells their results in order.

    begin: see `Worker.begin`
    take:  the next step, if one comes within so many seconds
    tell:  what becomes of a result
    """

    def __init__(
        self,
        begin: Callable[[BatchRequest], RunningStep],
        take: Callable[[float], BatchRequest | None],
        tell: Callable[[StepResult], None],
    ) -> None:
        self._begin, self._take, self._tell = begin, take, tell
        self._begun: deque[RunningStep] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether a step was begun that has not been told."""
        return bool(self._begun)

    def turn(self, wait_s: float) -> None:
        """Tell what is done, or begin what has come; wait for ``wait_s`` at most while there is neither.

        Raises what the worker raises: no other turn may follow.
        """
        if self._begun and (self._begun[0].is_done or len(self._begun) == MOST_BEGUN):
            self._tell(self._begun.popleft().result())
            return
        batch = self._take(LOOK_S if self._begun else wait_s)
        if batch is not None:
            self._begun.append(self._begin(batch))
