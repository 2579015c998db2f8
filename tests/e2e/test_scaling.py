"""Engines come and go on real Ray: by hand, by what the cluster has room for, and by the load. No request is lost."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from support.endless_load import EndlessLoad
from support.engine_requests import each_engine_has, serving
from support.reference import Answer, sure_answers
from support.small_engine import SMALL
from support.waiting import PATIENCE_S, eventually

from headwise import Client, SamplingParams
from headwise.actors.cluster import Cluster
from headwise.actors.demand import ENGINE_CPUS, WORKER_CPUS
from headwise.actors.deployment import Deployment
from headwise.runtime.protocol.request import GenerationResult
from headwise.storage.backends.file import MIN_SEGMENTS

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.soak]  # in `two_engines` engines come and go by hand

CPUS = 1.0
"""Left for engines: room for three."""
CONFIG = replace(
    SMALL,
    min_replicas=0,
    engine_timeout_s=60.0,
    drain_timeout_s=PATIENCE_S,
    standby=False,
)
TOKENS = 16
STREAMS = sure_answers(TOKENS)[:3]
LONG_TOKENS = 60
LONG_STREAMS = sure_answers(LONG_TOKENS)[:6]
"""More than one engine decodes at once, for so long that another one is worth it on a fast machine, too."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A Ray cluster that was there before the deployments, and has other work, too."""
    cluster = Cluster.start()
    others = ray.util.placement_group([{"CPU": ray.cluster_resources()["CPU"] - CPUS}])
    assert others.wait(PATIENCE_S)
    yield
    cluster.disconnect()


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"file://{tmp_path_factory.mktemp('storage')}?capacity=256MiB"


@pytest.fixture(scope="module")
def deployment(cluster: None, storage: str) -> Iterator[Deployment]:
    config = replace(CONFIG, storage=storage, max_num_seqs=4, elastic_roles=True, upscale_delay_s=2.0)
    with Deployment.start(config, address="auto") as deployment:
        yield deployment


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[Client]:
    with Client(deployment.client_address) as client:
        yield client


def fleet(client: Client) -> dict[str, str]:
    replicas: dict[str, str] = client.stats()["fleet"]["replicas"]
    return replicas


def decided(client: Client) -> str:
    reason: str = client.stats()["fleet"]["reason"]
    return reason


def roles(client: Client) -> list[str]:
    return [engine["role"] for engine in client.stats()["engines"].values()]


def generate(client: Client, answer: Answer) -> GenerationResult:
    return client.stream(answer.prompt_ids, GREEDY).read()


# ---- by hand ----


def test_one_engine_becomes_two_and_one_again_under_load_and_every_request_gets_its_tokens(
    deployment: Deployment, client: Client
) -> None:
    """The one has a host cache, though nothing said that there would be others: so they fetch from it, too."""
    assert deployment.config.host_cache == CONFIG.kv_cache
    load = EndlessLoad(client, STREAMS, TOKENS)
    assert client.scale(2) == "1 -> 2: set by hand"
    assert client.scale(2) == "2: set by hand"
    eventually(lambda: len(serving(client)) == 2, otherwise=client.stats)
    eventually(lambda: each_engine_has(client, "finished"))
    assert all(engine["host"]["total_blocks"] for engine in client.stats()["engines"].values())
    before = deployment.actor_pids()
    assert client.scale(1) == "2 -> 1: set by hand"
    eventually(lambda: len(fleet(client)) == 1, otherwise=client.stats)
    assert load.end() > 0
    (left,) = serving(client)
    (gone,) = (before[name] for name in before if name.startswith("engine-") and name != left)
    eventually(lambda: not Path(f"/proc/{gone}").exists())
    eventually(lambda: list(client.stats()["engines"]) == [left])
    assert client.stats()["faults"] == []
    assert client.stats()["scheduler"]["refused"] == 0
    eventually(lambda: ray.available_resources()["CPU"] == pytest.approx(CPUS - ENGINE_CPUS - WORKER_CPUS))


def test_engines_change_their_roles_as_the_load_asks_for_it_and_no_request_is_lost(client: Client) -> None:
    load = EndlessLoad(client, LONG_STREAMS, LONG_TOKENS)
    client.scale(3, split=(2, 1))
    changed = "2 for prompts, 1 to decode -> 1 for prompts, 2 to decode"
    eventually(lambda: changed in decided(client), otherwise=lambda: decided(client))
    eventually(lambda: sorted(roles(client)) == ["decode", "decode", "prefill"], otherwise=client.stats)
    load.goes_on()
    client.scale(3, split=(0, 0))
    client.scale(1)
    eventually(lambda: len(fleet(client)) == 1, otherwise=client.stats)
    assert load.end() > 0


def test_what_only_the_engine_that_goes_has_cached_is_in_storage_when_it_has_gone_and_the_index_knows(
    deployment: Deployment, client: Client
) -> None:
    client.scale(1)
    eventually(lambda: len(serving(client)) == 1)
    prompt = [1000 + 7 * number for number in range(160)]
    never_again = [2000 + 7 * number for number in range(160)]
    client.stream(never_again, max_tokens=2).read()
    first = client.stream(prompt, max_tokens=2, temperature=0.0).read()
    client.scale(0)
    eventually(lambda: not fleet(client), otherwise=client.stats)
    client.scale(1)
    second = client.stream(prompt, max_tokens=2, temperature=0.0).read()
    assert second.token_ids == first.token_ids
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens >= 144

    def stored() -> list[int]:
        return [tiers["storage"] for tiers in client.find_prefix(never_again)["engines"].values()]

    eventually(lambda: any(stored()), otherwise=stored)
    client.reset_cache("storage")
    eventually(lambda: stored() == [0], otherwise=stored)


def test_an_engine_that_is_killed_while_it_is_drained_loses_no_request_and_does_not_come_back(
    deployment: Deployment, client: Client
) -> None:
    client.scale(2)
    eventually(lambda: len(serving(client)) == 2)
    load = EndlessLoad(client, STREAMS, TOKENS)
    eventually(lambda: each_engine_has(client, "running"))
    client.scale(1)
    eventually(lambda: "draining" in fleet(client).values())
    (name,) = (name for name, state in fleet(client).items() if state == "draining")
    os.kill(deployment.actor_pids()[name], signal.SIGKILL)
    eventually(lambda: name not in fleet(client), otherwise=client.stats)
    assert load.end() > 0
    assert len(serving(client)) == 1


def test_a_roll_puts_another_engine_in_the_place_of_the_only_one_under_load(
    deployment: Deployment, client: Client
) -> None:
    eventually(lambda: len(serving(client)) == 1, otherwise=client.stats)
    (before,) = serving(client)
    pid = deployment.actor_pids()[before]
    load = EndlessLoad(client, STREAMS, TOKENS)
    client.roll()
    eventually(lambda: len(fleet(client)) == 1 and serving(client) not in ([], [before]), otherwise=client.stats)
    assert load.end() > 0
    assert not Path(f"/proc/{pid}").exists()


def test_a_roll_without_storage_loses_no_hit_where_there_is_room_for_one_more_engine(
    deployment: Deployment, client: Client
) -> None:
    """The engine that takes the place of the only one serves first, and then takes what that one has cached."""
    client.scale(1)
    eventually(lambda: len(fleet(client)) == 1, otherwise=client.stats)
    prompts = [[1000 + 100 * prompt + 7 * number for number in range(160)] for prompt in range(8)]
    config = replace(CONFIG, name="second", host_cache="96MiB", min_replicas=1)
    with Deployment.start(config, address="auto") as second, Client(second.client_address) as its:

        def hits() -> list[int]:
            """Cached tokens of each prompt."""
            results = [its.stream(prompt, max_tokens=2, temperature=0.0).read() for prompt in prompts]
            return [result.usage.cached_tokens for result in results if result.usage is not None]

        assert hits() == [0] * len(prompts)
        before = hits()
        (engine,) = serving(its)
        load = EndlessLoad(its, STREAMS, TOKENS)
        its.roll()
        eventually(lambda: len(fleet(its)) == 1 and serving(its) not in ([], [engine]), otherwise=its.stats)
        assert load.end() > 0
        after = hits()
        assert sum(after) >= 0.95 * sum(before), (before, after)
        assert min(before) >= 144


def test_a_number_set_by_hand_outlives_the_scheduler_and_the_store_and_no_request_is_lost_up_or_down(
    deployment: Deployment, client: Client
) -> None:
    def kill_front() -> None:
        pids = deployment.actor_pids()
        for role in ("scheduler", "store"):
            os.kill(pids[role], signal.SIGKILL)

    eventually(lambda: len(serving(client)) == 1, otherwise=client.stats)
    load = EndlessLoad(client, STREAMS, TOKENS)
    client.scale(2)
    kill_front()
    eventually(lambda: len(serving(client)) == 2, otherwise=client.stats)
    assert client.stats()["fleet"]["number"] == 2
    load.goes_on()
    assert client.scale(1) == "2 -> 1: set by hand"
    eventually(lambda: "draining" in fleet(client).values() or len(fleet(client)) == 1)
    eventually(lambda: deployment.actor_pids().keys() >= {"scheduler", "store"})
    kill_front()
    eventually(lambda: len(fleet(client)) == 1, otherwise=client.stats)
    load.goes_on()
    assert load.end() > 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, with room for some ten blocks."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)], check=False).returncode:
        pytest.skip("this machine allows no mounts")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_disk_that_is_full_while_an_engine_goes_keeps_it_from_nothing(
    deployment: Deployment, client: Client, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What does not fit is lost with it; requests are not, and it ends by itself."""
    caplog.set_level(logging.INFO, logger="headwise")
    client.scale(1)
    eventually(lambda: len(fleet(client)) == 1, otherwise=client.stats)
    config = replace(
        CONFIG,
        name="second",
        replicas=2,
        min_replicas=1,
        host_cache="64MiB",
        write_policy="write_back",
        storage=f"file://{small_disk}?capacity={MIN_SEGMENTS * 4}MiB",
    )
    prompts: list[list[int]] = []
    with Deployment.start(config, address="auto") as second, Client(second.client_address) as its:

        def say(prompt: list[int]) -> list[int]:
            return its.stream(prompt, max_tokens=2, temperature=0.0).read().token_ids

        def holders() -> set[str]:
            """Engines that have a whole prompt: alone more than the disk has room for."""
            found = [its.find_prefix(prompt)["engines"] for prompt in prompts]
            return {name for engines in found for name, tiers in engines.items() if tiers["device"] >= 192}

        def each_engine_has_one() -> bool:
            """After another prompt: the router decides which engine gets it."""
            prompts.append([1000 + 100 * len(prompts) + 7 * number for number in range(200)])
            expected.append(say(prompts[-1]))
            return len(holders()) == 2

        expected: list[list[int]] = []
        eventually(lambda: len(serving(its)) == 2, otherwise=its.stats)
        eventually(each_engine_has_one, otherwise=its.stats)
        blocks = its.stats()["engines"]["engine-0"]["host"]["total_blocks"]
        assert (192 // CONFIG.block_size) * (64 << 20) / blocks > shutil.disk_usage(small_disk).total
        load = EndlessLoad(its, STREAMS, TOKENS)
        its.scale(1)
        eventually(lambda: len(fleet(its)) == 1, otherwise=its.stats)
        assert load.end() > 0
        assert [say(prompt) for prompt in prompts] == expected
        assert shutil.disk_usage(small_disk).free < 4 << 20, "more than one segment gave way, or nothing was written"
    left = [message for message in caplog.messages if "has left" in message]
    assert any("it has stopped" in message for message in left)
    assert not any("did not end in time" in message for message in left)


# ---- by what there is room for ----


def test_a_deployment_serves_with_the_engines_that_have_room_and_the_others_join_when_there_is_some(
    deployment: Deployment, client: Client
) -> None:
    client.scale(1)
    eventually(lambda: len(fleet(client)) == 1)
    others = ray.util.placement_group([{"CPU": ENGINE_CPUS + WORKER_CPUS}])
    assert others.wait(PATIENCE_S)
    config = replace(CONFIG, name="second", replicas=2)
    with Deployment.start(config, address="auto") as second, Client(second.client_address) as its:
        assert generate(its, STREAMS[0]).token_ids == STREAMS[0].output_ids
        eventually(lambda: sorted(fleet(its)) == ["engine-0", "engine-1"])
        eventually(lambda: len(serving(its)) == 1, otherwise=its.stats)  # its owner tells once a second
        (waiting,) = (state for state in fleet(its).values() if not state.startswith("serves"))
        assert waiting == "waits for a node with 0.3 CPUs"
        assert its.reset_cache("device")  # of the engines that there are
        ray.util.remove_placement_group(others)
        eventually(lambda: len(serving(its)) == 2, otherwise=its.stats)


# ---- by the load ----


def test_the_first_request_of_a_deployment_without_engines_waits_for_one_which_goes_again(
    deployment: Deployment, client: Client
) -> None:
    config = replace(
        CONFIG,
        name="second",
        replicas=0,
        max_replicas=2,
        target_ttft_s=60.0,
        upscale_delay_s=0.0,
        downscale_delay_s=1.0,
    )
    with Deployment.start(config, address="auto") as second, Client(second.client_address) as its:
        assert not its.stats()["engines"]
        assert generate(its, STREAMS[0]).token_ids == STREAMS[0].output_ids
        eventually(lambda: not fleet(its) and not its.stats()["engines"], otherwise=its.stats)
        assert its.stats()["fleet"]["number"] == 0
