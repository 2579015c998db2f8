from __future__ import annotations

import pytest

from headwise.storage.index.attention_store import AttentionStore
from headwise.storage.index.message_handler import MessageHandler
from headwise.storage.index.messages import Heartbeat
from headwise.storage.index.wire import encode


@pytest.fixture
def handler() -> MessageHandler:
    return MessageHandler(
        AttentionStore(), lambda identity, data: True, lambda: 0.0, node_timeout_s=10.0, max_message_bytes=1 << 20
    )


def beat(handler: MessageHandler, node: str, volume: str) -> None:
    handler.take(node.encode(), [encode(Heartbeat(node, 1, -1, (0,) * 6, volume))])


def test_nodes_whose_storage_is_not_the_same_are_told_of_once(
    handler: MessageHandler, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        beat(handler, "a", "one")
        beat(handler, "b", "one")
        beat(handler, "c", "")
    assert not caplog.records
    for _ in range(3):
        beat(handler, "d", "other")
    (record,) = caplog.records
    assert record.message.startswith("node d has another storage than a, b:")


def test_a_node_whose_storage_has_become_another_is_told_of(
    handler: MessageHandler, caplog: pytest.LogCaptureFixture
) -> None:
    for volume in ("one", "", "one", "two"):
        beat(handler, "a", volume)
    assert [record.message for record in caplog.records] == [
        "the storage of node a is not there now: is it mounted?",
        "the storage of node a is another directory now: is it mounted?",
    ]
    assert handler.stats()["nodes"]["a"]["volume"] == "two"
