"""The input and output of the controller of elastic replicas."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from headwise.runtime.frontend.routing.engines import Arrivals


@dataclass(frozen=True)
class ScalingPolicy:
    """How many engines there may be, and what for.

    min_replicas, max_replicas: bounds; with a minimum of 0, a deployment without requests ends all its engines, and the
        first request asks for one
    target_ttft_s: nine of ten requests should get their first token within this time, as far as more engines help
    target_queue_s: nine of ten requests should start within this time; one of both targets may be given. Without one
        the number changes by hand only
    upscale_delay_s: more engines must have been needed for so long before they are started
    downscale_delay_s: fewer engines must have been enough for so long before one goes
    drain_timeout_s: an engine that goes has so long to end its requests and to hand over its cache
    pending_timeout_s: an engine that takes longer to start is told of
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_ttft_s: float | None = None
    target_queue_s: float | None = None
    upscale_delay_s: float = 15.0
    downscale_delay_s: float = 300.0
    drain_timeout_s: float = 60.0
    pending_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas:
            raise ValueError(
                f"min_replicas must be from 0 to max_replicas, got {self.min_replicas} and {self.max_replicas}"
            )
        if self.max_replicas < 1:
            raise ValueError(f"max_replicas must be at least 1, got {self.max_replicas}")
        if self.target_ttft_s is not None and self.target_queue_s is not None:
            raise ValueError("give one of target_ttft_s and target_queue_s: they say what the engines are for")
        if self.follows_load and self.target_s <= 0:
            raise ValueError(f"target_ttft_s or target_queue_s must be over 0, got {self.target_s}")
        for name in ("upscale_delay_s", "downscale_delay_s", "drain_timeout_s", "pending_timeout_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")

    @property
    def follows_load(self) -> bool:
        """Whether there is a target."""
        return self.target_ttft_s is not None or self.target_queue_s is not None

    @property
    def target_s(self) -> float:
        return self.target_queue_s or self.target_ttft_s or 0.0


class ReplicaState(Enum):
    """STARTING: asked for, waits for its node or loads its model; RUNNING: has reported; LOST: is being replaced, which
    is like starting; DRAINING: takes no new requests and will end."""

    STARTING = "starting"
    RUNNING = "running"
    LOST = "lost"
    DRAINING = "draining"


@dataclass(frozen=True)
class Replica:
    """An engine that there is, or will be. A new epoch is a new start under the same name: its cache is empty."""

    name: str
    state: ReplicaState
    epoch: int = 0


@dataclass(frozen=True)
class EngineReport:
    """What an engine last reported, with what was sent to it since.

    silent_s:   since that report came, by the scheduler's clock. Clocks of other machines are never read
    requests:   running and waiting
    backlog_s:  of prompts that are not computed yet
    turnover_s: in which all that runs there ends
    fullness:   share of its pool, or of its sequences if that is more, that is taken
    pool, sequences: shares that running requests take
    crowding:   how many times as many requests as run could run: those included that wait for room alone
    """

    name: str
    silent_s: float
    requests: int = 0
    backlog_s: float = 0.0
    turnover_s: float = 0.0
    fullness: float = 0.0
    pool: float = 0.0
    sequences: float = 0.0
    crowding: float = 1.0


@dataclass(frozen=True)
class Observation:
    """What the scheduler knows now.

    prompts:      of the arrivals those whose prompts engines compute that do not only decode
    held, held_s: requests that no engine could take yet, and the seconds of computing their prompts
    token_s:      seconds to compute a token of a prompt; 0: no engine has measured it yet
    block_size:   tokens of a block of the index
    """

    engines: tuple[EngineReport, ...]
    arrivals: Arrivals
    held: int = 0
    held_s: float = 0.0
    token_s: float = 1e-4
    block_size: int = 64
    prompts: Arrivals = field(default_factory=Arrivals)

    @property
    def backlog_s(self) -> float:
        return self.held_s + sum(engine.backlog_s for engine in self.engines)

    @property
    def requests(self) -> int:
        return self.held + sum(engine.requests for engine in self.engines)


@dataclass(frozen=True)
class Decision:
    """What should be. Orders are absolute: they are repeated until the replicas are as ordered, so one that is lost,
    doubled or late does no harm.

    number: of engines that are to serve, draining ones not counted
    start:  names to start
    cancel: names that never began to serve, to be ended at once
    drain:  names to be drained
    reason: in words, for the status and the log
    overdue: names that have been starting for longer than ``pending_timeout_s``
    replaced: names whose successors are started or serve already, beyond the number
    """

    number: int
    reason: str
    start: tuple[str, ...] = ()
    cancel: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    overdue: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()


class CacheWorth(Protocol):
    """`headwise.storage.index.prefix_index.PrefixIndex`, as far as it is asked what an engine would take along."""

    def worth(self, without: Collection[str] = ()) -> Mapping[str, float]:
        """By engine, the blocks that would be lost with it, each times how often it was asked for lately, once those
        ``without`` have gone."""
        ...
