"""A segment: a file of equal slots for blocks of one namespace, filled from the first to the last.

    header (64 bytes) | entry 0 | entry 1 | ... | padding | block 0 | block 1 | ...
                        32 bytes each                       starts on a page

An entry is written after its block, so a slot counts only once its block is complete; slots without an entry hold
nothing. Entry and block carry checksums (XXH3): what a crash, a full disk or a power cut left half written is seen when
it is read. Entries are only ever appended, or marked as deleted in place, so readers need no lock.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from xxhash import xxh3_64_intdigest as checksum

from headwise.storage.backends.base import KEY_BYTES

MAGIC = b"hwseg\x00\x00\x01"
"""Its last byte is the version of this format; files of another are left alone until they are evicted."""

HEADER_BYTES = 64
PAGE_BYTES = 4096
MAX_SLOTS = 1 << 16

DELETED = b"\xff" * KEY_BYTES
_HEADER = struct.Struct("<8s16sQIQ")  # magic, namespace, block bytes, slots, check
_ENTRY = struct.Struct(f"<{KEY_BYTES}sIQ")  # key, check, checksum of the block
ENTRY_BYTES = _ENTRY.size


class Outcome(Enum):
    """What became of reading one block."""

    HIT = "hit"
    GONE = "gone"
    CORRUPT = "corrupt"


@dataclass(frozen=True)
class SegmentFormat:
    """Where things lie in a segment."""

    namespace: bytes
    block_bytes: int
    slots: int

    @property
    def blocks_offset(self) -> int:
        return -(-(HEADER_BYTES + self.slots * ENTRY_BYTES) // PAGE_BYTES) * PAGE_BYTES

    @property
    def size(self) -> int:
        """Bytes of the file, from its creation on; the disk gives them as they are written."""
        return self.blocks_offset + self.slots * self.block_bytes

    def entry_offset(self, slot: int) -> int:
        return HEADER_BYTES + slot * ENTRY_BYTES

    def block_offset(self, slot: int) -> int:
        return self.blocks_offset + slot * self.block_bytes

    def to_header(self) -> bytes:
        fields = (MAGIC, self.namespace, self.block_bytes, self.slots)
        unchecked = _HEADER.pack(*fields, 0)
        return _HEADER.pack(*fields, checksum(unchecked)).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def from_header(cls, header: bytes) -> SegmentFormat | None:
        """The format that a file's first bytes tell; None if it is no segment of this version."""
        if len(header) != HEADER_BYTES:
            return None
        _, namespace, block_bytes, slots, _ = _HEADER.unpack_from(header)
        told = cls(namespace, block_bytes, slots)
        return told if told.to_header() == header else None


def format_for(namespace: bytes, block_bytes: int, segment_bytes: int) -> SegmentFormat:
    """A segment of about ``segment_bytes``, of at least one block."""
    return SegmentFormat(namespace, block_bytes, min(MAX_SLOTS, max(1, segment_bytes // block_bytes)))


def max_run(block_bytes: int) -> int:
    """Blocks that one vectored read or write may move: Linux takes 1,024 buffers, and less than 2 GiB."""
    return max(1, min(1024, (1 << 30) // block_bytes))


def read_format(path: Path) -> SegmentFormat | None:
    """The format of the segment at ``path``; None if it is none. Raises OSError if it cannot be read."""
    with path.open("rb", buffering=0) as file:
        return SegmentFormat.from_header(file.read(HEADER_BYTES))


def read_entries(fd: int, form: SegmentFormat, first: int) -> list[bytes | None]:
    """The keys in the slots from ``first`` to the last whole entry; None where a key was deleted or is damaged.

    An entry that is just being written looks damaged: with nothing whole behind it, it is left for the next call.
    """
    keys: list[bytes | None] = []
    complete = 0
    for key, check, block_checksum in _ENTRY.iter_unpack(_entries_from(fd, form, first)):
        is_whole = check == _check(key, block_checksum)
        keys.append(key if is_whole and key != DELETED else None)
        if is_whole:
            complete = len(keys)
    return keys[:complete]


def first_free_slot(fd: int, form: SegmentFormat) -> int:
    """The slot behind the last that has an entry, whole or damaged."""
    return len(_entries_from(fd, form, 0)) // ENTRY_BYTES


def _entries_from(fd: int, form: SegmentFormat, first: int) -> bytes:
    """From slot ``first`` to the last that is not all zeros; damage can have made zeros in between."""
    data = os.pread(fd, (form.slots - first) * ENTRY_BYTES, form.entry_offset(first)).rstrip(b"\0")
    return data.ljust(-(-len(data) // ENTRY_BYTES) * ENTRY_BYTES, b"\0")


def write_run(fd: int, form: SegmentFormat, first: int, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
    """Fill neighbouring slots from ``first`` on. Raises OSError, after which none of them may be taken as filled."""
    entries = b"".join(_entry(key, checksum(block)) for key, block in zip(keys, blocks, strict=True))
    blocks_at, entries_at = form.block_offset(first), form.entry_offset(first)

    def write_blocks(done: int) -> int:
        block, offset = divmod(done, form.block_bytes)
        return os.pwritev(fd, [blocks[block][offset:], *blocks[block + 1 :]], blocks_at + done)

    _write_all(write_blocks, len(blocks) * form.block_bytes)
    _write_all(lambda done: os.pwrite(fd, entries[done:], entries_at + done), len(entries))


def read_run(
    fd: int, form: SegmentFormat, first: int, keys: Sequence[bytes], blocks: Sequence[memoryview]
) -> list[Outcome]:
    """Read neighbouring slots from ``first`` on into ``blocks``; raises OSError if the device fails."""
    entries = os.pread(fd, len(keys) * ENTRY_BYTES, form.entry_offset(first)).ljust(len(keys) * ENTRY_BYTES, b"\0")
    filled = os.preadv(fd, blocks, form.block_offset(first)) // form.block_bytes
    outcomes = []
    for index, (stored, check, block_checksum) in enumerate(_ENTRY.iter_unpack(entries)):
        is_whole = check == _check(stored, block_checksum)
        if is_whole and stored == DELETED:
            outcomes.append(Outcome.GONE)
        elif is_whole and stored == keys[index] and index < filled and checksum(blocks[index]) == block_checksum:
            outcomes.append(Outcome.HIT)
        else:
            outcomes.append(Outcome.CORRUPT)
    return outcomes


def mark_deleted(fd: int, form: SegmentFormat, slot: int) -> None:
    """Make the slot hold no block, for every reader. Its space comes back with that of the segment."""
    os.pwrite(fd, _entry(DELETED, 0), form.entry_offset(slot))


def _entry(key: bytes, block_checksum: int) -> bytes:
    return _ENTRY.pack(key, _check(key, block_checksum), block_checksum)


def _check(key: bytes, block_checksum: int) -> int:
    return int(checksum(key, block_checksum) & 0xFFFFFFFF)


def _write_all(write_from: Callable[[int], int], size: int) -> None:
    """Write from where the last call stopped, until ``size`` bytes are done: the call that a full disk cuts short does
    not say why, the next one does.
    """
    done = 0
    while done < size:
        moved = write_from(done)
        if not moved:
            raise OSError(f"wrote {done} of {size} bytes")
        done += moved
