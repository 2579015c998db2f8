"""What runs of elastic clusters have in common: the trace in waves, the machines, the delays."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from routing import ENGINE_QUEUE, hardware, read_requests
from simulation.elastic import Chooser, ElasticCluster
from simulation.machine import BLOCK
from simulation.traced import Request

from headwise.runtime.frontend.routing import Router, RouterOptions
from headwise.runtime.frontend.scaling import ReplicaSet, ScalingPolicy


@dataclass(frozen=True)
class Setting:
    """What all policies have in common. Times in seconds.

    part:    requests of the trace that arrive, by number: the first one, and the one behind the last
    load:    how many times as fast as in the trace they do
    storage: how many times as large as elsewhere the shared storage is
    peer_loads: whether engines fetch from each other
    """

    trace: Path
    part: tuple[int, int]
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
    storage: float = 1.0
    peer_loads: bool = True


def requests_of(setting: Setting) -> list[Request]:
    """The part's requests, from second 0 on, their rate going up and down by ``swing`` of its mean, from a low on."""
    first, behind = setting.part
    requests = read_requests(setting.trace, behind, setting.load)[first:]
    began = requests[0].arrived
    times = np.linspace(0.0, requests[-1].arrived - began, 10_000)
    angle = 2 * np.pi * times / setting.wave_s
    passed = times - setting.swing * setting.wave_s / (2 * np.pi) * np.sin(angle)
    for request in requests:
        request.arrived = float(np.interp(request.arrived - began, passed * times[-1] / passed[-1], times))
    return requests


def cluster(
    setting: Setting,
    choose: Chooser | None,
    target_s: float = 1.0,
    handover: bool = True,
    by_worth: bool = True,
    given: bool = False,
) -> ElasticCluster:
    """target_s: of the controller's decisions, which count where ``choose`` is None."""
    machine = hardware()
    machine = replace(machine, storage=round(machine.storage * setting.storage))
    options = RouterOptions(
        block_size=BLOCK,
        blocks_per_token=1 / BLOCK,
        engine_queue=ENGINE_QUEUE,
        max_num_seqs=machine.max_num_seqs,
        step_tokens=machine.step_tokens,
        peer_loads=setting.peer_loads,
        fair_prompts=machine.serving.fair_prompts,
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
        machine, router, ReplicaSet(policy, setting.begin), setting.start_s, choose, handover, by_worth, given
    )


def hit_rate(requests: Sequence[Request]) -> float:
    """Of the prompts' tokens, the share that some tier served."""
    found = sum(each.found for each in requests)
    return found / max(1, sum(each.num_tokens for each in requests))
