"""How others decide on the number of engines, each with one parameter; `autoscaling.py` says where they come from."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np
from simulation.elastic import Chooser, View
from simulation.scaling import Setting

from headwise.runtime.frontend.scaling.demand import Need
from headwise.runtime.frontend.scaling.evidence import Evidence, Sample

LOOK_BACK_S = 30.0
"""Ray Serve's look_back_period_s."""
TTFT_WINDOW_S = 60.0


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
