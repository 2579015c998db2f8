"""Files of requests against a real HTTP server of a deployment of this process, which also refuses, goes and comes."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.engine.scripted import ScriptedCore
from support.engine.scripted_deployment import Deployment
from support.free_ports import free_ports
from support.scripted_http import serving
from support.waiting import eventually

from headwise.errors import ConfigError, DeploymentError
from headwise.runtime.batch import run as running
from headwise.runtime.batch.answers import AnswerFile
from headwise.runtime.batch.requests import URLS, RequestFile
from headwise.runtime.batch.run import BatchOptions, BatchRun, Summary, tokens_of
from headwise.runtime.batch.server import Server
from headwise.runtime.http.guard import ApiKeys
from headwise.runtime.loader.progress import SilentProgress
from headwise.runtime.protocol.request import GenerateRequest
from headwise.runtime.protocol.users import Users

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/messages": {"model": "scripted", **CHAT},
}


class Batch:
    """A file of requests, and its answers."""

    def __init__(self, directory: Path, requests: dict[str, tuple[str, dict[str, Any]]]) -> None:
        self.requests, self.answers = directory / "requests.jsonl", directory / "answers.jsonl"
        lines = [
            {"custom_id": name, "method": "POST", "url": url, "body": body} for name, (url, body) in requests.items()
        ]
        self.requests.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(self, url: str, key: str = "", resume: bool = False, timeout_s: float = 60.0, **options: Any) -> Summary:
        async def answered(requests: RequestFile, answers: AnswerFile) -> Summary:
            async with Server(url, key, timeout_s) as server:
                index = requests.index(answers.answered)
                return await BatchRun(requests, index, answers, server, BatchOptions(**options), SilentProgress()).run()

        with (
            closing(RequestFile(self.requests)) as requests,
            closing(AnswerFile(self.answers, resume=resume)) as answers,
        ):
            return asyncio.run(answered(requests, answers))

    @property
    def told(self) -> dict[str, Any]:
        """By name, the status and what it says."""
        lines = map(json.loads, self.answers.read_text().splitlines())
        return {line["custom_id"]: (line["response"]["status_code"], line["response"]["body"]) for line in lines}


def batch_of(directory: Path, count: int, length: int = 3) -> Batch:
    body = {"prompt": "hello", "max_tokens": length}
    return Batch(directory, {f"{number}": ("/v1/completions", body) for number in range(count)})


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is asked again after a twentieth of what it says."""
    monkeypatch.setattr(running, "random", SimpleNamespace(uniform=lambda least, most: least / 20))


class CountingCore(ScriptedCore):
    """most: requests that it had at a time; priorities: of those that came"""

    def __init__(self) -> None:
        super().__init__()
        self.pace_s = 0.005
        self.most = 0
        self.priorities: list[int] = []

    def add(self, request: GenerateRequest, **given: Any) -> None:
        super().add(request, **given)
        self.most = max(self.most, len(self.live))
        self.priorities.append(request.priority)


@contextmanager
def deployed(core: ScriptedCore) -> Iterator[Deployment]:
    deployment = Deployment()
    try:
        deployment.add_engine(core)
        yield deployment
    finally:
        deployment.close()


def test_requests_of_all_kinds_are_answered_and_counted(tmp_path: Path) -> None:
    batch = Batch(tmp_path, {url: (url, BODIES[url]) for url in URLS})
    with deployed(ScriptedCore()) as deployment, serving(deployment) as served:
        summary = batch.run(served.base_url)

    assert summary == Summary(answered=4, prompt_tokens=20, completion_tokens=12)
    assert batch.told["/v1/chat/completions"][1]["choices"][0]["message"]["content"] == "0 1 2 "
    assert batch.told["/v1/messages"][1]["content"][0]["text"] == "0 1 2 "


def test_what_is_refused_is_an_answer_and_is_asked_again_when_the_batch_goes_on(tmp_path: Path) -> None:
    good, bad = BODIES["/v1/completions"], {"prompt": "hello", "max_tokens": -1}
    batch = Batch(tmp_path, {"good": ("/v1/completions", good), "bad": ("/v1/completions", bad)})
    with deployed(ScriptedCore()) as deployment, serving(deployment) as served:
        assert batch.run(served.base_url) == Summary(1, 1, 5, 0, 3)
        status, body = batch.told["bad"]
        assert (status, "max_tokens" in body["error"]["message"]) == (400, True)

        assert batch.run(served.base_url, resume=True) == Summary(refused=1)
    assert sorted(batch.told) == ["bad", "good"]


def test_no_more_are_asked_at_a_time_than_were_said_for_each_engine(tmp_path: Path) -> None:
    batch, core = batch_of(tmp_path, 20), CountingCore()
    with deployed(core) as deployment, serving(deployment) as served:
        core.gate.clear()
        asking = threading.Thread(target=batch.run, args=(served.base_url,), kwargs={"concurrency": 3})
        asking.start()
        eventually(lambda: len(core.live) == 3)
        core.gate.set()
        asking.join(60)
    assert len(batch.told) == 20
    assert core.most == 3


def test_requests_come_behind_others_unless_they_say_otherwise(tmp_path: Path) -> None:
    body = {"prompt": "hello", "max_tokens": 1}
    bodies = {"silent": body, "urgent": {**body, "priority": -2}}
    batch = Batch(tmp_path, {name: ("/v1/completions", each) for name, each in bodies.items()})
    core = CountingCore()
    with deployed(core) as deployment, serving(deployment) as served:
        batch.run(served.base_url)
        assert sorted(core.priorities) == [-2, 1]
        core.priorities.clear()
        (tmp_path / "answers.jsonl").unlink()
        batch.run(served.base_url, priority=7)
    assert sorted(core.priorities) == [-2, 7]


def test_engines_that_come_later_are_given_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "LOOK_S", 0.05)
    batch, first, second = batch_of(tmp_path, 8), ScriptedCore(), ScriptedCore()
    first.gate.clear()
    second.gate.clear()
    with deployed(first) as deployment, serving(deployment) as served:
        asking = threading.Thread(target=batch.run, args=(served.base_url,), kwargs={"concurrency": 2})
        asking.start()
        eventually(lambda: len(first.live) == 2)
        deployment.add_engine(second)
        eventually(lambda: len(first.live) + len(second.live) == 4)
        first.gate.set()
        second.gate.set()
        asking.join(60)
    assert len(batch.told) == 8


@pytest.mark.usefixtures("soon")
def test_a_server_that_is_overloaded_is_asked_again(tmp_path: Path) -> None:
    batch, core = batch_of(tmp_path, 6), ScriptedCore(max_requests=1)
    with deployed(core) as deployment, serving(deployment) as served:
        summary = batch.run(served.base_url, concurrency=2, patience_s=0.0)

    assert (summary.answered, summary.refused) == (6, 0)


def test_a_server_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, 3)
    with deployed(ScriptedCore()) as deployment:
        with serving(deployment) as served:
            port = served.port
        results = list[Summary]()
        asking = threading.Thread(target=lambda: results.append(batch.run(f"http://127.0.0.1:{port}")))
        asking.start()
        with serving(deployment, port=port):
            asking.join(60)
    assert results[0].answered == 3


def test_a_server_that_is_gone_is_given_up_and_the_batch_goes_on_later(tmp_path: Path) -> None:
    batch, (port,) = batch_of(tmp_path, 3), free_ports(1)
    with pytest.raises(DeploymentError, match=r"nothing was answered for 0 s: .*; --resume goes on later"):
        batch.run(f"http://127.0.0.1:{port}", patience_s=0.0)
    assert not batch.answers.exists()


@pytest.mark.usefixtures("soon")
def test_a_request_that_is_lost_again_and_again_is_answered_by_that(tmp_path: Path) -> None:
    """It may be what ends the server; others are answered."""
    batch = batch_of(tmp_path, 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        losing = threading.Thread(target=lose, args=(listener,), daemon=True)
        losing.start()
        summary = batch.run(f"http://127.0.0.1:{listener.getsockname()[1]}", patience_s=0.0)

    assert (summary.answered, summary.refused) == (0, 1)
    status, body = batch.told["0"]
    assert status == 504
    assert "no answer came" in body["error"]["message"]


def lose(listener: socket.socket) -> None:
    """Read a request of each connection, and end it."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.recv(1 << 16)


@pytest.mark.usefixtures("soon")
def test_an_answer_that_takes_too_long_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    batch, core = batch_of(tmp_path, 1), ScriptedCore()
    core.gate.clear()
    with deployed(core) as deployment, serving(deployment) as served:
        summary = batch.run(served.base_url, timeout_s=0.3)
        eventually(lambda: not core.live)  # nobody waits for it any more

    assert summary.refused == 1
    assert batch.told["0"][0] == 504


def test_keys_are_wanted_where_there_are_some(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, 2)
    with (
        deployed(ScriptedCore()) as deployment,
        serving(deployment, keys=ApiKeys(Users({"a-good-key": None}))) as served,
    ):
        with pytest.raises(ConfigError, match="refuses: "):
            asyncio.run(checked(served.base_url, "a-bad-key"))
        asyncio.run(checked(served.base_url, "a-good-key"))
        assert batch.run(served.base_url, key="a-good-key").answered == 2


async def checked(url: str, key: str) -> None:
    async with Server(url, key) as server:
        await server.check()


def command(batch: Batch, url: str, *flags: str) -> subprocess.Popen[str]:
    """`headwise batch` of it."""
    arguments = ["batch", str(batch.requests), "-o", str(batch.answers), "--url", url, *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "headwise", *arguments], text=True, **pipes)


def test_a_command_that_is_stopped_leaves_what_it_has_and_goes_on(tmp_path: Path) -> None:
    batch, core = batch_of(tmp_path, 5), ScriptedCore()
    core.shuts_after = 6
    with deployed(core) as deployment, serving(deployment) as served:
        with command(batch, served.base_url, "--concurrency", "1") as stopped:
            eventually(lambda: batch.answers.exists() and len(batch.told) == 2)
            stopped.send_signal(signal.SIGTERM)
            _, log = stopped.communicate(timeout=60)
        assert stopped.returncode == 128 + signal.SIGTERM
        assert "--resume goes on with" in log
        eventually(lambda: not core.live)
        core.gate.set()

        with command(batch, served.base_url) as refused:
            assert "is there: go on with it by --resume" in refused.communicate(timeout=60)[1]
        with command(batch, served.base_url, "--resume") as resumed:
            said, log = resumed.communicate(timeout=60)
        assert said.startswith("3 answered, 0 refused, in "), log
        with command(batch, served.base_url, "--resume") as nothing:
            assert nothing.communicate(timeout=60)[0].endswith("has answers to all requests\n")
    assert (refused.returncode, resumed.returncode, nothing.returncode) == (1, 0, 0)
    assert len(batch.told) == 5


def test_a_command_some_of_whose_requests_are_refused_says_so(tmp_path: Path) -> None:
    batch = Batch(tmp_path, {"bad": ("/v1/completions", {"prompt": 7})})
    with (
        deployed(ScriptedCore()) as deployment,
        serving(deployment) as served,
        command(batch, served.base_url) as asked,
    ):
        said, _ = asked.communicate(timeout=60)
    assert (asked.returncode, said.partition(" in ")[0]) == (2, "0 answered, 1 refused,")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host/v1", ""])
def test_what_is_no_url_of_a_server_is_told(url: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        Server(url)


@pytest.mark.parametrize(
    "body", [None, "text", [], {}, {"usage": None}, {"usage": {}}, {"usage": {"prompt_tokens": 3}}]
)
def test_an_answer_without_usage_counts_none(body: object) -> None:
    assert tokens_of(body) in ((0, 0, 0), (3, 0, 0))
