"""Real elastic replicas: from one engine to several and back, by the load alone; what requests notice of it.

    python benchmarks/elastic_replicas.py [--quick | --smoke]

A deployment with storage on disk serves prompts of a few documents, again and again, in random order, to a few users,
then to so many that one engine's sequences do not suffice, then to few again. The controller decides on the number of
engines. Its decisions are printed when they are first seen, with its reasons. By phase: requests, seconds to the first
token as clients see them, and the share of prompt tokens that came from a cache:

    one         few users, one engine
    growing     many users, until all engines serve
    all         many users, all engines
    shrinking   few users, until one engine is left
    one again   few users, one engine

``hit_rate_kept`` is the hit rate of ``one again`` over that of ``all``: what engines cached that are gone came from
storage. ``lost_requests`` counts requests that failed, and ``different`` those whose tokens were not those of an
engine that serves one request at a time, undisturbed, without tiers. A phase's time is part of the result, not a
promise: how long an engine takes to start depends on the machine. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from prompts import tokens
from replicas import rounded
from smoke import deployed, lightly

from headwise import Client, EngineConfig, SamplingParams
from headwise.actors.deployment import Deployment
from headwise.errors import HeadwiseError
from headwise.runtime.client.local_engine import LocalEngine

POLL_S = 0.2
PATIENCE_S = 600.0
"""Longest wait for engines to come, or to go."""
PHASES = ("one", "growing", "all", "shrinking", "one again")


@dataclass(frozen=True)
class Size:
    """users: few, and many; phase_s: of the phases that do not wait for engines"""

    engines: int = 3
    users: tuple[int, int] = (2, 12)
    documents: int = 8
    document_tokens: int = 192
    questions: int = 3
    answer_tokens: int = 24
    phase_s: float = 20.0
    downscale_delay_s: float = 10.0


FULL = Size()
QUICK = Size(
    engines=2,
    users=(1, 8),
    documents=2,
    document_tokens=48,
    questions=1,
    answer_tokens=8,
    phase_s=2.0,
    downscale_delay_s=2.0,
)
SMOKE = replace(QUICK, engines=1, documents=1, users=(1, 2), phase_s=0.5)
QUESTION_TOKENS = 24
TARGET_TTFT_S = 30.0
"""So long that the room for running sequences decides, not this machine's speed."""
CONFIG = EngineConfig(
    model="smollm2-135m",
    port=0,
    standby=False,
    cpu_threads=1,
    block_size=16,
    max_model_len=512,
    max_num_seqs=4,  # fewer than the many users
    kv_cache="64MiB",
    upscale_delay_s=2.0,
    engine_timeout_s=30.0,
)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


# ---- what is asked ----


@dataclass(frozen=True)
class Question:
    prompt: list[int]
    answer: list[int]


def questions_of(size: Size, config: EngineConfig, seed: int) -> list[Question]:
    """Prompts, and what an engine says to them that has nothing else to do."""
    draw = np.random.default_rng(seed)
    documents = [tokens(draw, size.document_tokens) for _ in range(size.documents)]
    prompts = [[*document, *tokens(draw, QUESTION_TOKENS)] for document in documents for _ in range(size.questions)]
    sampling = replace(GREEDY, max_tokens=size.answer_tokens)
    with LocalEngine(replace(config, prefix_caching=False)) as engine:
        return [Question(prompt, engine.generate([prompt], sampling)[0].token_ids) for prompt in prompts]


# ---- who asks ----


@dataclass
class Seen:
    """What the requests of a phase have shown, by when they were sent."""

    ttft_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    def summary(self) -> dict[str, float]:
        p50, p90 = np.percentile(self.ttft_s, (50, 90)) if self.ttft_s else (0.0, 0.0)
        return {"requests": len(self.ttft_s), "ttft_p50_s": p50, "ttft_p90_s": p90, "hit_rate": self.hit_rate}


class Users:
    """So many at a time ask one question after the other, until they are told to end."""

    def __init__(self, client: Client, questions: Sequence[Question], most: int) -> None:
        self.phase = PHASES[0]
        self.seen = {phase: Seen() for phase in PHASES}
        self.faults: Counter[str] = Counter()
        self.asking = 0
        self._client, self._questions = client, questions
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(most)]

    def begin(self, phase: str, asking: int) -> None:
        self.phase, self.asking = phase, asking
        if not self._threads[0].is_alive():
            for thread in self._threads:
                thread.start()

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        order = random.Random(number)
        while not self._is_over.is_set():
            if number >= self.asking:
                time.sleep(POLL_S)
                continue
            question, phase = order.choice(self._questions), self.phase
            try:
                self._ask_one(question, phase)
            except HeadwiseError as error:
                print(f"a request was lost: {type(error).__name__}: {error}", flush=True)
                self.faults["lost_requests"] += 1

    def _ask_one(self, question: Question, phase: str) -> None:
        sent = time.perf_counter()
        stream = self._client.stream(question.prompt, GREEDY, max_tokens=len(question.answer))
        next(stream)
        ttft_s = time.perf_counter() - sent
        result = stream.read()
        with self._lock:
            self.faults["different"] += result.token_ids != question.answer
            seen = self.seen[phase]
            seen.ttft_s.append(ttft_s)
            seen.prompt_tokens += result.usage.prompt_tokens
            seen.cached_tokens += result.usage.cached_tokens


# ---- what is decided ----


@dataclass(frozen=True)
class Decision:
    at_s: float
    number: int
    reason: str


class Watch:
    """Looks at the fleet, and keeps each new decision."""

    def __init__(self, client: Client) -> None:
        self.decisions: list[Decision] = []
        self._client, self._began = client, time.perf_counter()

    def wait_for(self, engines: int) -> float:
        """Until exactly so many serve, and no other is left; how many seconds."""
        began = time.perf_counter()
        while True:
            states = self.look()
            if len(states) == engines and all(state.startswith("serves") for state in states):
                return time.perf_counter() - began
            if time.perf_counter() - began > PATIENCE_S:
                raise SystemExit(f"{engines} engines did not serve within {PATIENCE_S:g} s: {states}")
            time.sleep(POLL_S)

    def wait(self, seconds: float) -> float:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            self.look()
            time.sleep(POLL_S)
        return seconds

    def look(self) -> list[str]:
        """How far the engines are, in words."""
        fleet = self._client.stats()["fleet"]
        if not self.decisions or self.decisions[-1].number != fleet["number"]:
            made = Decision(round(time.perf_counter() - self._began, 1), fleet["number"], fleet["reason"])
            self.decisions.append(made)
            print(f"{made.at_s:>7.1f} s  {made.reason}", flush=True)
        return list(fleet["replicas"].values())


def serve(client: Client, questions: Sequence[Question], size: Size) -> dict[str, Any]:
    """All phases, one after the other."""
    few, many = size.users
    watch, users = Watch(client), Users(client, questions, many)
    steps: dict[str, tuple[int, Callable[[], float]]] = {
        "one": (few, lambda: watch.wait(size.phase_s)),
        "growing": (many, lambda: watch.wait_for(size.engines)),
        "all": (many, lambda: watch.wait(size.phase_s)),
        "shrinking": (few, lambda: watch.wait_for(1)),
        "one again": (few, lambda: watch.wait(size.phase_s)),
    }
    phases: dict[str, dict[str, float]] = {}
    try:
        watch.wait_for(1)
        for phase, (asking, wait) in steps.items():
            users.begin(phase, asking)
            phases[phase] = {"seconds": wait()}
    finally:
        users.end()
    for phase, seen in users.seen.items():
        phases[phase].update(seen.summary())
    before, after = users.seen["all"].hit_rate, users.seen["one again"].hit_rate
    return {
        "lost_requests": users.faults["lost_requests"],
        "different": users.faults["different"],
        "served": sum(len(seen.ttft_s) for seen in users.seen.values()),
        "hit_rate_kept": after / before if before else 1.0,
        "phases": phases,
        "decisions": [[made.at_s, made.number] for made in watch.decisions],
    }


# ---- the report ----


def show(phases: dict[str, dict[str, float]]) -> None:
    print(f"\n{'':12}{'seconds':>9}{'requests':>10}{'TTFT p50, s':>13}{'p90, s':>9}{'hits':>8}")
    for name, one in phases.items():
        print(
            f"{name:12}{one['seconds']:>9.1f}{one['requests']:>10.0f}{one['ttft_p50_s']:>13.3f}"
            f"{one['ttft_p90_s']:>9.3f}{one['hit_rate']:>8.1%}"
        )


def main(arguments: Sequence[str] | None = None, running: Deployment | None = None) -> None:
    """running: a deployment of so many engines as ``--smoke`` has, to measure in place of one of this script's own"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two engines, short phases: half a minute")
    parser.add_argument("--smoke", action="store_true", help="one engine, so nothing is decided: seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ray", metavar="HOST:PORT", help="the Ray cluster to deploy to; default: one of its own")
    options = parser.parse_args(arguments)
    size = SMOKE if options.smoke else QUICK if options.quick else FULL
    served = lightly(CONFIG) if options.smoke else CONFIG
    questions = questions_of(size, served, options.seed)
    with tempfile.TemporaryDirectory() as storage:
        config = replace(
            served,
            max_replicas=size.engines,
            target_ttft_s=TARGET_TTFT_S,
            downscale_delay_s=size.downscale_delay_s,
            host_cache="64MiB",
            storage=f"file://{storage}?capacity=1GiB",
        )
        with deployed(config, options.ray, running) as deployment, Client(deployment.client_address) as client:
            found = serve(client, questions, size)
    show(found["phases"])
    print(json.dumps(rounded(found)))


if __name__ == "__main__":
    main()
