"""Elastic replicas over a trace of conversations: the real controller, router and index, simulated engines.

    python benchmarks/autoscaling.py [--quick] [--trace FILE.jsonl.gz] [--swing 0.6] [--wave 1800] [--goal 5] [--jobs 2]

The trace's requests arrive in waves, as of days that were compressed in time: its own rate hardly changes, so an
elastic cluster would have nothing to follow (``--swing 0`` keeps it as it is). What decides the number of engines:

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
in the number alone. Each has one parameter, which is searched: the run with the fewest engine-hours among those whose
p90 TTFT is at most the goal counts. Then, at a steady load, engines are taken away at once: the hit rate after over
that before, with handover and without. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from capacity import TRACE
from routing import ENGINE_QUEUE, hardware, read_requests
from simulation.cluster import BLOCK, Hardware, Request
from simulation.elastic import Chooser, ElasticCluster, Served, View

from headwise.runtime.frontend.routing import Router, RouterOptions
from headwise.runtime.frontend.scaling import ReplicaSet, ScalingPolicy
from headwise.runtime.frontend.scaling.demand import Need
from headwise.runtime.frontend.scaling.evidence import Evidence, Sample

LOOK_BACK_S = 30.0
"""Ray Serve's look_back_period_s."""
TTFT_WINDOW_S = 60.0
TAKE_LOAD = 0.6
"""Of the load of the other part, where engines are taken away: those that are left can serve it."""
SEARCH = {
    "headwise": (2.0, 16.0),
    "ray_ongoing": (1.0, 32.0),
    "ray_ttft": (1.0, 32.0),
    "queue_length": (0.1, 6.4),
    "foreseen": (9.0, 5.0),
}
"""Where each policy's parameter is searched: towards the second one, fewer engines."""


Found = TypeVar("Found")


@dataclass(frozen=True)
class Setting:
    """What all policies have in common. Times in seconds."""

    trace: Path
    count: int
    load: float
    swing: float
    wave_s: float
    start_s: float
    upscale_delay_s: float
    downscale_delay_s: float
    drain_timeout_s: float
    most: int
    goal_s: float
    begin: int
    window_s: float = 600.0


# ---- what arrives ----


def requests_of(setting: Setting) -> list[Request]:
    """The trace's requests, their rate going up and down by ``swing`` of its mean, from a low on."""
    requests = read_requests(setting.trace, setting.count, setting.load)
    last = requests[-1].arrived
    times = np.linspace(0.0, last, 10_000)
    angle = 2 * np.pi * times / setting.wave_s
    passed = times - setting.swing * setting.wave_s / (2 * np.pi) * np.sin(angle)
    for request in requests:
        request.arrived = float(np.interp(request.arrived, passed * last / passed[-1], times))
    return requests


# ---- policies of others ----


def ray_ongoing(target: float, setting: Setting) -> Chooser:
    seen: deque[tuple[float, int]] = deque()

    def desired(view: View, now: float, number: int) -> int:
        seen.append((now, view.ongoing))
        while seen[0][0] < now - LOOK_BACK_S:
            seen.popleft()
        return math.ceil(sum(each for _, each in seen) / len(seen) / target)

    return _after_delays(desired, setting)


def ray_ttft(target: float, setting: Setting) -> Chooser:
    def desired(view: View, now: float, number: int) -> int:
        lately = [ttft for when, ttft in view.first_tokens if when >= now - TTFT_WINDOW_S]
        p99 = float(np.percentile(lately, 99)) if lately else 0.0
        return number + 1 if p99 > target else number - 1 if p99 < target / 2 else number

    return _after_delays(desired, setting)


def queue_length(target: float, setting: Setting) -> Chooser:
    evidence, number = Evidence(setting.upscale_delay_s, setting.downscale_delay_s), setting.begin

    def choose(view: View, now: float) -> int:
        nonlocal number
        need = Need(math.ceil(view.waiting / target), "")
        evidence.add(Sample(now, need, need))
        found = evidence.rise(number, now) or evidence.fall(number, now)
        number = min(max(found.number if found else number, 1), setting.most)
        return number

    return choose


def foreseen(level: float, setting: Setting) -> Chooser:
    def choose(view: View, now: float) -> int:
        height = 1 - setting.swing * math.cos(2 * math.pi * (now + setting.start_s) / setting.wave_s)
        return min(max(round(level * height), 1), setting.most)

    return choose


def fixed(number: float, setting: Setting) -> Chooser:
    return lambda view, now: int(number)


def _after_delays(desired: Callable[[View, float, int], int], setting: Setting) -> Chooser:
    """Ray Serve's: what is desired, after more, or less, was desired without a break for the delay."""
    number, direction, since = setting.begin, 0, 0.0

    def choose(view: View, now: float) -> int:
        nonlocal number, direction, since
        wanted = min(max(desired(view, now, number), 1), setting.most)
        towards = (wanted > number) - (wanted < number)
        if towards != direction:
            direction, since = towards, now
        delay_s = setting.upscale_delay_s if towards > 0 else setting.downscale_delay_s
        if towards and now - since >= delay_s:
            number, direction = wanted, 0
        return number

    return choose


CHOOSERS: dict[str, Callable[[float, Setting], Chooser]] = {
    "ray_ongoing": ray_ongoing,
    "ray_ttft": ray_ttft,
    "queue_length": queue_length,
    "foreseen": foreseen,
    "fixed": fixed,
}

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


def cluster(
    machine: Hardware,
    setting: Setting,
    choose: Chooser | None,
    target_s: float = 1.0,
    handover: bool = True,
    by_worth: bool = True,
) -> ElasticCluster:
    options = RouterOptions(
        block_size=BLOCK,
        blocks_per_token=1 / BLOCK,
        engine_queue=ENGINE_QUEUE,
        max_num_seqs=machine.max_num_seqs,
        step_tokens=machine.step_tokens,
    )
    policy = ScalingPolicy(
        min_replicas=1,
        max_replicas=setting.most,
        target_ttft_s=target_s,
        upscale_delay_s=setting.upscale_delay_s,
        downscale_delay_s=setting.downscale_delay_s,
        drain_timeout_s=setting.drain_timeout_s,
    )
    router = Router(options, random.Random(0))
    return ElasticCluster(
        machine, router, ReplicaSet(policy, setting.begin), setting.start_s, choose, handover, by_worth
    )


def run(policy: str, parameter: float, setting: Setting) -> Outcome:
    requests = requests_of(setting)
    chooser = None if policy == "headwise" else CHOOSERS[policy](parameter, setting)
    begin = int(parameter) if policy == "fixed" else setting.begin
    served = cluster(hardware(), setting, chooser, parameter).serve(requests, begin)
    return _outcome(policy, parameter, requests, served, setting)


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


def hit_rate(requests: Sequence[Request]) -> float:
    """Of the prompts' tokens, the share that some tier served."""
    found = sum(each.device + each.loaded_host + each.loaded_storage for each in requests)
    return found / max(1, sum(each.num_tokens for each in requests))


def search(policy: str, setting: Setting, rounds: int) -> list[Outcome]:
    """Runs of a policy over its parameter's range: ``rounds`` values in steps of equal ratio, then half as many between
    the cheapest that reached the goal (of equal ones, the last) and the next one, each time in the middle."""
    if policy == "fixed":
        return _search_fixed(setting)
    first, last = SEARCH[policy]
    found = [run(policy, float(value), setting) for value in np.geomspace(first, last, rounds)]
    for _ in range(rounds // 2):
        hours = best(found, setting.goal_s).hours
        chosen = min((one.parameter for one in found if one.hours == hours), key=lambda value: abs(value - last))
        later = [one.parameter for one in found if abs(one.parameter - last) < abs(chosen - last)]
        following = min(later, key=lambda value: abs(value - chosen), default=last)
        found.append(run(policy, math.sqrt(chosen * following), setting))
    return found


def _search_fixed(setting: Setting) -> list[Outcome]:
    found, low, high = list[Outcome](), 0, setting.most
    while high - low > 1:
        middle = (low + high) // 2
        found.append(run("fixed", middle, setting))
        low, high = (low, middle) if found[-1].ttft_p90_s <= setting.goal_s else (middle, high)
    return found


def best(outcomes: Sequence[Outcome], goal_s: float) -> Outcome:
    """The cheapest of those that reach the goal; if none does, the one with the least p90 TTFT."""
    reached = [one for one in outcomes if one.ttft_p90_s <= goal_s]
    if reached:
        return min(reached, key=lambda one: one.hours)
    return min(outcomes, key=lambda one: one.ttft_p90_s)


# ---- what a smaller cluster still has ----


@dataclass(frozen=True)
class Kept:
    """before, after: hit rates of the requests that arrived in the window before engines were ordered to go, and in the
    one after the last of them had gone
    blocks: that leaving engines wrote, and all that only they had"""

    what: str
    before: float
    after: float
    blocks: tuple[int, int]
    lost: int


KEPT = {
    "handover, least worth goes": {"handover": True, "by_worth": True},
    "handover, any goes": {"handover": True, "by_worth": False},
    "no handover, least worth goes": {"handover": False, "by_worth": True},
    "no handover, any goes": {"handover": False, "by_worth": False},
    "none goes": {},
}


def keep(what: str, setting: Setting, many: int, few: int) -> Kept:
    """Take engines away in the middle of the trace, which is left as it came."""
    requests = requests_of(setting)
    at = requests[len(requests) // 2].arrived
    after = at + setting.drain_timeout_s
    goes = bool(KEPT[what])

    def choose(view: View, now: float) -> int:
        return few if goes and now >= at else many

    served = cluster(hardware(), setting, choose, **KEPT[what]).serve(requests, many)
    return Kept(
        what,
        hit_rate([each for each in requests if at - setting.window_s <= each.arrived < at]),
        hit_rate([each for each in requests if after <= each.arrived < after + setting.window_s]),
        (sum(written for written, _ in served.kept), sum(every for _, every in served.kept)),
        sum(request.ended < 0 for request in requests),
    )


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


def print_kept(found: Sequence[Kept], many: int, few: int) -> None:
    print(f"\n{many} -> {few} engines at once: hit rate")
    whole = found[-1]
    print(f"{'':32}{'before':>8}{'after':>8}{'after/before':>14}{'after/none went':>17}{'blocks written':>18}")
    for one in found:
        written, every = one.blocks
        print(
            f"{one.what:32}{one.before:>8.1%}{one.after:>8.1%}{ratio(one.after, one.before):>14.3f}"
            f"{ratio(one.after, whole.after):>17.3f}"
            f"{f'{written:,} of {every:,}':>18}"
        )


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def simulate(setting: Setting, rounds: int, jobs: int) -> dict[str, list[Outcome]]:
    policies = [*SEARCH, "fixed"]
    return dict(zip(policies, together(partial(search, setting=setting, rounds=rounds), policies, jobs), strict=True))


def together(one: Callable[[str], Found], names: Sequence[str], jobs: int) -> list[Found]:
    """``one`` of each name, so many at a time."""
    if jobs == 1:
        return [one(name) for name in names]
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(one, names))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first 60 requests: seconds")
    parser.add_argument("--trace", type=Path, default=TRACE, help="Mooncake's conversation trace")
    parser.add_argument("--requests", type=int, default=1 << 30, help="so many of its requests, from the first on")
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
    parser.add_argument("--rounds", type=int, default=6, help="runs of each policy in search of its parameter")
    parser.add_argument("--take", type=int, nargs=2, default=(8, 6), help="engines before and after some are taken")
    parser.add_argument("--jobs", type=int, default=2, help="simulations at a time")
    args = parser.parse_args(arguments)
    if not args.trace.exists():
        print(f"{args.trace} is not there: nothing was served; give a trace with --trace")
        print(json.dumps({"lost_requests": 0}))
        return
    setting = Setting(
        args.trace,
        60 if args.quick else args.requests,
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
    report(setting, 2 if args.quick else args.rounds, 1 if args.quick else args.jobs, *args.take)


def report(setting: Setting, rounds: int, jobs: int, many: int, few: int) -> None:
    found = simulate(setting, rounds, jobs)
    chosen = {policy: best(outcomes, setting.goal_s) for policy, outcomes in found.items()}
    ours = chosen["headwise"]
    print(
        f"{setting.trace.name}, load {setting.load:g}, waves of {setting.wave_s:g} s and {setting.swing:.0%}; "
        f"engines start in {setting.start_s:g} s; up after {setting.upscale_delay_s:g} s, down after "
        f"{setting.downscale_delay_s:g} s; goal: p90 TTFT {setting.goal_s:g} s\n"
    )
    print_outcomes(list(chosen.values()), ours)
    print("\nall runs of the search")
    print_outcomes([one for outcomes in found.values() for one in outcomes], ours)
    flat = replace(setting, swing=0.0, load=setting.load * TAKE_LOAD)
    kept = together(partial(keep, setting=flat, many=many, few=few), list(KEPT), jobs)
    print_kept(kept, many, few)
    print(
        json.dumps(
            {
                "replica_hours_ratio": round(ours.hours / chosen["queue_length"].hours, 4),
                "hit_rate_kept": round(ratio(kept[0].after, kept[0].before), 4),
                "lost_requests": sum(one.lost for outcomes in found.values() for one in outcomes)
                + sum(one.lost for one in kept),
                "hours": {policy: round(one.hours, 4) for policy, one in chosen.items()},
                "ttft_p90_s": {policy: round(one.ttft_p90_s, 3) for policy, one in chosen.items()},
                "goal_s": setting.goal_s,
                "kept": {one.what: round(ratio(one.after, one.before), 4) for one in kept},
                "of_undisturbed": {one.what: round(ratio(one.after, kept[-1].after), 4) for one in kept},
            }
        )
    )


if __name__ == "__main__":
    main()
