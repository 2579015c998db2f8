"""Stages of a pipeline on Ray, of two ranks each, in processes of their own, say what one says, after a loss too."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest
from support.engine_requests import num_requests
from support.reference import answers, assert_same
from support.tiny_checkpoints import checkpoint
from support.waiting import eventually

from headwise.actors.deployment import Deployment
from headwise.runtime.client.client import Client
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.protocol.request import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.soak]  # the benchmark of pipelines starts stages on Ray, too

TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


def configuration(storage: Path) -> EngineConfig:
    return EngineConfig(
        model=str(checkpoint("deepseek-v3")),
        port=0,
        tp_size=2,
        pipeline_parallel_size=2,
        dtype="float32",
        cpu_threads=1,
        block_size=16,
        kv_cache="32MiB",
        max_model_len=2048,
        max_batched_tokens=128,
        host_cache="64MiB",
        write_policy="write_through",
        storage=f"file://{storage}?capacity=1GiB",
        prefetch="wait_complete",
        speculation=3,
        standby=False,
        load_timeout_s=120.0,  # whatever the machine is busy with
        storage_timeout_s=120.0,
        engine_timeout_s=120.0,
        front_timeout_s=120.0,
    )


def test_stages_say_the_reference_tokens_and_go_on_from_storage_when_a_rank_of_one_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="headwise")
    wanted = [answer.first(TOKENS) for answer in answers("deepseek-v3") if len(answer.prompt_ids) <= 800]
    longest = max(wanted, key=lambda answer: len(answer.prompt_ids))
    with Deployment.start(configuration(tmp_path)) as deployment, Client(deployment.client_address) as client:

        def is_stored() -> bool:
            stats = client.stats()["engines"]["engine-0"]  # they may be of a while ago
            if num_requests(stats, "finished") < len(wanted):
                return False
            return not stats["host"]["queued_blocks"] and not stats["storage"]["queued_puts"]

        told = {line.split(": ")[1]: line for line in caplog.messages if line.startswith("engine-0: rank")}
        assert sorted(told) == ["rank 0", "rank 2"], "of each stage's first"
        assert "layers=0-1 stages=2 by host" in told["rank 0"]
        assert "layers=2-2 stages=2 by host" in told["rank 2"]
        results = client.generate([answer.prompt_ids for answer in wanted], GREEDY)
        for answer, result in zip(wanted, results, strict=True):
            assert_same(answer, result.token_ids)
        eventually(is_stored, otherwise=client.stats)

        (pids,) = deployment.worker_pids()
        assert len({*pids}) == 4
        stream = client.stream(longest.prompt_ids, GREEDY)
        next(stream)
        os.kill(pids[-1], signal.SIGKILL)
        assert_same(longest, stream.read().token_ids)
        assert stream.result.usage is not None
        assert stream.result.usage.cached_tokens >= len(longest.prompt_ids) // 2, "from storage"
        assert any("rank 3" in fault for _, fault in client.stats()["faults"])
