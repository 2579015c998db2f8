"""The commands as users run them, each in a process of its own: the demo, and a deployment as a Ray job."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from ray.job_submission import JobSubmissionClient
from ray.util.state import list_actors
from support.free_ports import free_ports
from support.waiting import PATIENCE_S, eventually

from headwise import Client, SamplingParams
from headwise.errors import HeadwiseError
from headwise.runtime.config.engine_config import EngineConfig

pytestmark = [pytest.mark.ray, pytest.mark.model]

CACHE = EngineConfig().cache_path
SOURCE = Path(__file__).parents[2] / "headwise"
TOKEN_OFF = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


def environment(**changes: str) -> dict[str, str]:
    """This process's variables without those of Ray, which another test may have set."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**inherited, **TOKEN_OFF, **changes}


def marked(mark: str) -> list[int]:
    """Processes with the variable ``MARK=mark`` in the environment they were started with."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # it ended meanwhile
                continue
            if f"MARK={mark}".encode() in variables:
                found.append(int(entry.name))
    return found


def killed(mark: str) -> list[int]:
    """Kill the processes of this mark; those that there were."""
    found = marked(mark)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def is_open(port: int, host: str = "127.0.0.1") -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


def test_the_demo_answers_serves_its_second_question_from_the_cache_and_leaves_no_process(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    for part in ("models", "downloads", "packed"):
        (CACHE / part).mkdir(parents=True, exist_ok=True)
        (cache / part).symlink_to(CACHE / part)
    done = subprocess.run(
        [sys.executable, "-m", "headwise", "demo", "--cache-dir", str(cache), "--kv-cache", "64MiB"],
        # No Ray listens there: the demo is not a job, and starts its own.
        env=environment(MARK=str(tmp_path), RAY_ADDRESS="127.0.0.1:9"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    _, first, second = done.stdout.split("\n> ")
    assert "Tuesday" in first
    assert len(second.splitlines()[1]) > 10, done.stdout
    prompt = [int(number) for number in re.findall(r"\d+", re.search(r"prompt tokens.*", second)[0])]
    cached = [int(number) for number in re.findall(r"\d+", re.search(r"served from the cache.*", second)[0])]
    assert len(prompt) == len(cached) == 2
    assert cached[0] == 0
    assert 0.9 * prompt[1] < cached[1] < prompt[1]
    eventually(lambda: not marked(str(tmp_path)), otherwise=lambda: marked(str(tmp_path)))


def test_a_file_of_requests_is_answered_by_a_deployment_of_its_own(tmp_path: Path) -> None:
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    asked = {
        name: {"messages": [{"role": "user", "content": f"Repeat: {name}"}], "max_tokens": 8, "temperature": 0}
        for name in ("one", "two", "three")
    }
    lines = [{"custom_id": name, "url": "/v1/chat/completions", "body": body} for name, body in asked.items()]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = subprocess.run(
        [sys.executable, "-m", "headwise", "batch", requests, "-o", answers, "--kv-cache", "64MiB"],
        env=environment(MARK=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 answered, 0 refused, in ")
    told = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, answers.read_text().splitlines())}
    assert told.keys() == asked.keys()
    assert all(body["choices"][0]["message"]["content"] for body in told.values())
    eventually(lambda: not marked(str(tmp_path)), otherwise=lambda: marked(str(tmp_path)))


@dataclass(frozen=True)
class Head:
    """A Ray cluster of one node."""

    address: str
    jobs: str
    environment: dict[str, str]

    def ray(self, *arguments: str) -> str:
        """What a ``ray`` command prints.

        Ray waits ten seconds for a node's agent to be known. On a busy machine that may not do: then the command
        is to be given again, says Ray.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            done = subprocess.run(
                [sys.executable, "-m", "ray.scripts.scripts", *arguments],
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=300,
            )
            if "No available agent" not in done.stdout + done.stderr or time.monotonic() > deadline:
                break
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@contextmanager
def ray_head(mark: str, node: str = "127.0.0.1") -> Iterator[Head]:
    """``ray start --head`` on ports and in a directory of its own; at the end all its processes are killed.

    Another program may take a port before Ray does: then others are tried.
    """
    for _ in range(3):
        # Ray's sockets lie in there, and their paths may have no more than 107 characters.
        with tempfile.TemporaryDirectory(prefix="hwr-", dir="/tmp", ignore_cleanup_errors=True) as directory:
            process, head, listening = start_head(directory, mark, node)
            try:
                if comes_up(listening):
                    yield head
                    return
            finally:
                # Told to end, Ray takes up to 20 s.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(PATIENCE_S)
                eventually(lambda: not killed(mark), otherwise=lambda: marked(mark))
    raise AssertionError("`ray start` did not come up, three times")


def start_head(directory: str, mark: str, node: str) -> tuple[subprocess.Popen[bytes], Head, list[tuple[int, str]]]:
    """Its process, the cluster, and ports and hosts at which it listens when it is up."""
    gcs, dashboard, clients, *agents = free_ports(6)
    variables = environment(MARK=mark)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=4"]
    command += [f"--port={gcs}", f"--dashboard-port={dashboard}", "--include-dashboard=true"]
    names = ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "metrics-export-port")
    command += [f"--{name}={port}" for name, port in zip(names, agents, strict=True)]
    command += [f"--node-ip-address={node}", "--disable-usage-stats", f"--temp-dir={directory}"]
    command += ["--object-store-memory=100000000", f"--ray-client-server-port={clients}"]
    process = subprocess.Popen(
        command, env=variables, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    head = Head(f"{node}:{gcs}", f"http://127.0.0.1:{dashboard}", variables)
    return process, head, [(gcs, node), (dashboard, "127.0.0.1"), (agents[0], node)]


def comes_up(listening: list[tuple[int, str]]) -> bool:
    """Whether something listens at all of these ports and hosts in time."""
    deadline = time.monotonic() + PATIENCE_S
    while not all(is_open(port, host) for port, host in listening):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.soak
@pytest.mark.parametrize("host", ["127.0.0.3", "127.0.0.1"])
def test_a_deployment_at_another_address_than_rays_own_serves(tmp_path: Path, host: str) -> None:
    (port,) = free_ports(1)
    with ray_head(str(tmp_path), node="127.0.0.2") as head:
        serve = [sys.executable, "-m", "headwise", "serve", "--host", host, "--port", str(port)]
        serve += ["--max-model-len", "256", "--kv-cache", "32MiB", "--cpu-threads", "1"]
        with (tmp_path / "log").open("w") as log:
            variables = {**head.environment, "RAY_ADDRESS": head.address}
            process = subprocess.Popen(serve, env=variables, stdout=log, stderr=subprocess.STDOUT)
            try:
                eventually(
                    lambda: f"serving smollm2-135m at tcp://{host}:{port}" in (tmp_path / "log").read_text(),
                    3 * PATIENCE_S,
                    lambda: (tmp_path / "log").read_text(),
                )
                with Client(f"{host}:{port}") as client:
                    result = client.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=4))
                assert result.text.startswith(" Paris")
            finally:
                process.terminate()
                process.wait(PATIENCE_S)


def alive(head: Head) -> list[str]:
    """Names of the cluster's actors that live."""
    return [str(actor.name) for actor in list_actors(address=head.jobs, filters=[("state", "=", "ALIVE")])]


def is_submitted(jobs: JobSubmissionClient, command: str, name: str) -> bool:
    """As `Head.ray` does: a busy machine's agent may not be known yet."""
    try:
        return jobs.submit_job(entrypoint=command, submission_id=name) == name
    except RuntimeError as error:
        if "No available agent" not in str(error):
            raise
        return False


def test_a_deployment_as_a_ray_job_serves_until_the_job_is_stopped(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    serve = f"{sys.executable} -m headwise serve --port {port} --max-model-len 256 --kv-cache 32MiB --cpu-threads 1"
    with ray_head(str(tmp_path)) as head:
        jobs = JobSubmissionClient(head.jobs)  # a `ray` command takes seconds of a core
        eventually(lambda: is_submitted(jobs, serve, "served"))
        eventually(
            lambda: f"serving smollm2-135m at tcp://127.0.0.1:{port}" in jobs.get_job_logs("served"),
            4 * PATIENCE_S,
            lambda: jobs.get_job_logs("served"),
        )
        with Client(f"127.0.0.1:{port}") as client:
            result = client.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=4))
        assert result.text.startswith(" Paris")
        assert "headwise/scheduler" in alive(head)
        assert jobs.stop_job("served")
        eventually(lambda: not is_open(port))
        eventually(lambda: not any(name.startswith("headwise/") for name in alive(head)))


@pytest.mark.soak
def test_a_detached_deployment_outlives_the_job_that_started_it_and_another_job_ends_it(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    headwise = [sys.executable, "-m", "headwise"]
    options = ["--max-model-len=256", "--kv-cache=32MiB", "--cpu-threads=1", f"--port={port}"]
    with ray_head(str(tmp_path)) as head:
        shutil.copytree(SOURCE, tmp_path / "source" / SOURCE.name, ignore=shutil.ignore_patterns("__pycache__"))
        submit = ("job", "submit", "--address", head.jobs, f"--working-dir={tmp_path / 'source'}")
        ends = head.ray(*submit, "--", *headwise, "serve", "--detach", *options)
        assert f"serving smollm2-135m at tcp://127.0.0.1:{port}" in ends
        with Client(f"127.0.0.1:{port}") as client:
            assert client.generate("The capital of France is", temperature=0.0, max_tokens=4).text.startswith(" Paris")
        assert "stopped headwise" in head.ray(*submit, "--", *headwise, "stop")
        assert "headwise/" not in head.ray("list", "actors", "--address", head.jobs, "--filter", "state=ALIVE")


@contextmanager
def serving(directory: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Client]]:
    """``headwise serve`` with a Ray of its own, and a client of it."""
    command = [sys.executable, "-m", "headwise", "serve", "--port=0", "--max-model-len=512", "--kv-cache=32MiB"]
    output = directory / "output"
    with output.open("w") as file:
        process = subprocess.Popen([*command, "--cpu-threads=1", *options], env=environment(), stdout=file)
        try:
            eventually(lambda: "serving" in output.read_text(), 3 * PATIENCE_S)
            with Client(output.read_text().split()[-1]) as client:
                yield process, client
        finally:
            process.kill()
            process.wait(PATIENCE_S)


LONG = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)


@pytest.mark.soak
def test_serve_that_is_told_to_end_lets_its_requests_end_and_takes_no_others(tmp_path: Path) -> None:
    with serving(tmp_path, f"--drain-timeout-s={PATIENCE_S}") as (process, client):
        stream = client.stream("Once upon a time", LONG)
        next(stream)
        process.send_signal(signal.SIGTERM)
        assert stream.read().usage.completion_tokens == LONG.max_tokens
        with pytest.raises(HeadwiseError):
            client.generate("Still there?", LONG)
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.soak
def test_serve_that_is_told_twice_ends_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain-timeout-s=100000", "--max-model-len=4096", "--kv-cache=256MiB") as (
        process,
        client,
    ):
        stream = client.stream("Once upon a time", max_tokens=4000, ignore_eos=True)
        next(stream)
        process.send_signal(signal.SIGTERM)
        eventually(lambda: client.stats()["fleet"]["replicas"]["engine-0"] == "draining", otherwise=client.stats)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(HeadwiseError):
            stream.read()
        assert process.wait(PATIENCE_S) == 0
