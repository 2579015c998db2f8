"""Mooncake storage with a real master, which dies and comes back."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray
from support.waiting import PATIENCE_S, eventually

from headwise.errors import ConfigError
from headwise.storage.backends.base import StorageNamespace
from headwise.storage.backends.mooncake import MooncakeConfig, MooncakeStorage

BLOCK_BYTES = 48 << 10
NAMESPACE = StorageNamespace("model", "layout")
CALL_TIMEOUT_S = PATIENCE_S

T = TypeVar("T")


def master_command() -> str | None:
    return shutil.which("mooncake_master", path=str(Path(sys.executable).parent)) or shutil.which("mooncake_master")


def require_mooncake() -> None:
    """Skip the test where Mooncake is not installed, or does not work."""
    pytest.importorskip("mooncake.store", reason="needs headwise[mooncake] and libibverbs1", exc_type=ImportError)
    if master_command() is None:
        pytest.skip("mooncake_master is not on the path")


class Master:
    """A `mooncake_master` on free ports of the loopback interface, which may be killed and started again.

    client_ttl_s: how long a process may be silent before the memory that it lends is taken for lost
    """

    def __init__(self, client_ttl_s: int = 600) -> None:
        self._client_ttl_s = client_ttl_s
        self._port, self._metrics_port = _free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        command = master_command()
        assert command is not None
        self._process = subprocess.Popen(
            [
                command,
                f"--rpc_port={self._port}",
                "--rpc_address=127.0.0.1",
                f"--metrics_port={self._metrics_port}",
                "--enable_metric_reporting=false",
                f"--client_ttl={self._client_ttl_s}",
                "--default_kv_lease_ttl=500ms",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually(
            self._answers, otherwise=lambda: f"mooncake_master ended with {self._process and self._process.poll()}"
        )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), 1.0).close()
        except OSError:
            return False
        return True

    def __enter__(self) -> Master:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


class Client:
    """A storage with an arena of 32 blocks; every call must be back in time."""

    def __init__(self, master: str, segment_bytes: int, namespace: StorageNamespace = NAMESPACE) -> None:
        self.storage = MooncakeStorage(MooncakeConfig(master, segment_bytes), namespace, BLOCK_BYTES)
        self.arena = np.zeros(32 * BLOCK_BYTES, dtype=np.uint8)
        self.storage.register(self.arena)
        self._threads = ThreadPoolExecutor(1)

    def write(self, first: int, count: int) -> list[bool]:
        for at in range(count):
            self.arena[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES] = content_of(first + at)
        return self._call(lambda: self.storage.write(*_keys(first, count), self.arena, _places(count)).tolist())

    def read(self, first: int, count: int) -> list[bool]:
        """Which blocks were hits; their contents are checked."""
        self.arena[:] = 0
        hits = self._call(lambda: self.storage.read(*_keys(first, count), self.arena, _places(count)).tolist())
        for at, block in enumerate(self.arena.reshape(-1, BLOCK_BYTES)[:count]):
            assert not hits[at] or (block == content_of(first + at)).all()
        return hits

    def contains(self, first: int, count: int) -> list[bool]:
        return self._call(lambda: self.storage.contains(*_keys(first, count)).tolist())

    def delete(self, first: int, count: int) -> None:
        self._call(lambda: self.storage.delete(*_keys(first, count)))

    def clear(self) -> None:
        self._call(self.storage.clear)

    def close(self) -> None:
        self._call(self.storage.close)

    def _call(self, call: Callable[[], T]) -> T:
        return self._threads.submit(call).result(CALL_TIMEOUT_S)


def content_of(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def _keys(first: int, count: int) -> tuple[list[bytes], NDArray[np.int32]]:
    return [(first + at).to_bytes(16, "big") for at in range(count)], np.zeros(count, dtype=np.int32)


def _places(count: int) -> NDArray[np.int32]:
    return np.arange(count, dtype=np.int32)


@pytest.fixture
def master(request: pytest.FixtureRequest) -> Iterator[Master]:
    require_mooncake()
    with Master(*getattr(request, "param", ())) as master:
        yield master


LEND_AND_WRITE = f"""
import sys
sys.path[:0] = {sys.path!r}
from test_mooncake import Client
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
    (port,) = _free_ports(1)
    with pytest.raises(ConfigError, match=f"no Mooncake master answers at 127.0.0.1:{port}"):
        MooncakeStorage(MooncakeConfig(f"127.0.0.1:{port}"), NAMESPACE, BLOCK_BYTES)
