from __future__ import annotations

import pytest

from headwise.storage.attention_store import AttentionStore
from headwise.storage.base import Heartbeat
from headwise.storage.protocol import encode
from headwise.storage.store_desk import StoreDesk


@pytest.fixture
def desk() -> StoreDesk:
    return StoreDesk(
        AttentionStore(), lambda identity, data: True, lambda: 0.0, node_timeout_s=10.0, max_message_bytes=1 << 20
    )


def beat(desk: StoreDesk, node: str, volume: str) -> None:
    desk.take(node.encode(), [encode(Heartbeat(node, 1, -1, (0,) * 6, volume))])


def test_nodes_whose_storage_is_not_the_same_are_told_of_once(
    desk: StoreDesk, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        beat(desk, "a", "one")
        beat(desk, "b", "one")
        beat(desk, "c", "")
    assert not caplog.records
    for _ in range(3):
        beat(desk, "d", "other")
    (record,) = caplog.records
    assert record.message.startswith("node d has another storage than a, b:")


def test_a_node_whose_storage_has_become_another_is_told_of(desk: StoreDesk, caplog: pytest.LogCaptureFixture) -> None:
    for volume in ("one", "", "one", "two"):
        beat(desk, "a", volume)
    assert [record.message for record in caplog.records] == [
        "the storage of node a is not there now: is it mounted?",
        "the storage of node a is another directory now: is it mounted?",
    ]
    assert desk.stats()["nodes"]["a"]["volume"] == "two"
