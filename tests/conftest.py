"""What every test keeps to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headwise.sockets.context import num_open


@pytest.fixture(autouse=True, scope="module")
def every_context_is_closed() -> Iterator[None]:
    """ZeroMQ contexts have threads and files: whoever opens one closes it."""
    before = num_open()
    yield
    assert num_open() == before, "a client, server or connection was left open"
