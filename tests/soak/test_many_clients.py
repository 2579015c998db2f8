"""Three minutes of 64 clients at once, a third of whom hang up at random moments."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import pytest

from headwise.actors.deployment import Deployment
from headwise.runtime.client.client import Client
from headwise.runtime.config.engine_config import EngineConfig

pytestmark = [pytest.mark.soak, pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600)]

CLIENTS = 64
SECONDS = 180
PREFIX = "You are a helpful assistant that answers in one short sentence. " * 8


class Visitor(threading.Thread):
    """One client that asks, reads, and sometimes leaves in the middle, until the time is up."""

    def __init__(self, address: str, seed: int, until: float) -> None:
        super().__init__(name=f"visitor-{seed}")
        self._address, self._random, self._until = address, random.Random(seed), until
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []

    def run(self) -> None:
        with Client(self._address) as client:
            while time.monotonic() < self._until:
                try:
                    self._ask(client)
                except Exception as error:
                    self.errors.append(repr(error))

    def _ask(self, client: Client) -> None:
        draw = self._random
        prompt = PREFIX * draw.randint(0, 3) + f"Question {draw.randint(0, 40)}: what is {draw.random()}?"
        tokens = draw.randint(1, 24)
        stream = client.stream(prompt, max_tokens=tokens, temperature=1.0, ignore_eos=True)
        leave_after = draw.randint(0, tokens - 1) if draw.random() < 1 / 3 else None
        seen = 0
        for delta in stream:
            seen += len(delta.token_ids)
            if leave_after is not None and seen >= leave_after:
                stream.cancel()
                self.counts["cancelled"] += 1
                return
        assert seen == tokens, f"{seen} tokens came, {tokens} were asked for"
        self.counts["finished"] += 1


def test_64_clients_for_three_minutes_leave_nothing_behind() -> None:
    config = EngineConfig(port=0, kv_cache="256MiB", max_num_seqs=48, max_model_len=2048)
    with Deployment.start(config) as deployment:
        until = time.monotonic() + SECONDS
        visitors = [Visitor(deployment.client_address, seed, until) for seed in range(CLIENTS)]
        for visitor in visitors:
            visitor.start()
        for visitor in visitors:
            visitor.join(SECONDS + 180)
        assert not [visitor.name for visitor in visitors if visitor.is_alive()], "a client hangs"
        total = sum((visitor.counts for visitor in visitors), Counter())
        assert [error for visitor in visitors for error in visitor.errors] == []
        assert total["finished"] > CLIENTS
        assert total["cancelled"] > CLIENTS / 4
        with Client(deployment.client_address) as client:
            held = wait_until_idle(client)
        print(dict(total))
        assert held == 0, f"{held} blocks were not given back"


def wait_until_idle(client: Client, seconds: float = 30.0) -> int:
    """Blocks still held once no request is left, or when the time is up."""
    deadline = time.monotonic() + seconds
    while True:
        engines = client.stats()["engines"].values()
        held = sum(engine["cache"]["held_blocks"] for engine in engines)
        busy = sum(engine["requests"]["running"] + engine["requests"]["waiting"] for engine in engines)
        if (not held and not busy) or time.monotonic() > deadline:
            return int(held)
        time.sleep(0.2)
