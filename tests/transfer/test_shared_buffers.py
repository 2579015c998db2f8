"""Buffers that other processes map: found by their arrays, gone with them, and never taken for one another."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import numpy as np
import pytest

from headwise.transfer import shared_buffers
from headwise.transfer.host_memory import SharedArena
from headwise.transfer.shared_buffers import MappedBuffers, SharedBuffers

READ = """
import sys
from headwise.transfer.host_memory import SharedArena
from headwise.transfer.shared_buffers import MappedBuffers
arena = SharedArena(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
array = MappedBuffers().array(arena, 8)
print(array[:8].tolist(), array.flags.writeable)
"""


def test_another_process_reads_what_is_written_and_cannot_write() -> None:
    buffers = SharedBuffers()
    array = buffers.allocate(100)
    array[:8] = range(8)
    at = buffers.find(array)
    assert at is not None
    asked = [sys.executable, "-c", READ, str(at.arena.pid), str(at.arena.fd), at.arena.name]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    assert done.stdout.split("]") == ["[0, 1, 2, 3, 4, 5, 6, 7", " False\n"], done.stderr


def test_arrays_are_found_where_they_lie_and_others_are_not() -> None:
    buffers = SharedBuffers()
    first, second = buffers.allocate(4096), buffers.allocate(64)
    numbers = first[16:80].view(np.float32).reshape(4, 4)
    at, other = buffers.find(numbers[1:3]), buffers.find(second)
    assert at is not None
    assert other is not None
    assert at.start == 16 + 4 * 4
    assert other.start == 0
    assert at.arena != other.arena
    assert buffers.find(numbers[:, 1:3]) is None  # no rows one behind the other
    assert buffers.find(np.zeros(8, np.uint8)) is None
    assert SharedBuffers().find(first) is None
    assert len(buffers.allocate(0)) == 0


def test_a_buffer_goes_with_its_last_array_and_what_was_mapped_stays_until_it_is_let_go_of() -> None:
    buffers, mapped = SharedBuffers(), MappedBuffers()
    array = buffers.allocate(64)
    array[:] = 7
    at = buffers.find(array)
    assert at is not None
    seen = mapped.array(at.arena, 64)
    part = array[3:9]
    del array
    gc.collect()
    mapped.sweep()
    assert (len(buffers), len(mapped)) == (1, 1)
    del part
    gc.collect()
    assert len(buffers) == 0
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(at.arena.fd)
    mapped.sweep()
    assert len(mapped) == 0
    assert seen.tolist() == [7] * 64


@pytest.mark.parametrize("name", ["headwise-of-another", ""])
def test_a_number_that_was_given_to_another_file_is_told(name: str) -> None:
    buffers = SharedBuffers()
    array = buffers.allocate(64)
    at = buffers.find(array)
    assert at is not None
    with pytest.raises(OSError, match="is another one than when it gave its address"):
        MappedBuffers().array(SharedArena(at.arena.pid, at.arena.fd, name), 64)
    with pytest.raises(OSError, match="shares 64 bytes, not 65"):
        MappedBuffers().array(at.arena, 65)
    mapped = MappedBuffers()
    mapped.array(at.arena, 64)
    with pytest.raises(OSError, match="shares 64 bytes, not 100"):
        mapped.array(at.arena, 100)
    with pytest.raises(OSError, match="No such"):
        MappedBuffers().array(SharedArena(2**22 + 5, 3, "x"), 1)


def test_where_the_system_shares_no_memory_buffers_are_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_buffers, "create_shared", lambda size: None)
    buffers = SharedBuffers()
    array = buffers.allocate(64)
    assert array.shape == (64,)
    assert buffers.find(array) is None
