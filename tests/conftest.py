"""What every test keeps to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from headwise.sockets.context import num_open

settings.register_profile("headwise", deadline=None)  # a timing is no proof: other programs may have the cores
settings.load_profile("headwise")


@pytest.fixture(autouse=True, scope="module")
def every_context_is_closed() -> Iterator[None]:
    """ZeroMQ contexts have threads and files: whoever opens one closes it."""
    before = num_open()
    yield
    assert num_open() == before, "a client, server or connection was left open"


@pytest.fixture(autouse=True, scope="module")
def what_is_logged_stays_the_same() -> Iterator[None]:
    """Commands set the level of headwise's log for their process, which here is that of other tests, too."""
    logger = logging.getLogger("headwise")
    before = logger.level
    yield
    logger.setLevel(before)


LONGEST = ("test_tokens", "test_replicas", "test_storage_tier", "test_cluster", "test_long_context_tokens")
"""Of the files, by the time that they take: whoever comes to one of them last keeps the other workers waiting."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first, and those of whole engines before all others, where files are dealt to several workers."""
    if hasattr(config, "workerinput"):
        order = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(item.path.stem, len(order) + ("e2e" not in Path(item.path).parts)))
