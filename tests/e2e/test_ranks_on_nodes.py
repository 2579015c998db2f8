"""A replica whose ranks are on nodes of their own, with addresses of their own and a GPU each: an emulated one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.gpu.tiny_engine import PROMPT, write_model
from support.nodes import NODE_MARKS, Nodes
from support.waiting import eventually

from headwise import Client, EngineConfig, LocalEngine, SamplingParams
from headwise.actors.deployment import Deployment
from headwise.actors.placement import address_of
from headwise.errors import ConfigError

pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")

pytestmark = NODE_MARKS

ROOT = Path(__file__).parents[2]
EMULATED = ROOT / "tests" / "support" / "gpu" / "every_process"
"""Has Ray's workers compute on emulated GPUs."""
PROMPTS = [PROMPT[:40], PROMPT[20:31], PROMPT[40:45]]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def configuration(model: Path, **options: object) -> EngineConfig:
    values: dict[str, object] = {
        "model": str(model),
        "port": 0,
        "host": "0.0.0.0",
        "dtype": "float32",
        "kv_cache": "1MiB",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_batched_tokens": 64,
        "block_size": 16,
        "cuda_graphs": False,
        "standby": False,
    }
    return EngineConfig(**{**values, **options})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    config = configuration(model, device="cpu", tensor_ops="numpy", kernels="reference")
    with LocalEngine(config) as engine:
        return [list(result.token_ids) for result in engine.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    paths = EMULATED, ROOT / "tests", ROOT
    with Nodes.started({"PYTHONPATH": os.pathsep.join(map(str, paths))}) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def deployment(nodes: Nodes, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    for _ in range(2):
        nodes.add(GPU=1)
    storage = tmp_path_factory.mktemp("storage")
    config = configuration(
        model,
        tp_size=2,
        host_cache="1MiB",
        write_policy="write_through",
        storage=f"file://{storage}?capacity=64MiB",
        prefetch="wait_complete",
    )
    with Deployment.start(config, address=nodes.address) as deployment:
        assert deployment.config.device == "cuda"
        yield deployment


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[Client]:
    with Client(deployment.client_address, keys=deployment.client_keys) as client:
        yield client


def says(client: Client) -> list[list[int]]:
    return [list(result.token_ids) for result in client.generate(PROMPTS, GREEDY)]


def put_blocks(client: Client) -> int:
    """How many are in storage."""
    return int(client.stats()["engines"]["engine-0"]["storage"]["put_blocks"])


def test_ranks_on_two_nodes_say_what_one_says(
    deployment: Deployment, client: Client, expected: list[list[int]]
) -> None:
    site = deployment._roles["engine-0"].site
    assert len(site.nodes) == 2
    assert says(client) == expected
    assert deployment._keys.own is not None, "all of it is encrypted"


def test_where_a_rank_s_node_dies_the_engine_starts_anew_and_finds_in_storage_what_all_ranks_have_put_there(
    nodes: Nodes, deployment: Deployment, client: Client, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="headwise")
    assert says(client) == expected
    of_prompts = sum((len(prompt + said) - 1) // 16 for prompt, said in zip(PROMPTS, expected, strict=True))
    eventually(lambda: put_blocks(client) >= of_prompts, otherwise=client.stats)
    site = deployment._roles["engine-0"].site
    before = site.nodes
    (of_rank,) = (node for node in before if node != site.node)
    nodes.at(address_of(of_rank)).kill()
    eventually(lambda: deployment._supervisor.serving("engine-0") is None, otherwise=lambda: caplog.messages)
    nodes.add(GPU=1)
    eventually(
        lambda: deployment._supervisor.serving("engine-0") is not None and len(site.nodes - before) == 1,
        otherwise=lambda: (caplog.messages, site.nodes),
    )
    results = client.generate(PROMPTS, GREEDY)
    assert [list(result.token_ids) for result in results] == expected
    assert results[0].usage is not None
    assert results[0].usage.cached_tokens == 32, "of 40: two blocks"


def test_ranks_on_cpus_are_refused_several_nodes_before_anything_is_started(nodes: Nodes, model: Path) -> None:
    config = configuration(model, name="cpus", tp_size=4, tp_placement="any")
    with pytest.raises(ConfigError, match=r"does not go with device cpu: the ranks of one engine share memory there"):
        Deployment.start(config, address=nodes.address)
