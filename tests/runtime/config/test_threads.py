"""Ranks compute with the cores that their engine may use."""

from __future__ import annotations

import pytest

from headwise.runtime.config import threads
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.threads import threads_per_worker


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 8),
        ({"tp_size": 3}, 2),
        ({"tp_size": 16}, 1),
        ({"engine_cpus": 4.0}, 4),
        ({"engine_cpus": 4.0, "tp_size": 2}, 2),
        ({"engine_cpus": 0.5}, 1),
        ({"engine_cpus": 64.0}, 8),
        ({"engine_cpus": 4.0, "cpu_threads": 3}, 3),
    ],
)
def test_threads_of_a_rank_on_eight_cores(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object], expected: int
) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    assert threads_per_worker(EngineConfig(**options)) == expected


@pytest.mark.parametrize(("cpus", "expected"), [(0.0, 4), (12.0, 3)])
def test_ranks_share_the_cores_of_their_own_node(monkeypatch: pytest.MonkeyPatch, cpus: float, expected: int) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    config = EngineConfig(tp_size=2, pipeline_parallel_size=2, engine_cpus=cpus)
    assert threads_per_worker(config, 2) == expected
    assert threads_per_worker(config) == 2
