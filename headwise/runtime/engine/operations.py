"""What an engine is told to do besides serving requests: sleep, wake, forget what is cached, and take other weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from headwise.cache_controller.radix_tree import DEVICE_TIER, HOST_TIER, STORAGE_TIER
from headwise.errors import ConfigError, EngineDiedError, InvalidRequestError
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.config.new_weights import digests_of
from headwise.runtime.engine.resource_manager import ResourceManager
from headwise.runtime.engine.steps_in_flight import ScheduledStep
from headwise.runtime.protocol.batch import CHANGE_WEIGHTS, RESET_STORAGE, SLEEP, WAKE, StepResult
from headwise.runtime.protocol.weights import Weights, WeightsToLoad

RESET_CACHE = "reset_cache"
ACTIONS = (SLEEP, WAKE, RESET_CACHE)

EVERY_TIER = "all"
TIERS = (DEVICE_TIER, HOST_TIER, STORAGE_TIER, EVERY_TIER)
"""What `RESET_CACHE` may be told to forget."""


class State(Enum):
    """Requests run while the engine is awake; in every other state they wait."""

    AWAKE = "awake"
    FALLING_ASLEEP = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    CHANGING = "changing weights"


@dataclass(frozen=True)
class NewWeights:
    """Weights that were found to fit, and the model's card with them.

    keeps_running: what runs goes on behind what the weights before have computed of it; else it is computed anew
    """

    weights: Weights
    card: ModelCard
    keeps_running: bool = False

    @property
    def to_load(self) -> WeightsToLoad:
        return WeightsToLoad(self.weights.model, self.weights.adapters, digests_of(self.card))


@dataclass(eq=False)
class Operation:
    """One thing that was asked for.

    new:    the weights, of `CHANGE_WEIGHTS`
    is_sent: workers are at it, or were
    blocks: how many blocks a reset has forgotten, once it is done
    has_emptied_storage: all of it, also of what other engines put there
    refusal: why nothing has changed; empty: something has
    """

    action: str
    tier: str = EVERY_TIER
    new: NewWeights | None = None
    blocks: int = 0
    is_sent: bool = False
    is_done: bool = False
    has_emptied_storage: bool = False
    refusal: str = ""


class Operations:
    """Carries out operations one after the other, in the order they were asked for, between the steps.

        awake --sleep--> falling asleep ----> asleep --wake--> waking ----> awake
        awake --change_weights--> changing weights ----> awake

    Falling asleep: what runs is preempted and steps in flight end; then the host gets what the device has cached, as
    far as it has room; then the workers let go of the weights and of the device's memory.

    Other weights take the place of those that there are once steps in flight have ended, awake or asleep. Device and
    host then forget what is cached, unless the model's are the same, and only adapters are others.

    device_resets: how often what the device had cached was forgotten
    """

    def __init__(
        self, resources: ResourceManager, identity: Callable[[], str], changed: Callable[[NewWeights], None]
    ) -> None:
        """
        identity: tells that of the model's card
        changed:  called when workers have other weights: from then on the card has theirs
        """
        self.state = State.AWAKE
        self._resources = resources
        self._cache = resources.cache
        self._identity, self._changed = identity, changed
        self._queue: deque[Operation] = deque()
        self._is_sent = False  # whether the workers are at the first of the queue
        self.device_resets = 0
        self._is_backed_up = False

    @property
    def is_busy(self) -> bool:
        return bool(self._queue)

    def ask(self, action: str, tier: str = EVERY_TIER) -> Operation:
        """Queue an operation; `next_step` carries it out.

        Raises:
            InvalidRequestError: there is no such action or tier.
            ConfigError: the engine does not have the tier.
        """
        if action not in ACTIONS:
            raise InvalidRequestError(f"an operation must be one of {', '.join(ACTIONS)}, got {action!r:.80}")
        if tier not in TIERS:
            raise InvalidRequestError(f"tier must be one of {', '.join(TIERS)}, got {tier!r:.80}")
        for name, option, is_there in (
            (HOST_TIER, "host_cache", self._cache.host.is_there),
            (STORAGE_TIER, "storage", self._cache.host.storage.is_there),
        ):
            if tier == name and not is_there:
                raise ConfigError(f"this deployment has no {name} tier to reset: it was started without {option}")
        return self._put(Operation(action, tier))

    def change_weights(self, new: NewWeights) -> Operation:
        """As `ask`, for other weights."""
        return self._put(Operation(CHANGE_WEIGHTS, new=new))

    def _put(self, operation: Operation) -> Operation:
        self._queue.append(operation)
        return operation

    def next_step(self, now: float) -> ScheduledStep | None:
        """The next step, be it for an operation or for requests; None until a step in flight comes back."""
        while self._queue and not self._is_sent:
            command = self._advance(self._queue[0])
            if command is not None:
                self._is_sent = self._queue[0].is_sent = True
                new = self._queue[0].new
                return self._resources.command(command, None if new is None else new.to_load)
            if not self._queue[0].is_done:
                break
            self._queue.popleft()
        return self._resources.schedule(now) if self.state is State.AWAKE else self._resources.schedule_copies(now)

    def _advance(self, operation: Operation) -> str | None:
        """Take an operation as far as it goes now; the command that workers must obey for it to be done."""
        if operation.action == SLEEP:
            return self._fall_asleep(operation)
        if operation.action == WAKE:
            return self._wake(operation)
        if operation.new is not None:
            return self._change_weights(operation.new)
        return self._reset_cache(operation)

    def _fall_asleep(self, operation: Operation) -> str | None:
        if self.state is State.ASLEEP:
            operation.is_done = True
            return None
        if self.state is State.AWAKE:
            self.state = State.FALLING_ASLEEP
            self._is_backed_up = False
            self._resources.preempt_all()
        if self._resources.has_steps:
            return None
        host = self._cache.host
        if not self._is_backed_up:
            self._is_backed_up = True
            host.back_up_all()
        if host.is_busy:
            return None
        self._cache.reset((DEVICE_TIER,))
        self.device_resets += 1
        return SLEEP

    def _wake(self, operation: Operation) -> str | None:
        if self.state is State.AWAKE:
            operation.is_done = True
            return None
        self.state = State.WAKING
        return WAKE

    def _reset_cache(self, operation: Operation) -> str | None:
        tiers = TIERS if operation.tier == EVERY_TIER else (operation.tier,)
        operation.blocks += self._cache.reset(tiers)
        self.device_resets += DEVICE_TIER in tiers
        if self._cache.host.storage.is_there and STORAGE_TIER in tiers:
            return RESET_STORAGE
        operation.is_done = True
        return None

    def _change_weights(self, new: NewWeights) -> str | None:
        if self.state is State.AWAKE:
            self.state = State.CHANGING
            if not new.keeps_running:
                self._resources.preempt_all()
        return None if self._resources.has_steps else CHANGE_WEIGHTS

    def obeyed(self, command: str, result: StepResult) -> None:
        """The workers have obeyed a command; raises `EngineDiedError` if one could not."""
        if result.error is not None and command != CHANGE_WEIGHTS:
            raise EngineDiedError(f"the workers could not obey {command!r}: {result.error}")
        operation = self._queue.popleft()
        self._is_sent = False
        if command == RESET_STORAGE:
            self._cache.reset((STORAGE_TIER,))  # of what came to be known of it while it was emptied
        if result.error is not None:
            operation.refusal = result.error
        elif operation.new is not None:
            self._have_changed(operation.new)
        is_over = command == WAKE or self.state is State.CHANGING
        self.state = State.ASLEEP if command == SLEEP else State.AWAKE if is_over else self.state
        operation.blocks += result.forgotten
        operation.has_emptied_storage = command == RESET_STORAGE
        operation.is_done = True

    def _have_changed(self, new: NewWeights) -> None:
        if new.card.identity != self._identity():
            self._cache.reset((DEVICE_TIER, HOST_TIER))
            self.device_resets += 1
        self._changed(new)
