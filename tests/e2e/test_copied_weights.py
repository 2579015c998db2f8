"""Weights that only one node has: engines of others copy them, and delete them when they have the next ones."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
from support.lora import write_both
from support.nodes import NODE_MARKS, Node, Nodes
from support.small_engine import TINY
from support.tiny_checkpoints import checkpoint
from support.waiting import eventually

from headwise import Client, LocalEngine, SamplingParams
from headwise.actors.deployment import Deployment
from headwise.errors import ModelError
from headwise.runtime.loader.directory_copies import MARK

pytestmark = NODE_MARKS

PROMPT = [int(token) for token in np.random.default_rng(5).integers(3, 250, 60)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
CONFIG = replace(
    TINY,
    model=str(checkpoint("qwen3", 0)),
    port=0,
    host="0.0.0.0",
    standby=False,
    tokenizer_processes=1,
    engine_timeout_s=60.0,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The head's, where a training writes; it has no engine."""
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def both(nodes: Nodes, place: Path) -> list[Node]:
    return [nodes.add(own=place, engine=1) for _ in range(2)]


@pytest.fixture(scope="module")
def serving(nodes: Nodes, both: list[Node], place: Path) -> Iterator[Callable[..., Deployment]]:
    """A deployment whose nodes have nothing at this place."""
    running: list[Deployment] = []

    def start(**changes: object) -> Deployment:
        config = replace(CONFIG, weights_from=str(place), copy_weights=True, **changes)
        running.append(Deployment.start(config, address=nodes.address))
        return running[-1]

    yield start
    for deployment in running:
        deployment.stop()


def oracle(step: int, adapters: str = "") -> tuple[int, ...]:
    with LocalEngine(replace(CONFIG, model=str(checkpoint("qwen3", step)), adapters=adapters)) as engine:
        return tuple(engine.generate([PROMPT], GREEDY, adapter="sql" if adapters else "")[0].token_ids)


def said(client: Client, **options: str) -> set[tuple[int, ...]]:
    """By all engines, whichever are asked."""
    return {tuple(result.token_ids) for result in client.generate([PROMPT] * 6, GREEDY, **options)}


def names(node: Node, place: Path) -> list[str]:
    """What a node has there, but for hidden files: as its processes see it."""
    found = Path(f"/proc/{node.pids()[0]}/root{place}").iterdir()
    return sorted(path.name for path in found if not path.name.startswith("."))


def test_nodes_copy_what_they_lack_and_delete_it_when_they_have_the_next(
    both: list[Node], place: Path, tmp_path: Path, serving: Callable[..., Deployment]
) -> None:
    wanted = [oracle(step) for step in (0, 1, 2)]
    for step in (1, 2):
        shutil.copytree(checkpoint("qwen3", step), place / f"{step}")
    shutil.copytree(write_both(tmp_path / "adapter", "qwen3", 1)[0], place / "sql")
    deployment = serving(replicas=2, engine_resources="engine=1")
    with Client(deployment.client_address, keys=deployment.client_keys) as client:
        for step in (1, 2):
            client.update_weights(str(place / f"{step}"), version=f"{step}")
            assert said(client) == {wanted[step]}
            for node in both:
                eventually(lambda node=node, step=step: names(node, place) == [f"{step}", f"{step}{MARK}"])
        client.update_weights(add_adapters={"sql": str(place / "sql")})
        assert said(client, adapter="sql") == {oracle(2, f"sql={place / 'sql'}")}
        assert all(names(node, place) == ["2", f"2{MARK}", "sql", f"sql{MARK}"] for node in both)
        with pytest.raises(ModelError, match="is at no node: it must be at one"):
            client.update_weights(str(place / "nowhere"))
        os.kill(deployment.actor_pids()["engine-0"], signal.SIGKILL)
        eventually(lambda: client.stats()["engines"]["engine-0"]["restarts"] == 1, otherwise=client.stats)
        assert said(client) == {wanted[2]}
    deployment.stop()
    assert [names(node, place) for node in both] == [[], []]
    assert sorted(path.name for path in place.iterdir()) == ["1", "2", "sql"], "the training's own are its own"


def test_stages_on_several_nodes_have_them_before_requests_pause(
    both: list[Node], place: Path, serving: Callable[..., Deployment]
) -> None:
    shutil.copytree(checkpoint("qwen3", 3), place / "3")
    deployment = serving(pipeline_parallel_size=2, engine_cpus=1.6)
    assert len(deployment._roles["engine-0"].site.nodes) == 2
    with Client(deployment.client_address, keys=deployment.client_keys) as client:
        client.update_weights(str(place / "3"), version="3")
        assert said(client) == {oracle(3)}
        assert all(names(node, place) == ["3", f"3{MARK}"] for node in both)
        shutil.copytree(checkpoint("qwen3", 4), place / "4")
        engine = deployment._supervisor.roles["engine-0"].handle
        os.kill(ray.get(engine.worker_pids.remote())[1], signal.SIGKILL)
        client.update_weights(str(place / "4"), version="4")  # while ranks are started again
        assert said(client) == {oracle(4)}
