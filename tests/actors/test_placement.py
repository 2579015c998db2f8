"""What a deployment takes of a Ray cluster's resources."""

from __future__ import annotations

import pytest
import ray

from headwise.actors import placement
from headwise.runtime.config.engine_config import EngineConfig


@pytest.mark.parametrize(
    ("resources", "options", "fits"),
    [
        ({"CPU": 2.0}, {"tp_size": 3}, True),
        ({"CPU": 2.0}, {"replicas": 3, "tp_size": 3}, True),
        ({"CPU": 0.5}, {"tp_size": 3}, False),
        ({"CPU": 64.0}, {"device": "cuda"}, False),
        ({"CPU": 64.0, "GPU": 8.0}, {"device": "cuda", "replicas": 4, "tp_size": 2}, True),
        ({"CPU": 64.0, "GPU": 1.0}, {"device": "cuda", "replicas": 4, "tp_size": 2}, False),
        ({}, {}, False),
    ],
)
def test_a_cluster_is_large_enough_if_it_has_what_one_engine_with_its_workers_takes(
    monkeypatch: pytest.MonkeyPatch, resources: dict[str, float], options: dict[str, object], fits: bool
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
    assert placement.could_fit(EngineConfig(**options)) is fits
