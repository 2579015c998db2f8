"""When the front passes on to successors at another node, and which of both it is meanwhile. Pure: no clock, no Ray.

The actors of one front (scheduler, the one that stands by, store, HTTP servers) have the same number in their names,
their turn: see `headwise.actors.names`. Successors have a higher one. They are made beside those that serve, which are
the front until they are told to leave: that is the switch. So the front is the earliest turn that nobody has left,
whoever asks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from headwise.actors.names import APART, SCHEDULERS, STORE, role_of, turn_of
from headwise.actors.notice import drain_time

ENGINES_S = 5.0
"""Longest wait for that node's engines to be told to go: the owner hears by the scheduler what they have cached."""
_SHARE = 0.75
"""Of the time that a node has left, successors may take so much to come up: the rest is for what was begun there."""


class Step(Enum):
    """STAY: nothing is to be done. BEGIN: have successors made, or made elsewhere. WAIT: for them. SWITCH: they are the
    front from now on, whether they serve or not.
    """

    STAY = auto()
    BEGIN = auto()
    WAIT = auto()
    SWITCH = auto()


@dataclass(frozen=True)
class Successors:
    """Those that are being made.

    serve:    all of them do
    is_well:  their node lives, and is not about to be taken away
    is_apart: they have another address than those that serve: else these have the ports
    """

    serve: bool = False
    is_well: bool = True
    is_apart: bool = True


@dataclass(frozen=True)
class Seen:
    """How it is now.

    is_draining: the front's node is about to be taken away
    is_up:       its scheduler serves, or is about to
    has_engines: engines of that node go on that were not told to go
    waited_s:    since it was seen that the node is
    patience_s:  how long successors may take from then on: see `patience_s`
    successors:  None: none were begun
    """

    is_draining: bool
    is_up: bool = True
    has_engines: bool = False
    waited_s: float = 0.0
    patience_s: float = 0.0
    successors: Successors | None = None


def next_step(seen: Seen) -> Step:
    """What is to be done now."""
    there = seen.successors
    if there is None:
        return Step.BEGIN if seen.is_draining else Step.STAY
    if not (seen.is_up and there.is_apart) or seen.waited_s >= seen.patience_s:
        return Step.SWITCH
    if not there.is_well:
        return Step.BEGIN
    is_asked = not seen.has_engines or seen.waited_s >= ENGINES_S
    return Step.SWITCH if there.serve and is_asked else Step.WAIT


def patience_s(timeout_s: float, left_s: float) -> float:
    """How long successors may take, of a node that has ``left_s`` left, where requests get ``timeout_s`` to end."""
    return _SHARE * drain_time(timeout_s, left_s)


@dataclass(frozen=True)
class Fronts:
    """The actors of one front or several, by name.

    turn:     of the front
    known_as: the names of its actors, by role; without the one that stands by
    late:     of earlier fronts, which were not told to leave: the owner died in the middle of a switch
    idle:     whose end nobody would notice: successors of a switch that has not come, and those that stand by
    """

    turn: int = 0
    known_as: Mapping[str, str] = field(default_factory=dict)
    late: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()


def sort_out(names: Iterable[str], leaving: Collection[str], knowing: Collection[str]) -> Fronts:
    """Which actors are the front, of those that an owner finds.

    names:   of those that stay
    leaving: of those that do not
    knowing: of those that know where the front is: a scheduler among them is no standby
    """
    staying = [name for name in names if not name.startswith(APART)]
    turn = front_turn(staying, leaving, knowing)
    ours, late, idle = dict[str, str](), set[str](), set[str]()
    for name in staying:
        is_scheduler = role_of(name) in SCHEDULERS
        if turn_of(name) == turn and (not is_scheduler or name in knowing):
            ours[SCHEDULERS[0] if is_scheduler else role_of(name)] = name
        elif turn_of(name) < turn and (name in knowing if is_scheduler else has_streams(name)):
            late.add(name)
        else:
            idle.add(name)
    unborn = [name for name in idle if turn_of(name) == turn and role_of(name) in SCHEDULERS]
    if SCHEDULERS[0] not in ours and unborn:  # it is starting; or has died, and one that stands by takes its place
        chosen = ours[SCHEDULERS[0]] = min(unborn, key=lambda name: SCHEDULERS.index(role_of(name)))
        idle.remove(chosen)
    return Fronts(turn, ours, frozenset(late), frozenset(idle))


def front_turn(staying: Iterable[str], leaving: Iterable[str], knowing: Collection[str]) -> int:
    """The turn of the front: the earliest one that nobody has left, and whose scheduler serves if any does."""
    left = [turn_of(name) for name in leaving if not name.startswith(APART)]
    least = max(left) + 1 if left else 0
    able = [name for name in staying if turn_of(name) >= least]
    serve = [turn_of(name) for name in able if role_of(name) in SCHEDULERS and name in knowing]
    return min(serve or map(turn_of, able), default=least)


def scheduler_to_ask(names: Iterable[str], leaving: Collection[str], knowing: Collection[str]) -> str | None:
    """Which scheduler tells where clients find the deployment: the one that serves, or one that has left and knows who
    does; None: none of them knows.

    names:   of those that have answered; ``leaving`` and ``knowing`` among them, as in `sort_out`
    """
    schedulers = [name for name in names if role_of(name) in SCHEDULERS and name in knowing]
    staying = [name for name in schedulers if name not in leaving]
    turn = front_turn(staying, leaving, knowing)
    if serving := [name for name in staying if turn_of(name) == turn]:
        return serving[0]
    return max((name for name in schedulers if name in leaving), key=turn_of, default=None)


def is_settled(choice: str | None, unheard: Iterable[str]) -> bool:
    """Whether no scheduler that has not answered yet would be asked instead of ``choice``: none of an earlier turn."""
    return choice is not None and all(turn_of(name) >= turn_of(choice) for name in unheard)


def has_streams(name: str) -> bool:
    """Whether what an actor of this name has begun is to end before it does."""
    return role_of(name) != STORE
