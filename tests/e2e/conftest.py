"""Ray nodes that several files have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from support.nodes import Nodes

from headwise.actors.cluster import Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of one node. Commands join it by the variables of this process."""
    cluster = Cluster.start()
    yield str(ray.get_runtime_context().gcs_address)
    cluster.disconnect()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with Nodes.started() as nodes:
        yield nodes
