"""A deployment that is left to its Ray cluster: it outlives its command and its owner, and goes when it is told to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from support.commands import as_flags
from support.detached import pids, ran, run
from support.endless_load import EndlessLoad
from support.engine_requests import serving
from support.reference import sure_answers
from support.small_engine import SMALL
from support.waiting import PATIENCE_S, eventually

from headwise import Client, EngineConfig, SamplingParams
from headwise.actors.found import Found, deployments, find_actor, find_parts
from headwise.actors.names import OWNER, SCHEDULER, STANDBY
from headwise.errors import HeadwiseError
from headwise.runtime.client import connections

pytestmark = [pytest.mark.ray, pytest.mark.model]

_ray: Any = ray

CONFIG = replace(
    SMALL,
    replicas=1,
    engine_timeout_s=60.0,
    front_timeout_s=60.0,
    owner_timeout_s=10.0,
    drain_timeout_s=PATIENCE_S,
)
NAME = CONFIG.name
TOKENS = 16
STREAMS = sure_answers(TOKENS)[:2]
LONG = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)


def serve(cluster: str, config: EngineConfig) -> tuple[int, str, str]:
    return run("serve", "--detach", "--address", cluster, *as_flags(config))


@pytest.fixture(scope="module")
def address(cluster: str) -> str:
    """Of a deployment whose command has ended."""
    done = ran("serve", "--detach", "--address", cluster, *as_flags(CONFIG))
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"engine-0: rank 0: device=cpu \(.* tensors=numba gemm=headwise", done.stderr)) == 1
    assert len(re.findall("starting the scheduler", done.stderr)) == 1, "a stage, and no log line besides"
    return re.fullmatch(rf"serving {CONFIG.model} at (tcp://\S+)", done.stdout.strip())[1]


@pytest.fixture
def bare(cluster: str) -> str:
    """Address of the cluster, on which nothing is deployed any more, whichever tests ran before."""
    for name in deployments():
        code, _, error = run("stop", "--ray", cluster, "--name", name)
        assert code == 0, error
    return cluster


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[Client]:
    with pytest.MonkeyPatch.context() as patch, Client(address) as client:
        for limit in ("REFUSED_S", "RECONNECT_S"):  # a busy machine takes its time to start actors anew
            patch.setattr(connections, limit, PATIENCE_S)
        yield client


def standby() -> Any | None:
    return find_actor(NAME, SCHEDULER + STANDBY)


def standby_is_ready(other_than: Any | None = None) -> bool:
    """Whether one stands by, and it is not this one."""
    found = standby()
    if found is None or found == other_than:
        return False
    ray.get(found.prepare.remote())
    return True


def has_another_owner(before: dict[str, int]) -> bool:
    """Whether the owner is another process, and nothing else is. A new one may be taken for one that hangs, if it takes
    long to find what runs: then Ray starts it again.
    """
    try:
        after = pids(NAME)
    except ray.exceptions.RayActorError:
        return False
    assert {**after, OWNER: 0} == {**before, OWNER: 0}, "something else was started anew"
    return after[OWNER] != before[OWNER]


def test_it_outlives_its_command_and_a_second_one_tells_where_it_is(cluster: str, address: str, client: Client) -> None:
    assert client.stream(STREAMS[0].prompt_ids, max_tokens=TOKENS, temperature=0.0).read().token_ids
    assert serve(cluster, CONFIG)[:2] == (0, f"already serving {CONFIG.model} at {address}")
    code, _, error = serve(cluster, replace(CONFIG, replicas=2))
    assert code == 1
    assert address in error
    assert "replicas 1, not 2" in error
    code, _, error = run("serve", "--address", cluster, *as_flags(CONFIG))
    assert code == 1
    assert "'headwise' is already running" in error
    assert "headwise stop --name headwise" in error


def test_an_owner_that_is_killed_disturbs_no_stream_and_one_that_dies_with_others_is_followed_by_one_that_mends_them(
    address: str, client: Client
) -> None:
    before, first_standby = pids(NAME), standby()
    load = EndlessLoad(client, STREAMS, TOKENS)
    load.goes_on()
    os.kill(before[OWNER], signal.SIGKILL)
    load.goes_on()
    eventually(lambda: has_another_owner(before))
    eventually(lambda: standby_is_ready(other_than=first_standby))  # it has adopted what runs
    for pid in (pids(NAME)[OWNER], before["engine-0"], before[SCHEDULER]):
        os.kill(pid, signal.SIGKILL)
    load.goes_on()  # at the same port, though nobody but the store knows it
    after = pids(NAME)
    assert after["store"] == before["store"]
    assert after["engine-0"] != before["engine-0"]
    assert load.end() > 0
    eventually(lambda: serving(client) == ["engine-0"], otherwise=client.stats)


@pytest.mark.soak
def test_an_owner_that_hangs_disturbs_no_stream_and_has_a_successor(address: str, client: Client) -> None:
    client.scale(2)
    eventually(lambda: len(serving(client)) == 2, otherwise=client.stats)
    eventually(standby_is_ready)
    load = EndlessLoad(client, STREAMS, TOKENS)
    os.kill(pids(NAME)[SCHEDULER], signal.SIGKILL)  # so that the next owner finds a scheduler that stood by once
    load.goes_on()
    eventually(standby_is_ready)
    before = pids(NAME)
    os.kill(before[OWNER], signal.SIGSTOP)
    load.goes_on()
    eventually(lambda: has_another_owner(before))
    assert client.stats()["fleet"]["number"] == 2
    assert load.end() > 0


def test_to_stop_it_lets_a_stream_end_and_leaves_nothing(cluster: str, address: str, client: Client) -> None:
    left = list(pids(NAME).values())
    stream = client.stream("Once upon a time", LONG)
    next(stream)
    code, out, error = run("stop", "--ray", cluster, "--address", address)
    assert (code, out) == (0, f"stopped {address}"), error
    assert stream.read().usage.completion_tokens == LONG.max_tokens
    assert deployments() == []
    assert find_parts(NAME) == Found()
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))
    eventually(lambda: _ray.available_resources()["CPU"] == _ray.cluster_resources()["CPU"])
    with pytest.raises(HeadwiseError):
        client.generate("Still there?")
    code, out, error = run("stop", "--ray", cluster)
    assert (code, out) == (1, "")
    assert error == f"error: no deployment named 'headwise' runs on the Ray cluster at {cluster}"


@pytest.mark.soak
def test_one_that_cannot_start_is_an_error_of_the_command_and_leaves_nothing(bare: str) -> None:
    code, out, error = serve(bare, replace(CONFIG, host_cache="10TiB"))
    assert (code, out) == (1, "")
    assert error.startswith("error: ")
    assert "does not fit" in error
    assert deployments() == []
    assert find_parts(NAME) == Found()


def take_sigint() -> None:
    """Programs that are started in the background ignore it, and so do those that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.soak
def test_one_that_is_interrupted_while_it_starts_leaves_nothing(bare: str, tmp_path: Path) -> None:
    log, never = tmp_path / "log", replace(CONFIG, engine_resources="of_no_node=1")
    command = [sys.executable, "-m", "headwise", "serve", "--detach", "--address", bare, *as_flags(never)]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, preexec_fn=take_sigint)
        eventually(lambda: "starting the scheduler" in log.read_text(), otherwise=log.read_text)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) != 0
    assert deployments() == []
    assert find_parts(NAME) == Found()


def test_it_needs_a_cluster_that_outlives_the_command() -> None:
    code, _, error = run("serve", "--detach")
    assert code == 2
    assert "--address" in error
