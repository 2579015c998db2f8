"""A scheduler that dies or hangs has a successor at once: the one that stands by. There is never more than one."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.endless_load import EndlessLoad
from support.reference import sure_answers
from support.waiting import eventually

from headwise import Client, ClientKeys
from headwise.actors.deployment import Deployment
from headwise.errors import DeploymentError

pytestmark = [pytest.mark.ray, pytest.mark.model]

TOKENS = 16
STREAMS = sure_answers(TOKENS)[:3]


def schedulers(deployment: Deployment) -> tuple[int, int]:
    """Process ids of the scheduler and of the one that stands by, once there is one."""
    eventually(lambda: deployment.has_standby)
    pids = deployment.actor_pids()
    return pids["scheduler"], pids["scheduler-standby"]


def pid_of(deployment: Deployment, role: str) -> int | None:
    """None while none serves, or nobody knows yet that the last one is dead."""
    try:
        return deployment.actor_pids().get(role)
    except DeploymentError:
        return None


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def answers_again(client: Client) -> bool:
    try:
        return bool(client.generate("Still there?", max_tokens=2).token_ids)
    except DeploymentError:  # nothing has listened for so long that there seems to be no deployment
        return False


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.soak), signal.SIGSTOP])
def test_the_one_that_stands_by_takes_over_and_no_stream_loses_a_token(
    deployment: Deployment, client: Client, keys: ClientKeys, number: int
) -> None:
    scheduler, standby = schedulers(deployment)
    load = EndlessLoad(client, STREAMS, TOKENS)
    load.goes_on()
    os.kill(scheduler, number)
    load.goes_on()
    assert load.end() > 0
    assert deployment.actor_pids()["scheduler"] == standby
    eventually(lambda: not is_there(scheduler))  # one that hangs could go on later, and answer beside its successor
    with Client("ray:auto", keys=keys) as another:
        assert another.address == client.address
        assert another.generate("Still there?", max_tokens=2).token_ids
    assert schedulers(deployment)[1] not in (scheduler, standby)


@pytest.mark.soak
def test_one_that_stands_by_and_hangs_when_it_is_needed_is_replaced_in_turn(
    deployment: Deployment, client: Client
) -> None:
    gone = schedulers(deployment)
    os.kill(gone[1], signal.SIGSTOP)
    os.kill(gone[0], signal.SIGKILL)
    eventually(lambda: answers_again(client))
    eventually(lambda: not any(map(is_there, gone)))
    assert not {*gone} & {*schedulers(deployment)}


def test_a_machine_that_stands_still_replaces_nobody(deployment: Deployment, client: Client) -> None:
    """The one that stands by is as silent as the scheduler, which goes on last."""
    scheduler, standby = schedulers(deployment)
    for pid in (scheduler, standby):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * deployment.config.failover_timeout_s)
    for pid in (standby, scheduler):
        os.kill(pid, signal.SIGCONT)
    assert client.generate("Still there?", max_tokens=2).token_ids
    assert schedulers(deployment) == (scheduler, standby)


def test_one_that_stands_by_and_dies_is_replaced_and_the_scheduler_serves_on(
    deployment: Deployment, client: Client
) -> None:
    scheduler, standby = schedulers(deployment)
    os.kill(standby, signal.SIGKILL)
    assert client.generate("Still there?", max_tokens=2).token_ids

    eventually(lambda: pid_of(deployment, "scheduler-standby") not in (None, standby))
    assert schedulers(deployment)[0] == scheduler


def test_a_store_that_hangs_is_replaced_while_the_scheduler_that_stands_by_answers(
    deployment: Deployment, client: Client
) -> None:
    eventually(lambda: deployment.has_standby)
    store = deployment.actor_pids()["store"]
    os.kill(store, signal.SIGSTOP)
    eventually(lambda: not is_there(store))
    assert client.generate("Still there?", max_tokens=2).token_ids
    eventually(lambda: pid_of(deployment, "store") not in (None, store))


def test_a_deployment_whose_scheduler_was_replaced_keeps_its_name(deployment: Deployment, client: Client) -> None:
    with pytest.raises(DeploymentError, match="'headwise' is already running"):
        Deployment.start(replace(deployment.config, http=0, otlp_endpoint=""), address="auto")
    assert client.generate("Still there?", max_tokens=2).token_ids
