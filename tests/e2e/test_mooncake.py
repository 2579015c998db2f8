"""Mooncake storage with a real master, which dies and comes back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.free_ports import free_ports
from support.mooncake import BLOCK_BYTES, NAMESPACE, Client, Master, require_mooncake
from support.waiting import eventually

from headwise.errors import ConfigError
from headwise.storage.backends.base import StorageNamespace
from headwise.storage.backends.mooncake import MooncakeConfig, MooncakeStorage


@pytest.fixture
def master(request: pytest.FixtureRequest) -> Iterator[Master]:
    require_mooncake()
    with Master(*getattr(request, "param", ())) as master:
        yield master


LEND_AND_WRITE = f"""
import sys
sys.path[:0] = {sys.path!r}
from support.mooncake import Client
client = Client(sys.argv[1], 64 << 20)
assert all(client.write(0, 16))
print("written", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def lender(master: Master) -> Iterator[subprocess.Popen[str]]:
    """Another process, which lends memory and wrote 16 blocks."""
    with subprocess.Popen(
        [sys.executable, "-c", LEND_AND_WRITE, master.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert any(line == "written\n" for line in process.stdout), "the lender ended before it had written"
        yield process
        process.kill()


def test_blocks_of_one_process_are_read_by_another(master: Master, lender: subprocess.Popen[str]) -> None:
    reader = Client(master.address, 0)
    assert reader.contains(0, 20) == [True] * 16 + [False] * 4
    assert reader.read(0, 20) == [True] * 16 + [False] * 4
    assert all(reader.write(100, 8))
    assert all(reader.read(100, 8))
    reader.close()


@pytest.mark.parametrize("master", [(15,)], indirect=True, ids=["that notices soon"])
def test_a_lender_that_is_killed_leaves_misses(master: Master, lender: subprocess.Popen[str]) -> None:
    reader = Client(master.address, 64 << 20)
    assert all(reader.read(0, 16))
    lender.kill()
    lender.wait()
    assert not any(reader.read(0, 16))
    eventually(lambda: all(reader.write(200, 4)) and all(reader.read(200, 4)))
    reader.close()


def test_a_master_that_is_killed_gives_misses_and_its_successor_hits(master: Master) -> None:
    client, other = Client(master.address, 64 << 20), Client(master.address, 0)
    assert all(client.write(0, 8))
    master.kill()
    assert client.contains(0, 8) == client.read(0, 8) == other.read(0, 8) == [False] * 8
    assert client.write(8, 4) == [False] * 4
    client.delete(0, 1)
    assert client.storage.stats().misses == 8
    assert client.storage.stats().write_failures == 4

    master.start()
    eventually(lambda: all(client.write(20, 4)))
    eventually(lambda: all(other.read(20, 4)))
    assert not any(other.read(0, 8)), "blocks of the first master"
    other.close()
    client.close()
    client.close()


def test_the_store_forgets_what_it_is_told_to_and_nothing_of_another_namespace(master: Master) -> None:
    client = Client(master.address, 64 << 20)
    other = Client(master.address, 0, StorageNamespace("model", "another layout"))
    assert all(client.write(0, 6))
    assert all(client.write(4, 4)), "blocks written before count as stored"
    assert all(other.write(2, 2))
    client.delete(0, 3)
    assert client.read(0, 8) == [False] * 3 + [True] * 5
    other.clear()
    assert other.read(0, 8) == [False] * 8
    assert client.contains(0, 8) == [False] * 3 + [True] * 5
    other.close()
    client.close()


def test_a_full_store_makes_room_for_new_blocks(master: Master) -> None:
    client = Client(master.address, 16 << 20)
    for first in range(0, 640, 32):
        client.write(first, 32)
    served = sum(sum(client.read(first, 32)) for first in range(0, 640, 32))
    assert 0 < served <= (16 << 20) // BLOCK_BYTES
    eventually(lambda: all(client.write(1000, 32)))
    assert all(client.read(1000, 32))
    client.close()


def test_where_no_master_answers_the_address_is_named() -> None:
    require_mooncake()
    (port,) = free_ports(1)
    with pytest.raises(ConfigError, match=f"no Mooncake master answers at 127.0.0.1:{port}"):
        MooncakeStorage(MooncakeConfig(f"127.0.0.1:{port}"), NAMESPACE, BLOCK_BYTES)
