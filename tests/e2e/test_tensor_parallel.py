"""Models on several tensor-parallel workers say what they say on one, whichever tier their prefixes come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engine_requests import num_requests
from support.reference import Answer, answers, assert_same
from support.tiny_checkpoints import checkpoint
from support.waiting import eventually

from headwise.actors.deployment import Deployment
from headwise.runtime.client.client import Client
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.protocol.request import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.soak]  # test_cluster.py sees short prompts' tokens on three ranks


def engine(client: Client) -> dict[str, Any]:
    stats: dict[str, Any] = client.stats()["engines"]["engine-0"]
    return stats


def serve(client: Client, wanted: list[Answer], tokens: int) -> dict[str, Any]:
    """Serve so many tokens of all prompts; the engine's statistics once all copies are where they should go."""
    finished = num_requests(engine(client), "finished") + len(wanted)
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    results = client.generate([answer.prompt_ids for answer in wanted], sampling)
    for answer, result in zip(wanted, results, strict=True):
        assert_same(answer.first(tokens), result.token_ids)

    def is_settled() -> bool:
        stats = engine(client)  # they may be of a while ago
        if num_requests(stats, "finished") < finished:
            return False
        return not stats["host"]["queued_blocks"] and not stats["storage"]["queued_puts"]

    eventually(is_settled, otherwise=lambda: engine(client))
    return engine(client)


@pytest.mark.parametrize(
    ("name", "ranks", "parts", "tokens"),
    [
        pytest.param("smollm2-135m", 3, 1, 24, marks=pytest.mark.model),
        ("deepseek-v3", 2, 1, 24),
        ("deepseek-v3", 2, 2, 24),  # each of which keeps every other latent
        ("gemma4-shared", 4, 1, 24),  # two of which keep each head
    ],
)
def test_ranks_give_the_reference_tokens_from_all_tiers_and_after_a_restart(
    tmp_path: Path, name: str, ranks: int, parts: int, tokens: int
) -> None:
    wanted = [answer for answer in answers(name) if len(answer.prompt_ids) <= 800]
    config = EngineConfig(
        model=name if name == "smollm2-135m" else str(checkpoint(name)),
        port=0,
        tp_size=ranks,
        context_parallel_size=parts,
        dtype="float32",
        block_size=16,
        kv_cache="64MiB",
        max_model_len=2048,
        max_batched_tokens=256,
        host_cache="128MiB",
        write_policy="write_through",
        storage=f"file://{tmp_path}?capacity=1GiB",
        prefetch="wait_complete",
        load_timeout_s=120.0,  # whatever the machine is busy with
        storage_timeout_s=120.0,
        engine_timeout_s=120.0,
        front_timeout_s=120.0,
    )
    with Deployment.start(config) as deployment, Client(deployment.client_address) as client:
        assert serve(client, wanted, tokens)["storage"]["fetched_blocks"] == 0
        assert client.reset_cache("device")["engine-0"] > 0
        stats = serve(client, wanted, tokens)
        assert stats["cache"]["host_hit_tokens"] > 600
        assert stats["transfers"]["load"]["bytes"] > 0
    with Deployment.start(config) as deployment, Client(deployment.client_address) as client:
        assert serve(client, wanted, tokens)["storage"]["hit_tokens"] > 600
