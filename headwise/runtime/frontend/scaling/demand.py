"""How many engines a load needs, by the costs that requests are routed by.

Three numbers, of which the greatest counts:

- time: engines are servers of one queue. A request occupies one for the seconds until its first token that the router
  expected when it sent it, without waits. With the rate, the mean and the variation of these seconds that are to be
  expected (`forecast`), a request finds all ``n`` engines busy with about the chance
  ``b ** (sqrt(2 (n + 1)) - 1)``, where ``b`` is the share of time that they are (Sakasegawa 1977), and then waits
  exponentially with the mean ``(1 + cv**2) / 2 * mean / (n (1 - b))``. The time to the first token is the sum of both;
  as its distribution counts the log-normal one of the same mean and variance, so nine of ten are under
  ``exp(mu + 1.28 sigma)``.
- backlog: what is queued already is to be computed in `CLEAR_S` beside what arrives. Faster makes no sense: an engine
  that is started for it takes about as long to start.
- room: running sequences hold their blocks; pools and sequences should be `FULL` at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headwise.runtime.frontend.scaling.base import Observation, ScalingPolicy
from headwise.runtime.frontend.scaling.forecast import Expected

CLEAR_S = 30.0
FULL = 0.9

AT_BEST = 1.25
"""More engines make no prompt faster. So where long prompts alone take longer than the target, so many times the least
time that is possible is enough."""

_NORMAL = 1.2815515655446004
"""Nine of ten of a normal distribution are under its mean and so many standard deviations."""


@dataclass(frozen=True)
class Load:
    """What arrives, and what is there.

    rate:      requests a second
    mean_s:    engine-seconds of a request until its first token, without waits
    variation: of these: variance over the mean's square
    """

    rate: float
    mean_s: float
    variation: float
    backlog_s: float = 0.0
    fullness: float = 0.0
    requests: int = 0

    @property
    def work(self) -> float:
        """Engine-seconds of prompts that arrive in a second."""
        return self.rate * self.mean_s

    def queue_s(self, engines: float) -> float:
        """The wait that nine of ten requests stay under with so many engines; 0: as many find one idle."""
        chance, mean_if_any = self._wait(engines)
        return max(0.0, mean_if_any * math.log(10 * chance)) if chance else 0.0

    def wait_s(self, engines: float) -> float:
        """The mean wait with so many engines."""
        chance, mean_if_any = self._wait(engines)
        return chance * mean_if_any if chance else 0.0

    def ttft_s(self, engines: float) -> float:
        """The time to the first token that nine of ten requests stay under with so many engines."""
        chance, mean_if_any = self._wait(engines)
        mean = self.mean_s + chance * mean_if_any
        if not mean or mean == math.inf:
            return mean
        variance = self.variation * self.mean_s**2 + chance * (2 - chance) * mean_if_any**2
        sigma = math.sqrt(math.log1p(variance / mean**2))
        return mean * math.exp(_NORMAL * sigma - sigma**2 / 2)

    def _wait(self, engines: float) -> tuple[float, float]:
        """The chance that a request finds all engines busy, and its mean wait if so."""
        if not self.work or engines == math.inf:
            return 0.0, 0.0
        busy = self.work / engines if engines else 1.0
        if busy >= 1.0:
            return 1.0, math.inf
        chance = busy ** (math.sqrt(2 * (engines + 1)) - 1)
        return chance, (1 + self.variation) / 2 * self.mean_s / (engines * (1 - busy))


@dataclass(frozen=True)
class Need:
    """So many engines are needed, and why."""

    number: int
    why: str


def load_of(expected: Expected, now: Observation) -> Load:
    """What is expected to arrive, beside what is there now."""
    return Load(
        rate=expected.rate,
        mean_s=expected.mean_s,
        variation=expected.variation,
        backlog_s=now.backlog_s,
        fullness=sum(engine.fullness for engine in now.engines),
        requests=now.requests,
    )


def needed(load: Load, policy: ScalingPolicy, share: float = 1.0) -> Need:
    """The fewest engines that keep ``share`` of the policy's target, up to its ``max_replicas``."""
    needs = [_for_time(load, policy, share), _for_backlog(load), _for_room(load)]
    if load.requests or load.rate:
        needs.append(Need(1, f"{load.requests} requests are there"))
    most = max(needs, key=lambda need: need.number)
    return most if most.number else Need(0, "there are no requests")


def _for_time(load: Load, policy: ScalingPolicy, share: float) -> Need:
    if policy.target_ttft_s is not None:
        expected, what = load.ttft_s, "have their first token"
        allowed = max(policy.target_s * share, AT_BEST * load.ttft_s(math.inf))
    else:
        expected, what = load.queue_s, "start"
        allowed = policy.target_s * share
    number = int(load.work)
    while number < policy.max_replicas and expected(number) > allowed:
        number += 1
    seconds = expected(number)
    then = f"nine of ten {what} within about {seconds:.2f} s" if seconds < math.inf else "requests pile up"
    return Need(number, f"{load.work:.2f} engine-seconds of prompts arrive a second; with {number} engines {then}")


def _for_backlog(load: Load) -> Need:
    number = math.ceil(load.work + load.backlog_s / CLEAR_S)
    return Need(number, f"{load.backlog_s:.1f} engine-seconds of prompts wait, and {load.work:.2f} arrive a second")


def _for_room(load: Load) -> Need:
    return Need(math.ceil(load.fullness / FULL), f"running requests fill {load.fullness:.2f} engines")
