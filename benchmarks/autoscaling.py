"""Elastic replicas over a trace of conversations: the real controller, router and index, simulated engines.

    python benchmarks/autoscaling.py [--quick] [--trace FILE.jsonl.gz] [--swing 0.6] [--wave 1800] [--goal 5] [--jobs 2]

The trace's requests arrive in waves, as of days that were compressed in time: its own rate hardly changes, so an
elastic cluster would have nothing to follow (``--swing 0`` keeps it as it is). It is cut into ``--parts``, each served
from the beginning by empty engines: what holds in one part alone is chance. What decides the number of engines:

headwise      `headwise.runtime.frontend.scaling`: by the costs that requests are routed by
ray_ongoing   Ray Serve's default: ceil(mean of ongoing requests over 30 s / target_ongoing_requests)
              (docs.ray.io, Advanced Ray Serve Autoscaling; ray/serve/autoscaling_policy.py of Ray 2.60)
ray_ttft      proposed for Ray Serve LLM (ray-project/ray, pull request 64725): one more if p99 TTFT is over a target.
              When it takes one away is not known to us; here: if p99 TTFT is under half of the target
queue_length  ceil(waiting requests / target), as KEDA does over vLLM's num_requests_waiting (docs of vLLM's production
              stack); the greatest of the downscale delay counts, as in Kubernetes' autoscaler
foreseen      the parameter times the wave's height when an engine that is started now will serve: a bound of sorts, as
              nobody knows it
fixed         the best fixed number

All but the last two have the same delays; all have the same start-up time, router and drain with handover: they differ
in the number alone. Engines fetch from each other in all of these runs, as they do unless told otherwise. Each policy
has one parameter, which is searched: that with the fewest engine-hours of all parts together counts, among those with
which p90 TTFT is at most the goal in every part. One for all parts, as whoever runs a deployment sets it once: the
hours of some policies go up and down by a fifth from one value to the next, and of many runs the luckiest says little.
``replica_hours_ratio`` is headwise's engine-hours over those of queue_length; ``searched_in_each_part`` is that ratio
if each policy has the luckiest of its parameters in each part.

Then, at a steady load, engines are taken away at once (`simulation/scale_down.py`), with the shared storage of
`routing.py`, which is about as large as all engines' hosts, and with one four times as large. ``hit_rate_kept`` is the
hit rate after, with handover to storage and the least worth going, over the one of a run in which none goes,
at the same times; ``hit_rate_of_before`` over the one before, as the trace was then; ``hit_rate_of_few`` over that of a
cluster that had so few engines from the start. ``kept_without_peer_loads`` compares runs in which engines do not fetch
from each other. ``bound_by_memory`` is what a single LRU
of all engines' memory and storage's would keep: fewer engines have less memory, whatever is handed over. All of the
smaller storage; ``larger_storage`` has those of the larger one. With other random choices of the router the rates
after go up and down by 2 % of themselves: what differs by less is alike. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from capacity import TRACE
from routing import read_requests
from simulation.choosers import CHOOSERS
from simulation.elastic import Served
from simulation.scale_down import CASES, MOMENTS, Compared, compare, keep, show
from simulation.scaling import Setting, cluster, hit_rate, requests_of
from simulation.traced import Request

TAKE_LOAD = 0.6
"""Of the load of the other parts, where engines are taken away: those that are left can serve it."""
STORAGES = (1.0, 4.0)
"""How large shared storage is there, over `routing.STORAGE_BYTES`."""
SEARCH = {
    "headwise": (2.0, 10.0),
    "ray_ongoing": (1.0, 16.0),
    "ray_ttft": (1.0, 32.0),
    "queue_length": (0.2, 3.2),
    "foreseen": (9.0, 5.0),
}
"""Where each policy's parameter is searched: towards the second one, fewer engines."""

Given = TypeVar("Given")
Found = TypeVar("Found")
Judged = TypeVar("Judged", "Outcome", "Trial")


# ---- runs ----


@dataclass(frozen=True)
class Outcome:
    policy: str
    parameter: float
    hours: float
    ttft_p50_s: float
    ttft_p90_s: float
    within: float
    hit_rate: float
    lost: int
    moved: int
    least: int
    most: int
    changes: int


def run(policy: str, parameter: float, setting: Setting) -> Outcome:
    requests = requests_of(setting)
    chooser = None if policy == "headwise" else CHOOSERS[policy](parameter, setting)
    begin = int(parameter) if policy == "fixed" else setting.begin
    served = cluster(setting, chooser, parameter).serve(requests, begin)
    found = _outcome(policy, parameter, requests, served, setting)
    print(
        f"from request {setting.part[0]:<6} {policy:14}{parameter:>6.2f}{found.hours:>9.3f} engine-hours, p90 TTFT "
        f"{found.ttft_p90_s:.2f} s",
        flush=True,
    )
    return found


def _outcome(policy: str, parameter: float, requests: Sequence[Request], served: Served, setting: Setting) -> Outcome:
    ttft = np.array([request.first_token - request.arrived for request in requests])
    return Outcome(
        policy,
        parameter,
        hours=served.engine_s / 3600,
        ttft_p50_s=float(np.percentile(ttft, 50)),
        ttft_p90_s=float(np.percentile(ttft, 90)),
        within=float((ttft <= setting.goal_s).mean()),
        hit_rate=hit_rate(requests),
        lost=sum(request.ended < 0 for request in requests),
        moved=served.moved,
        least=min(served.counts),
        most=max(served.counts),
        changes=len(served.changes),
    )


@dataclass(frozen=True)
class Trial:
    """A policy with one parameter, over all parts."""

    parts: tuple[Outcome, ...]

    @property
    def parameter(self) -> float:
        return self.parts[0].parameter

    @property
    def hours(self) -> float:
        return sum(part.hours for part in self.parts)

    @property
    def ttft_p90_s(self) -> float:
        """Of the slowest part."""
        return max(part.ttft_p90_s for part in self.parts)


def search(policy: str, settings: Sequence[Setting], rounds: int) -> list[Trial]:
    """Trials over the policy's range: ``rounds`` parameters in steps of equal ratio, then half as many between the
    cheapest that reached the goal (of equal ones, the last) and the next one, each time in the middle."""

    def trial(parameter: float) -> Trial:
        return Trial(tuple(run(policy, parameter, setting) for setting in settings))

    if policy == "fixed":
        return _search_fixed(trial, settings[0])
    first, last = SEARCH[policy]
    found = [trial(float(value)) for value in np.geomspace(first, last, rounds)]
    for _ in range(rounds // 2):
        hours = best(found, settings[0].goal_s).hours
        chosen = min((one.parameter for one in found if one.hours == hours), key=lambda value: abs(value - last))
        later = [one.parameter for one in found if abs(one.parameter - last) < abs(chosen - last)]
        following = min(later, key=lambda value: abs(value - chosen), default=last)
        found.append(trial(math.sqrt(chosen * following)))
    return found


def _search_fixed(trial: Callable[[float], Trial], setting: Setting) -> list[Trial]:
    found, low, high = list[Trial](), 0, setting.most
    while high - low > 1:
        middle = (low + high) // 2
        found.append(trial(middle))
        low, high = (low, middle) if found[-1].ttft_p90_s <= setting.goal_s else (middle, high)
    return found


def best(found: Sequence[Judged], goal_s: float) -> Judged:
    """The cheapest of those that reach the goal; if none does, the one with the least p90 TTFT."""
    reached = [one for one in found if one.ttft_p90_s <= goal_s]
    if reached:
        return min(reached, key=lambda one: one.hours)
    return min(found, key=lambda one: one.ttft_p90_s)


def search_all(settings: Sequence[Setting], rounds: int, jobs: int) -> dict[str, list[Trial]]:
    """By policy, all trials of the search."""
    policies = [*SEARCH, "fixed"]
    return dict(zip(policies, together(partial(search, settings=settings, rounds=rounds), policies, jobs), strict=True))


def take_away(setting: Setting, storages: Sequence[float], many: int, few: int, jobs: int) -> list[Compared]:
    runs = list(product(CASES, storages, MOMENTS))
    return compare(runs, together(partial(keep, setting=setting, many=many, few=few), runs, jobs))


def together(one: Callable[[Given], Found], tasks: Sequence[Given], jobs: int) -> list[Found]:
    """``one`` of each task, so many at a time."""
    if jobs == 1:
        return [one(task) for task in tasks]
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(one, tasks))


# ---- the report ----


def print_outcomes(outcomes: Sequence[Outcome], ours: Outcome) -> None:
    print(
        f"{'':14}{'parameter':>10}{'engine-hours':>14}{'ours over':>11}{'TTFT p50':>10}{'p90, s':>8}{'in goal':>9}"
        f"{'hits':>7}{'engines':>9}{'changes':>9}{'moved':>7}{'lost':>6}"
    )
    for one in outcomes:
        print(
            f"{one.policy:14}{one.parameter:>10.2f}{one.hours:>14.3f}{ours.hours / one.hours:>11.3f}"
            f"{one.ttft_p50_s:>10.2f}{one.ttft_p90_s:>8.2f}{one.within:>9.1%}{one.hit_rate:>7.1%}"
            f"{f'{one.least}-{one.most}':>9}{one.changes:>9}{one.moved:>7}{one.lost:>6}"
        )


def print_chosen(settings: Sequence[Setting], chosen: dict[str, Trial]) -> None:
    """Show, part by part, the run of each policy that counts."""
    for number, setting in enumerate(settings):
        first, behind = setting.part
        print(f"\nrequests {first:,} to {behind - 1:,}")
        print_outcomes([trial.parts[number] for trial in chosen.values()], chosen["headwise"].parts[number])


def report(settings: Sequence[Setting], rounds: int, jobs: int, storages: Sequence[float], many: int, few: int) -> None:
    one = settings[0]
    print(
        f"{one.trace.name}, load {one.load:g}, waves of {one.wave_s:g} s and {one.swing:.0%}; engines start in "
        f"{one.start_s:g} s; up after {one.upscale_delay_s:g} s, down after {one.downscale_delay_s:g} s; goal: p90 "
        f"TTFT {one.goal_s:g} s",
        flush=True,
    )
    found = search_all(settings, rounds, jobs)
    chosen = {policy: best(trials, one.goal_s) for policy, trials in found.items()}
    print_chosen(settings, chosen)
    flat = replace(one, part=(0, settings[-1].part[1]), swing=0.0, load=one.load * TAKE_LOAD)
    kept = take_away(flat, storages, many, few, jobs)
    for compared in kept:
        show(compared, many, few)
    lost = sum(part.lost for trials in found.values() for trial in trials for part in trial.parts)
    lost += sum(case.lost for compared in kept for case in compared.found.values())
    print(json.dumps({**hours_of(found, chosen, one.goal_s), **kept_of(kept), "lost_requests": lost}))


def hours_of(found: dict[str, list[Trial]], chosen: dict[str, Trial], goal_s: float) -> dict[str, Any]:
    """Engine-hours of all parts, and each part's p90 TTFT and share of requests within the goal. Hours of a policy that
    missed the goal say nothing."""
    ours, theirs = chosen["headwise"], chosen["queue_length"]
    return {
        "replica_hours_ratio": round(ours.hours / theirs.hours, 4),
        "ratio_of_parts": [round(a.hours / b.hours, 4) for a, b in zip(ours.parts, theirs.parts, strict=True)],
        "searched_in_each_part": round(
            _luckiest(found["headwise"], goal_s) / _luckiest(found["queue_length"], goal_s), 4
        ),
        "hours": {policy: round(trial.hours, 4) for policy, trial in chosen.items()},
        "parameters": {policy: round(trial.parameter, 4) for policy, trial in chosen.items()},
        "ttft_p90_s": {policy: [round(part.ttft_p90_s, 3) for part in trial.parts] for policy, trial in chosen.items()},
        "within_goal": {policy: [round(part.within, 4) for part in trial.parts] for policy, trial in chosen.items()},
        "goal_s": goal_s,
        "goal_missed": [policy for policy, trial in chosen.items() if trial.ttft_p90_s > goal_s],
    }


def _luckiest(trials: Sequence[Trial], goal_s: float) -> float:
    """Engine-hours of all parts, each with the parameter that is best in it."""
    count = len(trials[0].parts)
    return sum(best([trial.parts[number] for trial in trials], goal_s).hours for number in range(count))


def kept_of(compared: Sequence[Compared]) -> dict[str, Any]:
    smaller, larger = compared[0], compared[-1]
    return {**_kept_with(smaller), "larger_storage": _kept_with(larger)}


def _kept_with(compared: Compared) -> dict[str, float]:
    return {
        "hit_rate_kept": round(compared.of_undisturbed(), 4),
        "hit_rate_of_before": round(compared.of_before(), 4),
        "hit_rate_of_few": round(compared.of_few(), 4),
        "kept_by_both": round(compared.of_undisturbed("to storage and hosts"), 4),
        "kept_by_hosts": round(compared.of_undisturbed("to hosts"), 4),
        "kept_by_nobody": round(compared.of_undisturbed("to nobody"), 4),
        "kept_without_peer_loads": round(compared.of_undisturbed("no peer loads: to storage"), 4),
        "bound_by_memory": round(compared.of_bound(), 4),
        "at_stake": round(compared.at_stake, 4),
    }


def parts_of(trace: Path, requests: int, parts: int) -> list[tuple[int, int]]:
    """The trace's leading requests, cut into equal parts."""
    count = len(read_requests(trace, requests, 1.0))
    return [(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first 60 requests: seconds")
    parser.add_argument("--trace", type=Path, default=TRACE, help="Mooncake's conversation trace")
    parser.add_argument("--requests", type=int, default=1 << 30, help="so many of its requests, from the first on")
    parser.add_argument("--parts", type=int, default=2, help="that the trace is cut into")
    parser.add_argument("--load", type=float, default=1.0, help="how many times as fast as in the trace they arrive")
    parser.add_argument("--swing", type=float, default=0.6, help="how far the rate goes up and down, of its mean")
    parser.add_argument("--wave", type=float, default=1800.0, help="seconds from one low to the next")
    parser.add_argument("--start", type=float, default=30.0, help="seconds that an engine takes to start")
    parser.add_argument("--upscale-delay", type=float, default=10.0)
    parser.add_argument("--downscale-delay", type=float, default=120.0)
    parser.add_argument("--drain-timeout", type=float, default=60.0)
    parser.add_argument("--begin", type=int, default=4, help="engines that there are at first")
    parser.add_argument("--most", type=int, default=20, help="engines that there may be")
    parser.add_argument("--goal", type=float, default=5.0, help="p90 TTFT to be reached, in seconds")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each policy in search of its parameter")
    parser.add_argument("--take", type=int, nargs=2, default=(8, 6), help="engines before and after some are taken")
    parser.add_argument("--jobs", type=int, default=2, help="simulations at a time")
    args = parser.parse_args(arguments)
    if not args.trace.exists():
        print(f"{args.trace} is not there: nothing was served; give a trace with --trace")
        print(json.dumps({"lost_requests": 0}))
        return
    settings = [
        Setting(
            args.trace,
            part,
            args.load,
            args.swing,
            args.wave,
            args.start,
            args.upscale_delay,
            args.downscale_delay,
            args.drain_timeout,
            args.most,
            args.goal,
            args.begin,
        )
        for part in parts_of(args.trace, 60 if args.quick else args.requests, args.parts)
    ]
    rounds, jobs = (2, 1) if args.quick else (args.rounds, args.jobs)
    report(settings, rounds, jobs, STORAGES, *args.take)


if __name__ == "__main__":
    main()
