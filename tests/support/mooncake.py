"""A Mooncake master of the test's own, and a client of it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray
from support.free_ports import free_ports
from support.waiting import PATIENCE_S, eventually

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
        self._port, self._metrics_port = free_ports(2)
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
