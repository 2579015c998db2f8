"""Engines that change between prompts and decoding by the load, against fixed numbers of each, over a load that shifts.

    python benchmarks/elastic_roles.py [--phase-s 300] [--jobs 2]

Eight simulated engines behind the scheduler's router (`routing.py`). The load is first long prompts with short answers,
then short prompts with long answers, then both in turn every ten seconds. Prompts have nothing in common, so that no
cache hides what roles do. ``elastic`` begins with four engines of each kind and lets the controller's own decisions
(`headwise.runtime.frontend.scaling.RoleBalance`) change them; the others stay as they are. By phase of arrival: the
99th percentile of the time to the first token, and of a request's mean time between tokens. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from routing import ENGINES, Routed, hardware, print_assumptions
from simulation.caches import Cache, Storage
from simulation.cluster import Engine, serve
from simulation.machine import BLOCK, Hardware
from simulation.traced import Request

from headwise.runtime.frontend.scaling import Replica, ReplicaState, RoleBalance, RolePolicy, Split, deal, observe
from headwise.storage.index.messages import HASH_BYTES
from headwise.storage.index.prefix_index import PrefixIndex

DECIDE_S = 1.0
ELASTIC = "elastic"
FIXED = (2, 3, 4, 5, 6)
"""Engines for prompts, of all."""


@dataclass(frozen=True)
class Phase:
    """A load: requests a second, and the tokens of a prompt and of an answer, each from half to half as much
    again."""

    name: str
    rate: float
    prompt: int
    answer: int


LONG_PROMPTS = Phase("long prompts", 7.5, 7000, 150)
LONG_ANSWERS = Phase("long answers", 7.0, 1200, 1200)
PHASES = (LONG_PROMPTS, LONG_ANSWERS)


def load(phase_s: float, seed: int = 0) -> list[tuple[str, Request]]:
    """Requests by arrival, each with the name of its phase."""
    draw = random.Random(seed)
    spans = [(phase, phase_s) for phase in PHASES] + [(phase, 10.0) for phase in PHASES] * int(phase_s // 20)
    requests: list[tuple[str, Request]] = []
    begin = 0.0
    for place, (phase, seconds) in enumerate(spans):
        at = begin + draw.expovariate(phase.rate)
        while at < begin + seconds:
            tokens, answer = (int(size * draw.uniform(0.5, 1.5)) for size in (phase.prompt, phase.answer))
            number = len(requests)
            path = [(number << 32 | block).to_bytes(HASH_BYTES, "big") for block in range(tokens // BLOCK)]
            name = phase.name if place < len(PHASES) else "in turn"
            requests.append((name, Request(str(number), at, path, tokens, answer)))
            at += draw.expovariate(phase.rate)
        begin += seconds
    return requests


class Balanced(Routed):
    """The scheduler's router, with roles that change by the load.

    changes: when, and to what
    """

    def __init__(self, hardware: Hardware, index: PrefixIndex, split: Split, balance: RoleBalance | None) -> None:
        self._names = [f"engine-{number}" for number in range(ENGINES)]
        self._split, self._balance = split, balance
        self._roles = deal(self._names, split, {})
        self._replicas = [Replica(name, ReplicaState.RUNNING) for name in self._names]
        self._next = 0.0
        self.changes: list[tuple[float, Split]] = []
        super().__init__("cache_aware", hardware, index, peer_loads=True, roles=self._roles)

    def report(self, engine: Engine, now: float) -> None:
        super().report(engine, now)
        if self._balance is not None and now >= self._next:
            self._next = now + DECIDE_S
            self._decide(self._balance, now)

    def _decide(self, balance: RoleBalance, now: float) -> None:
        observed = observe(self.router.table, self.router.options, now)
        decision = balance.decide(observed, self._replicas, self._roles, self._split, now)
        if decision.is_change:
            self._split = decision.split
            self._roles = deal(self._names, decision.split, self._roles)
            self.router.table.set_roles(self._roles)
            self.changes.append((now, decision.split))


@dataclass(frozen=True)
class Served:
    """By phase, and ``all``: 99th percentiles of seconds to the first token, and between tokens.

    changes: seconds since the first arrival, and engines for prompts from then on
    """

    ttft_p99_s: dict[str, float]
    tbt_p99_s: dict[str, float]
    mean_s: dict[str, float] = field(default_factory=dict)
    changes: list[tuple[float, int]] = field(default_factory=list)


def run(prefill: int | None, phase_s: float) -> Served:
    """``prefill``: engines for prompts; None: as the load needs."""
    machine = hardware()
    machine = replace(machine, storage=0)
    index = PrefixIndex()
    storage = Storage(0, index)
    engines = [Engine(n, machine, Cache(f"engine-{n}", machine, storage, index)) for n in range(ENGINES)]
    first = ENGINES // 2 if prefill is None else prefill
    balance = RoleBalance(RolePolicy()) if prefill is None else None
    dispatcher = Balanced(machine, index, Split(first, ENGINES - first), balance)
    requests = load(phase_s)
    serve([request for _, request in requests], engines, dispatcher)
    found = Served({}, {}, changes=[(round(at), split.prefill) for at, split in dispatcher.changes])
    for name in (*(phase.name for phase in PHASES), "in turn", "all"):
        those = [request for phase, request in requests if name in (phase, "all")]
        ttft = [each.first_token - each.arrived for each in those]
        tbt = [(each.ended - each.first_token) / (each.output - 1) for each in those if each.output > 1]
        found.ttft_p99_s[name] = float(np.percentile(ttft, 99)) if ttft else 0.0
        found.tbt_p99_s[name] = float(np.percentile(tbt, 99)) if tbt else 0.0
        found.mean_s[name] = float(np.mean([each.ended - each.arrived for each in those])) if those else 0.0
    return found


def show(served: dict[str, Served]) -> None:
    phases = list(served[ELASTIC].ttft_p99_s)
    print(f"{'':10}" + "".join(f"{name:>31}" for name in phases))
    print(f"{'':10}" + f"{'TTFT p99, s':>13}{'TBT, ms':>9}{'mean, s':>9}" * len(phases))
    for name, one in served.items():
        cells = (
            f"{one.ttft_p99_s[phase]:>13.2f}{one.tbt_p99_s[phase] * 1e3:>9.1f}{one.mean_s[phase]:>9.2f}"
            for phase in phases
        )
        print(f"{name:10}" + "".join(cells))
    changes = ", ".join(f"{at:.0f} s: {prefill}" for at, prefill in served[ELASTIC].changes)
    print(f"\nEngines for prompts where they follow the load, 4 at first: {changes or 'no change'}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase-s", type=float, default=300.0, help="seconds of each of the three phases")
    parser.add_argument("--jobs", type=int, default=2, help="simulations at a time")
    args = parser.parse_args(arguments)
    cases: dict[str, int | None] = {ELASTIC: None, **{f"{each} + {ENGINES - each}": each for each in FIXED}}
    one = partial(run, phase_s=args.phase_s)
    if args.jobs == 1:
        served = {name: one(prefill) for name, prefill in cases.items()}
    else:
        with ProcessPoolExecutor(args.jobs) as pool:
            served = dict(zip(cases, pool.map(one, cases.values()), strict=True))
    print_assumptions()
    print()
    show(served)
    print(
        json.dumps(
            {
                "ttft_p99_s": {name: round(one.ttft_p99_s["all"], 2) for name, one in served.items()},
                "tbt_p99_s": {name: round(one.tbt_p99_s["all"], 4) for name, one in served.items()},
                "mean_s": {name: round(one.mean_s["all"], 2) for name, one in served.items()},
                "changes": len(served[ELASTIC].changes),
            }
        )
    )


if __name__ == "__main__":
    main()
