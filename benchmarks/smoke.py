"""What a benchmark computes with where it is to end in seconds, and its figures say nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from headwise import Client, EngineConfig, LocalEngine
from headwise.actors.deployment import Deployment


def lightly(config: EngineConfig) -> EngineConfig:
    """``config`` with weights that any CPU reads fast, and tokens that do not depend on who shares their batch.

    On one thread: several that wait for one another's cores cost more than they save where others compute, too.
    """
    return replace(config, dtype="float32", weights_dtype="gguf", cpu_threads=1)


@contextmanager
def deployed(config: EngineConfig, ray: str | None, running: Deployment | None = None) -> Iterator[Deployment]:
    """A deployment of ``config``, or one that runs already and is left running: what starts one takes longer than what
    measures little.
    """
    if running is not None:
        yield running
        return
    with Deployment.start(config, ray) as deployment:
        yield deployment


@contextmanager
def asked(config: EngineConfig, ray: str | None, *, here: bool = False) -> Iterator[Client | LocalEngine]:
    """What answers as ``config`` says: a client of a deployment; or ``here`` one rank of this process, which is there
    at once, for what others are only compared with.
    """
    if here:
        with LocalEngine(replace(config, tp_size=1, context_parallel_size=1)) as engine:
            yield engine
        return
    with Deployment.start(config, ray) as deployment, Client(deployment.client_address) as client:
        yield client
