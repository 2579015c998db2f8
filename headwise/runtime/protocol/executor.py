"""The seam between the engine and its workers: Ray actors over ZeroMQ, or one worker in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headwise.errors import EngineDiedError, first_line
from headwise.runtime.protocol.batch import BatchRequest, StepResult
from headwise.runtime.protocol.running_step import RunningStep


class Executor(Protocol):
    """Runs steps in the order they are submitted; several may be in flight.

    `submit` and `poll` never block for a step; both raise `headwise.errors.EngineDiedError` once a worker is
    lost, after which only `close` may be called.
    """

    @property
    def exports(self) -> tuple[tuple[bytes, ...], ...]:
        """By rank, where its host cache can be read by other engines' workers: encoded `ExportAddress`es, the best
        first; empty if there is a rank that nobody can read. The same for as long as the workers live.
        """

    @property
    def shares_memory(self) -> bool:
        """Whether its workers, all of them ready, read the engine's memory: see `shared_rows`."""

    def submit(self, batch: BatchRequest) -> None: ...

    def poll(self, timeout_s: float | None) -> StepResult | None:
        """The next step's merged result, in order; ``None`` if it is not there within ``timeout_s`` seconds.

        ``None`` waits for as long as the workers live.
        """

    def close(self) -> None: ...


class Worker(Protocol):
    """What an executor needs of a worker: `headwise.runtime.worker.worker.ModelWorker`.

    After `begin` or a step's `result` has raised anything, the worker must not be used again: copies may be under way
    that the engine does not know of. An error after which the worker can continue is in the result instead.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def exports(self) -> tuple[bytes, ...]: ...

    def begin(self, batch: BatchRequest) -> RunningStep:
        """Begin a step. Of the steps before it, all but one were asked for their results."""


def exports_of_all(of_ranks: Sequence[tuple[bytes, ...]]) -> tuple[tuple[bytes, ...], ...]:
    """An executor's exports: a block can be read where the parts of all ranks can."""
    return tuple(of_ranks) if all(of_ranks) else ()


def death(error: BaseException) -> EngineDiedError:
    """The error that an executor raises for what a worker raised."""
    if isinstance(error, EngineDiedError):
        return error
    return EngineDiedError(f"the worker failed: {type(error).__name__}: {first_line(error)}")
