"""A whole deployment on Ray: from start to what happens when a worker is killed under a stream."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from support.reference import assert_same, sure_answers
from support.small_engine import SMALL
from support.waiting import PATIENCE_S, eventually

from headwise import Client, EngineConfig, SamplingParams
from headwise.actors import frontend, node_files
from headwise.actors.cluster import Cluster
from headwise.actors.demand import ENGINE_CPUS, WORKER_CPUS
from headwise.actors.deployment import Deployment
from headwise.actors.placement import this_node
from headwise.errors import (
    ConfigError,
    DeploymentError,
    HeadwiseError,
    InvalidRequestError,
    ModelError,
)
from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.simd import INSTRUCTIONS
from headwise.log_lines import LatestLines
from headwise.runtime.loader.directory_copies import CutOffError
from headwise.runtime.protocol.request import FinishReason

pytestmark = [pytest.mark.ray, pytest.mark.model]

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
TOKENS = 24
"""Of a stream to which something happens in its middle."""
FAMILIES = "All happy families are alike; every unhappy family is unhappy in its own way. " * 4
CONFIG = replace(
    SMALL,
    tp_size=3,
    prefetch="wait_complete",
    storage_timeout_s=120.0,
    engine_timeout_s=120.0,  # nothing here hangs, but for a machine that is busy with something else
    front_timeout_s=120.0,
    standby=False,  # test_failover has one
)


@pytest.fixture(scope="module", autouse=True)
def authentication(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ray's token authentication, on purpose and with a token of our own."""
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text("0123456789abcdef" * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        yield


@pytest.fixture(scope="module")
def lines() -> Iterator[LatestLines]:
    """What this process logs from before the deployment's start on."""
    logger, lines = logging.getLogger("headwise"), LatestLines()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    yield lines
    logger.removeHandler(lines)
    logger.setLevel(level)


@pytest.fixture(scope="module")
def deployment(
    authentication: None, lines: LatestLines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """With all tiers, so that copies are under way whatever a test does."""
    storage = f"file://{tmp_path_factory.mktemp('storage')}?capacity=256MiB"
    config = replace(CONFIG, host_cache="32MiB", write_policy="write_through", storage=storage)
    with Deployment.start(config) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[Client]:
    with Client(deployment.client_address) as client:
        yield client


def engine(client: Client) -> dict[str, Any]:
    stats: dict[str, Any] = client.stats()["engines"]["engine-0"]
    return stats


def test_who_starts_it_is_told_what_its_workers_chose_and_ray_keeps_their_lines(
    deployment: Deployment, lines: LatestLines
) -> None:
    told = next(text for _, text in lines.since(0)[1] if text.startswith("engine-0: rank 0: "))
    assert f"device=cpu ({CONFIG.cpu_threads} threads, {INSTRUCTIONS}) tensors=numba gemm=headwise" in told
    assert "dtype=float32 weights_dtype=gguf kv_dtype=float32" in told
    context = ray.get_runtime_context()
    logs = Path(context.get_temp_dir()) / context.get_session_name() / "logs"
    kept = [path for path in logs.glob("worker-*.err") if told.removeprefix("engine-0: ") in path.read_text()]
    assert len(kept) == 2, "the worker's and the engine's"


def test_generates_streams_and_chats(client: Client) -> None:
    result = client.generate("The capital of France is", GREEDY)
    assert result.text.startswith(" Paris")
    assert result.usage.completion_tokens == 8
    assert result.finish_reason is FinishReason.LENGTH
    streamed = list(client.stream("The capital of France is", GREEDY))
    assert "".join(delta.text for delta in streamed) == result.text
    assert len(streamed) > 1
    assert client.chat([{"role": "user", "content": "Say hello."}], GREEDY).text


def test_tokens_are_the_reference_s_whole_and_from_the_cache(client: Client) -> None:
    wanted = sure_answers(8)
    for _ in range(2):
        results = client.generate([answer.prompt_ids for answer in wanted], GREEDY, ignore_eos=True)
        for answer, result in zip(wanted, results, strict=True):
            assert_same(answer, result.token_ids)


def test_several_prompts_and_two_clients_at_once_get_the_tokens_they_get_alone(
    deployment: Deployment, client: Client
) -> None:
    prompts = ["One, two, three,", "The sky is", "Water boils at"]
    alone = [client.generate(prompt, GREEDY).token_ids for prompt in prompts]
    together: list[list[int]] = []
    with Client(deployment.client_address) as other:
        thread = threading.Thread(target=lambda: together.extend(r.token_ids for r in other.generate(prompts, GREEDY)))
        thread.start()
        mine = [result.token_ids for result in client.generate(prompts, GREEDY)]
        thread.join(PATIENCE_S)
    assert mine == alone
    assert together == alone


def test_a_second_request_is_served_from_the_cache_and_the_store_knows(deployment: Deployment, client: Client) -> None:
    first, second = client.generate(FAMILIES, GREEDY), client.generate(FAMILIES, GREEDY)
    assert second.usage.cached_tokens >= 64
    assert second.token_ids == first.token_ids
    cached = engine(client)["cache"]["cached_blocks"]
    assert cached > 0

    def agreed() -> bool:
        node = deployment.store_stats()["nodes"]["engine-0"]
        return not node["behind"] and node["blocks"]["device"] > 0

    eventually(agreed)


def test_cancelling_a_stream_frees_its_blocks(client: Client) -> None:
    stream = client.stream("Once upon a time", max_tokens=400, ignore_eos=True)
    next(stream)
    eventually(lambda: engine(client)["cache"]["held_blocks"] > 0)
    stream.cancel()
    eventually(lambda: engine(client)["cache"]["held_blocks"] == 0)
    assert engine(client)["requests"]["running"] == 0


def test_a_deployment_sleeps_in_the_middle_of_a_stream_and_goes_on_where_it_was(
    deployment: Deployment, client: Client
) -> None:
    prompt, sampling = "Once upon a time", SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    expected = client.generate(prompt, sampling).token_ids
    workers = deployment.worker_pids()[0]
    stream = client.stream(prompt, sampling)
    next(stream)
    client.sleep()
    eventually(lambda: engine(client)["state"] == "asleep")
    assert engine(client)["requests"]["running"] == 0
    eventually(lambda: blocks_in_store(deployment) == 0)
    waiting = client.stream(prompt, sampling)
    client.sleep()
    client.wake()
    assert stream.read().token_ids == expected
    assert waiting.read().token_ids == expected
    assert deployment.worker_pids()[0] == workers
    assert engine(client)["requests"]["failed"] == 0


def test_a_reset_cache_is_known_to_the_store(deployment: Deployment, client: Client) -> None:
    client.generate("All happy families are alike; every unhappy family is unhappy in its own way.", GREEDY)
    eventually(lambda: blocks_in_store(deployment) > 0)
    assert client.reset_cache()["engine-0"] > 0
    eventually(lambda: blocks_in_store(deployment) == 0)
    assert client.reset_cache("device") == {"engine-0": 0}
    with pytest.raises(InvalidRequestError, match="'cellar'"):
        client.reset_cache("cellar")


def blocks_in_store(deployment: Deployment) -> int:
    return int(deployment.store_stats()["nodes"]["engine-0"]["blocks"]["device"])


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ("", {}, "empty"),
        ([], {}, "empty"),
        ("word " * 1000, {}, "512 tokens"),
        ([10**6], {}, "vocabulary"),
        ("hi", {"temperature": float("nan")}, "temperature"),
        ("hi", {"stop": "x" * 10_000_000}, "10000000 characters"),
        ("hi", {"top_q": 0.5}, "unknown sampling parameter top_q"),
        ("hi", {"max_tokens": 10_000}, "512 tokens"),
    ],
)
def test_bad_input_is_named_and_disturbs_nobody(client: Client, prompt: Any, options: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        client.generate(prompt, **options)


def test_bad_chats_are_named(client: Client) -> None:
    for messages in ([], [{"role": "user"}], [{"content": "hi"}], "hi"):
        with pytest.raises(HeadwiseError):
            client.chat(messages)
    assert client.generate("Still there?", GREEDY).token_ids


ONCE = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


def test_a_stream_whose_only_engine_loses_a_worker_goes_on_once_there_are_new_ones(
    deployment: Deployment, client: Client
) -> None:
    finished = engine(client)["requests"]["finished"]
    expected = client.generate(FAMILIES, ONCE).token_ids

    def is_stored() -> bool:
        stats = engine(client)  # they may be of a while ago
        is_copied = not stats["host"]["queued_blocks"] and not stats["storage"]["queued_puts"]
        return stats["requests"]["finished"] > finished and is_copied

    eventually(is_stored, otherwise=lambda: engine(client))
    ((_, rank_1, _),) = deployment.worker_pids()
    stream = client.stream(FAMILIES, ONCE)
    next(stream)
    os.kill(rank_1, signal.SIGKILL)
    assert stream.read().token_ids == expected
    assert stream.result.usage.cached_tokens >= 64  # from storage: the new workers' tiers are empty
    assert stream.result.usage.completion_tokens == TOKENS
    assert rank_1 not in deployment.worker_pids()[0]
    assert any("rank 1" in fault for _, fault in client.stats()["faults"])


@pytest.mark.soak
def test_a_stream_whose_engine_and_store_are_killed_goes_on_when_they_are_back_and_the_store_knows_what_it_knew(
    deployment: Deployment, client: Client
) -> None:
    expected = client.generate("Once upon a time", ONCE).token_ids
    pids = deployment.actor_pids()
    workers = deployment.worker_pids()[0]
    stream = client.stream("Once upon a time", ONCE)
    next(stream)
    for role in ("engine-0", "store"):
        os.kill(pids[role], signal.SIGKILL)
    assert stream.read().token_ids == expected
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    client.generate("All happy families are alike; every unhappy family is unhappy.", GREEDY)

    def known() -> bool:
        try:
            nodes = deployment.store_stats()["nodes"]
        except DeploymentError:  # while the store is being started again
            return False
        return "engine-0" in nodes and not nodes["engine-0"]["behind"] and nodes["engine-0"]["blocks"]["device"] > 0

    eventually(known)


@pytest.mark.soak
def test_an_idle_deployment_that_lost_a_worker_serves_the_next_request(deployment: Deployment, client: Client) -> None:
    eventually(lambda: deployment.worker_pids()[0])
    lost = deployment.worker_pids()[0][0]
    os.kill(lost, signal.SIGKILL)
    eventually(lambda: lost not in deployment.worker_pids()[0])
    assert client.generate("Still there?", GREEDY).token_ids


def test_a_second_deployment_of_the_name_is_refused_and_the_first_goes_on(client: Client) -> None:
    with pytest.raises(DeploymentError, match="'headwise' is already running"):
        Deployment.start(CONFIG, address="auto")
    assert client.generate("Still there?", GREEDY).token_ids


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"tp_size": 10}, ConfigError, "10"),
        ({"model": "/nowhere/model"}, ModelError, "/nowhere/model"),
        pytest.param({"host_cache": "10TiB"}, ConfigError, "does not fit", marks=pytest.mark.soak),  # as detached
    ],
)
def test_what_cannot_be_served_is_an_error_of_the_caller(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], error: Any, says: str
) -> None:
    config = EngineConfig(**{**CONFIG.to_dict(), "name": "second", **changes})
    with pytest.raises(error, match=says):
        Deployment.start(config, address="auto")


@pytest.fixture
def full_cluster(deployment: Deployment) -> Iterator[None]:
    """Nobody gets a CPU of the deployment's cluster any more."""
    engine = ENGINE_CPUS + CONFIG.tp_size * WORKER_CPUS  # the others' are about to be given back
    group = ray.util.placement_group([{"CPU": ray.cluster_resources()["CPU"] - engine}])
    assert group.wait(PATIENCE_S)
    yield
    ray.util.remove_placement_group(group)


@pytest.mark.usefixtures("full_cluster")
def test_a_deployment_none_of_whose_engines_gets_a_place_is_an_error_that_says_what_they_need() -> None:
    config = EngineConfig(**{**CONFIG.to_dict(), "name": "second", "replicas": 2, "start_timeout_s": 1.0})
    with pytest.raises(DeploymentError, match=r"no room for engine 0 of 2: it needs 0.7 CPUs on one node"):
        Deployment.start(config, address="auto")


def test_a_port_that_is_taken_is_named(deployment: Deployment) -> None:
    port = int(deployment.client_address.rpartition(":")[2])
    config = EngineConfig(**{**CONFIG.to_dict(), "name": "second", "port": port})
    with pytest.raises(DeploymentError, match=rf"{port}.*--port"):
        Deployment.start(config, address="auto")


@pytest.mark.soak
@pytest.mark.usefixtures("full_cluster")
def test_a_free_port_that_is_taken_before_it_is_bound_is_given_up_for_another(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(deployment.client_address.rpartition(":")[2])
    chosen = []

    def free_ports(*hosts: str) -> list[int]:
        chosen.append([port, 0] if not chosen else free(*hosts))
        return chosen[-1]

    free = frontend.free_ports
    monkeypatch.setattr(frontend, "free_ports", free_ports)
    config = EngineConfig(**{**CONFIG.to_dict(), "name": "second", "start_timeout_s": 1.0})
    with pytest.raises(DeploymentError, match="no room for engine"):  # that far it came
        Deployment.start(config, address="auto")
    assert len(chosen) >= 2  # more if another program was quick to take the second


def test_clients_find_a_deployment_by_its_ray_cluster(deployment: Deployment) -> None:
    with Client("ray:auto") as client:
        assert client.address == deployment.client_address
    with pytest.raises(DeploymentError, match="no deployment named 'other'"):
        Client("ray:auto/other")


@pytest.mark.soak
def test_a_stopped_deployment_s_address_is_unreachable_and_nothing_is_left_of_two_starts(tmp_path: Path) -> None:
    script = """
        import os, re, sys, threading
        from pathlib import Path
        sys.path.append(sys.argv[2])
        from support.waiting import eventually
        from headwise import Client, EngineConfig
        from headwise.errors import DeploymentError
        from headwise.actors.deployment import Deployment

        def segments():
            return {name for name in os.listdir("/dev/shm") if name.startswith("headwise")}

        environment = dict(os.environ)

        def left():
            both = {*os.environ, *environment}  # names alone are told: values may be secret
            return threading.active_count(), [name for name in both if os.environ.get(name) != environment.get(name)]

        def is_alive(pid):
            return os.path.exists(f"/proc/{pid}")

        def started_here():
            parents = {}
            for stat in Path("/proc").glob("[0-9]*/stat"):
                try:
                    parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
                except OSError:
                    pass
            found = {os.getpid()}
            while more := {pid for pid, parent in parents.items() if parent in found} - found:
                found |= more
            return found

        def listening_addresses():
            sockets = set()
            for pid in started_here():
                for file in Path(f"/proc/{pid}/fd").glob("*"):
                    try:
                        sockets |= set(re.findall(r"socket:\\[(\\d+)\\]", os.readlink(file)))
                    except OSError:
                        pass
            lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")][1:]
            return {each[1].rpartition(":")[0] for each in lines if each[3] == "0A" and each[9] in sockets}

        config = EngineConfig(port=0, max_model_len=128, kv_cache="32MiB", cache_dir=sys.argv[1])
        before = left()
        shared = segments()
        files = []
        for _ in range(2):
            with Deployment.start(config) as deployment, Client(deployment.client_address) as client:
                assert client.generate("Hello", max_tokens=2).token_ids
                pids = deployment.worker_pids()[0]
                addresses = listening_addresses()
                assert addresses <= {"0100007F", "0000000000000000FFFF00000100007F"}, addresses  # 127.0.0.1
                assert len(addresses) == 2  # ours, and Ray's
            eventually(lambda: left() == before, otherwise=left)
            eventually(lambda: not any(map(is_alive, pids)), otherwise=lambda: pids)
            new = segments() - shared  # those of other deployments of this machine go, too
            eventually(lambda: not new & segments(), otherwise=lambda: new & segments())
            files.append(len(os.listdir("/proc/self/fd")))
        assert files[1] - files[0] <= 3, files  # Ray itself keeps two sockets a connection; a ZeroMQ context is more
        try:
            Client(deployment.client_address)
        except DeploymentError as error:
            assert "headwise serve" in str(error)
        else:
            raise AssertionError("a stopped deployment answers")
        assert not (Path.home() / ".ray").exists()
        print("clean")
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["NUMBA_CACHE_DIR"] = str(machine_code.directory().parent)  # not anew for another home: it takes long
    environment["HOME"] = str(tmp_path)  # no token there: by itself Ray makes one at the first start
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(CONFIG.cache_path), str(Path(__file__).parent.parent)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.stdout.strip() == "clean", done.stderr


def test_a_directory_of_a_node_is_read_by_way_of_ray(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another one would get of this one's, piece by piece."""
    monkeypatch.setattr(node_files, "PIECE_BYTES", 1000)
    large = os.urandom(9 * 1000 + 1)
    (tmp_path / "sub").mkdir()
    files = {"model.safetensors": large, "sub/config.json": b"{}", "empty": b""}
    for name, data in {**files, ".headwise-digests.json": b"of these files"}.items():
        (tmp_path / name).write_bytes(data)
    here = [this_node()]
    assert node_files.find_directory(tmp_path / "nowhere", here) is None
    assert node_files.find_directory(tmp_path) is None, "no other node has it"
    found = node_files.find_directory(tmp_path, ["e" * 56, *here])  # and one that is no more
    assert found is not None
    assert dict(found.sizes) == {name: len(data) for name, data in files.items()}
    read = dict.fromkeys(files, b"")
    for name, piece in found.pieces():
        assert len(piece) <= 1000
        read[name] += piece
    assert read == files
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CutOffError, match=r"model\.safetensors of .* at node .* cannot be read: .*FileNotFoundError"):
        list(found.pieces())


def test_a_port_that_is_taken_is_told_before_ray_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "start", lambda: pytest.fail("Ray was started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DeploymentError, match=rf"127.0.0.1:{port}.*--port"):
            Deployment.start(replace(CONFIG, port=port))


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:9", *(pytest.param(name, marks=pytest.mark.soak) for name in ("nowhere", "ray://127.0.0.1:10001"))],
)
def test_a_ray_cluster_that_is_not_there_is_an_error_of_the_address(address: str) -> None:
    script = """
        import sys
        from headwise import EngineConfig
        from headwise.errors import DeploymentError
        from headwise.actors.deployment import Deployment
        try:
            Deployment.start(EngineConfig(), address=sys.argv[1])
        except DeploymentError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert address in done.stdout, done.stderr
