"""Ray nodes that several files have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.nodes import Nodes


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with Nodes.started() as nodes:
        yield nodes
