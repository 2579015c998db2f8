"""A deployment of this process whose engine has all tiers: real but for the worker, which is simulated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from support.engine.scripted_deployment import Deployment
from support.engine.simulated_engine import make_engine
from support.engine.simulation import Storage
from support.waiting import eventually

from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.runtime.client.client import Client

PROMPT = list(range(1, 20))


@contextmanager
def whole_deployment() -> Iterator[Deployment]:
    """Its engine has served two requests of a tenant's with the same `PROMPT`, the second in part from its cache, and
    reported it."""
    deployment = Deployment()
    try:
        policies = FULL, HeadPolicy(window=8)
        core, _ = make_engine(policies, num_blocks=32, host_blocks=32, storage=Storage(), speculation=2)
        deployment.add_engine(core)
        with Client(deployment.address) as client:
            for _ in range(2):
                client.generate(PROMPT, max_tokens=4, tenant="team")
            eventually(lambda: "put" in client.stats()["engines"]["engine-0"]["transfers"])
        yield deployment
    finally:
        deployment.close()
