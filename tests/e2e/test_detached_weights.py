"""Weights that a detached deployment was given outlive its owner, its scheduler and its engine."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from support.commands import as_flags
from support.detached import pids, ran, run
from support.small_engine import SMALL
from support.tiny_checkpoints import checkpoint
from support.waiting import PATIENCE_S, eventually

from headwise import Client, SamplingParams
from headwise.actors.names import OWNER, SCHEDULER
from headwise.errors import HeadwiseError

pytestmark = [pytest.mark.ray, pytest.mark.soak]

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def test_who_starts_anew_has_them(cluster: str, tmp_path: Path) -> None:
    config = replace(
        SMALL,
        name="outliving",
        model=str(checkpoint("qwen3")),
        weights_dtype="float32",
        kv_cache="8MiB",
        weights_from=str(checkpoint("qwen3", 1).parent),
        cache_dir=str(tmp_path),
        owner_timeout_s=10.0,
        drain_timeout_s=PATIENCE_S,
    )
    done = ran("serve", "--detach", "--address", cluster, *as_flags(config))
    assert done.returncode == 0, done.stderr
    address = done.stdout.strip().rpartition(" ")[2]
    with Client(address) as client:
        client.update_weights(str(checkpoint("qwen3", 1)), version="given")
        said = client.generate([1, 2, 3], GREEDY).token_ids
        for killed in ((OWNER,), (SCHEDULER,), ("engine-0",), (OWNER, SCHEDULER), ("engine-0",)):
            before = pids(config.name)
            for role in killed:
                os.kill(before[role], signal.SIGKILL)
            eventually(lambda before=before, killed=killed: _are_others(before, pids_or_none(config.name), killed))
            eventually(lambda: _answers(client) == (said, [(0, "given")]))
    assert run("stop", "--ray", cluster, "--name", config.name)[0] == 0


def pids_or_none(name: str) -> dict[str, int]:
    try:
        return pids(name)
    except (ray.exceptions.RayError, KeyError, AttributeError):
        return {}


def _are_others(before: dict[str, int], after: dict[str, int], roles: tuple[str, ...]) -> bool:
    return all(after.get(role, before[role]) != before[role] for role in roles)


def _answers(client: Client) -> Any:
    try:
        result = client.generate([1, 2, 3], GREEDY)
    except HeadwiseError:
        return None
    return result.token_ids, result.weights
