"""What a smaller cluster still has: the hit rate when engines have gone, and what to compare it with.

A third and two thirds through the trace, engines are ordered to go. Compared are the hit rates of the requests that
arrive in the `WINDOW_S` before (``before``), and in as many seconds from the drain timeout on (``after``). Two things
besides the drain move ``after``, and each has a run of its own, at the same times:

    none goes              the trace itself: some minutes have more prompts that were seen before than others
    as few from the start  fewer engines have less memory: a drain can keep little more than such a cluster has

So ``after`` over that of ``none goes`` is what scaling down costs, and over that of ``as few from the start`` how much
of what can be kept is kept. ``one LRU of all memory`` shows how much the loss of the memory alone costs a cache that
nothing else is wrong with.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from routing import hardware
from simulation.elastic import View
from simulation.machine import BLOCK
from simulation.scaling import Setting, cluster, requests_of
from simulation.traced import Request

WINDOW_S = 600.0
MOMENTS = (1 / 3, 2 / 3)
"""Of the trace's time."""


@dataclass(frozen=True)
class Case:
    """handover: leaving engines write what only they have
    by_worth: those go whose caches are worth least
    peer_loads: engines fetch from each other
    given: those that stay take what only the leaving engines have into their hosts
    is_one_memory: no engines, but the least recently used of all their memory, and of storage's, goes first, and what
        leaves with engines is room alone
    """

    handover: bool = True
    by_worth: bool = True
    is_few_from_start: bool = False
    none_goes: bool = False
    peer_loads: bool = True
    given: bool = False
    is_one_memory: bool = False


CASES = {
    "to storage, least worth goes": Case(),
    "to storage, any goes": Case(by_worth=False),
    "to storage and hosts": Case(given=True),
    "to hosts": Case(handover=False, given=True),
    "to nobody": Case(handover=False),
    "none goes": Case(none_goes=True),
    "as few from the start": Case(is_few_from_start=True),
    "no peer loads: to storage": Case(peer_loads=False),
    "no peer loads: none goes": Case(peer_loads=False, none_goes=True),
    "no peer loads: as few from the start": Case(peer_loads=False, is_few_from_start=True),
    "one LRU of all memory": Case(is_one_memory=True),
    "one LRU of all memory: none goes": Case(is_one_memory=True, none_goes=True),
}
OURS, UNDISTURBED, FEW = "to storage, least worth goes", "none goes", "as few from the start"
BOUND = "one LRU of all memory"
WITHOUT = "no peer loads: "


@dataclass(frozen=True)
class Hits:
    """Tokens of prompts, and those of them that some tier served."""

    found: int = 0
    tokens: int = 0

    def __add__(self, other: Hits) -> Hits:
        return Hits(self.found + other.found, self.tokens + other.tokens)

    @property
    def rate(self) -> float:
        return self.found / max(1, self.tokens)


@dataclass(frozen=True)
class Kept:
    """What one case showed, over all moments.

    written, last: blocks that leaving engines wrote, and all that only they had in the end
    sole:        what only they had when they were told to go
    asked_first: blocks that were served after, and had not been asked for between the order and then. A block that was
        is no longer the leaving engines' alone
    """

    before: Hits = Hits()
    after: Hits = Hits()
    written: int = 0
    last: int = 0
    sole: frozenset[tuple[float, bytes]] = frozenset()
    asked_first: frozenset[tuple[float, bytes]] = frozenset()
    lost: int = 0

    def __add__(self, other: Kept) -> Kept:
        return Kept(
            self.before + other.before,
            self.after + other.after,
            self.written + other.written,
            self.last + other.last,
            self.sole | other.sole,
            self.asked_first | other.asked_first,
            self.lost + other.lost,
        )


@dataclass(frozen=True)
class Compared:
    """All cases with one size of storage."""

    storage: float
    found: dict[str, Kept]

    def of_bound(self) -> float:
        """What the loss of memory alone leaves of a cache."""
        return _ratio(self.found[BOUND].after.rate, self.found[f"{BOUND}: {UNDISTURBED}"].after.rate)

    def of_before(self, what: str = OURS) -> float:
        return _ratio(self.found[what].after.rate, self.found[what].before.rate)

    def of_undisturbed(self, what: str = OURS) -> float:
        """Engines that fetch from each other are compared with such, and others with others."""
        return _ratio(self.found[what].after.rate, self.found[_like(what, UNDISTURBED)].after.rate)

    def of_few(self, what: str = OURS) -> float:
        return _ratio(self.found[what].after.rate, self.found[_like(what, FEW)].after.rate)

    @property
    def at_stake(self) -> float:
        """Of all that was served where none went, the share that only the leaving engines had: what handing over can
        save at most."""
        undisturbed = self.found[UNDISTURBED]
        theirs = BLOCK * len(undisturbed.asked_first & self.found[OURS].sole)
        return theirs / max(1, undisturbed.after.found)


def keep(run: tuple[str, float, float], setting: Setting, many: int, few: int) -> Kept:
    """One case, size of storage and moment. The trace is left as it came: ``setting.swing`` should be 0."""
    what, storage, moment = run
    case, requests = CASES[what], requests_of(setting)
    setting = replace(setting, storage=storage, peer_loads=case.peer_loads)
    at = requests[-1].arrived * moment
    after = at + setting.drain_timeout_s
    requests = [each for each in requests if each.arrived < after + WINDOW_S]
    begin = few if case.is_few_from_start else many

    if case.is_one_memory:
        return one_memory(
            requests, (at, after), [memory(setting, each) for each in (many, many if case.none_goes else few)]
        )

    def choose(view: View, now: float) -> int:
        return begin if case.none_goes or now < at else few

    taken = cluster(setting, choose, handover=case.handover, by_worth=case.by_worth, given=case.given)
    served = taken.serve(requests, begin)
    window = [each for each in requests if each.arrived >= after]
    return Kept(
        _hits([each for each in requests if at - WINDOW_S <= each.arrived < at]),
        _hits(window),
        sum(written for written, _ in served.kept),
        sum(last for _, last in served.kept),
        frozenset((moment, block) for block in served.sole),
        frozenset((moment, block) for block in _asked_first(requests, at, after)),
        sum(each.ended < 0 for each in requests),
    )


def memory(setting: Setting, engines: int) -> int:
    """Blocks that so many engines and storage have room for."""
    machine = hardware()
    return engines * (machine.device + machine.host) + round(machine.storage * setting.storage)


def one_memory(requests: Sequence[Request], moments: tuple[float, float], capacities: Sequence[int]) -> Kept:
    """What a single cache of the first capacity finds, and of the second one from the first moment on; ``after`` from
    the second moment on."""
    (at, after), cached = moments, OrderedDict[bytes, None]()
    hits = {False: Hits(), True: Hits()}
    for request in requests:
        depth, most = 0, (request.num_tokens - 1) // BLOCK
        while depth < most and request.path[depth] in cached:
            depth += 1
        if request.arrived >= after or at - WINDOW_S <= request.arrived < at:
            hits[request.arrived >= after] += Hits(depth * BLOCK, request.num_tokens)
        for block in reversed(request.path):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > capacities[request.arrived >= at]:
            cached.popitem(last=False)
    return Kept(hits[False], hits[True])


def compare(runs: Sequence[tuple[str, float, float]], kept: Sequence[Kept]) -> list[Compared]:
    """By size of storage."""
    found: dict[float, dict[str, Kept]] = {}
    for (what, storage, _), each in zip(runs, kept, strict=True):
        cases = found.setdefault(storage, {})
        cases[what] = cases.get(what, Kept()) + each
    return [Compared(storage, cases) for storage, cases in found.items()]


def show(compared: Compared, many: int, few: int) -> None:
    print(f"\n{many} -> {few} engines at once, storage {compared.storage:g} times as large: hit rate")
    print(
        f"{'':40}{'before':>8}{'after':>8}{'of before':>11}{'of none goes':>14}{'of as few':>11}{'blocks written':>18}"
    )
    for what, one in compared.found.items():
        print(
            f"{what:40}{one.before.rate:>8.1%}{one.after.rate:>8.1%}{compared.of_before(what):>11.3f}"
            f"{compared.of_undisturbed(what):>14.3f}{compared.of_few(what):>11.3f}"
            f"{f'{one.written:,} of {one.last:,}':>18}"
        )
    print(f"only the leaving engines had {compared.at_stake:.1%} of what is served where none goes")


def _like(what: str, other: str) -> str:
    """The case that one is compared with."""
    if what.startswith(BOUND):
        return f"{BOUND}: {UNDISTURBED}" if other == UNDISTURBED else BOUND
    return WITHOUT + other if what.startswith(WITHOUT) else other


def _hits(requests: Sequence[Request]) -> Hits:
    return Hits(sum(each.found for each in requests), sum(each.num_tokens for each in requests))


def _asked_first(requests: Sequence[Request], at: float, after: float) -> set[bytes]:
    asked, found = set[bytes](), set[bytes]()
    for request in requests:
        if request.arrived < at:
            continue
        if request.arrived >= after:
            found.update(block for block in request.path[: request.found // BLOCK] if block not in asked)
        asked.update(request.path)
    return found


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 1.0
