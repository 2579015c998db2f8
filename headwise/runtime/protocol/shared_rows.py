"""Embeddings of steps that workers read in the engine's memory: sent with each step, they would keep it waiting.

A step of 8,192 tokens of Qwen3-VL-8B has 256 MiB of them, for every rank. The engine keeps embeddings of requests in
buffers that its workers map, where these are on its machine, and says where they lie. It keeps a request's until the
steps that need them are back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from headwise.runtime.protocol.batch import BatchRequest, SharedRows, StepEmbeds
from headwise.runtime.protocol.prompt_items import PromptEmbeds, as_float32
from headwise.transfer.host_memory import SharedArena
from headwise.transfer.shared_buffers import Located, MappedBuffers, SharedBuffers

_ALIGNED = 4
NO_VALUES = np.zeros((0, 0), np.float32)
_PROBE = b"the engine's memory"


def moved(buffers: SharedBuffers, embeds: Sequence[PromptEmbeds]) -> tuple[PromptEmbeds, ...]:
    """The same in one buffer, if they are in none."""
    if not embeds or all(buffers.find(each.values) is not None for each in embeds):
        return tuple(embeds)
    places = places_in(buffers.allocate, [(each.values.shape, each.values.dtype == np.uint16) for each in embeds])
    for place, each in zip(places, embeds, strict=True):
        place[:] = each.values
        place.flags.writeable = False
    return tuple(PromptEmbeds(each.start, place) for each, place in zip(embeds, places, strict=True))


def places_in(
    allocate: Callable[[int], NDArray[np.uint8]], forms: Sequence[tuple[tuple[int, ...], bool]]
) -> list[NDArray[Any]]:
    """Arrays of these shapes, in bfloat16 or float32, one behind the other in one buffer."""
    sizes = [int(np.prod(shape)) * (2 if is_half else 4) for shape, is_half in forms]
    padded = [size + -size % _ALIGNED for size in sizes]
    starts = np.cumsum([0, *padded]).tolist()
    buffer = allocate(starts[-1])
    return [
        buffer[start : start + size].view(np.uint16 if is_half else np.float32).reshape(shape)
        for start, size, (shape, is_half) in zip(starts, sizes, forms, strict=False)
    ]


def located(buffers: SharedBuffers, parts: Sequence[NDArray[Any]]) -> tuple[SharedRows, ...] | None:
    """Where rows of embeddings lie; those that touch are one. None: some are in no buffer."""
    found: list[SharedRows] = []
    for part in parts:
        at = buffers.find(part)
        if at is None:
            return None
        rows = _rows(at, part)
        if found and _touch(found[-1], rows):
            found[-1] = replace(found[-1], rows=found[-1].rows + rows.rows)
        else:
            found.append(rows)
    return tuple(found)


def _rows(at: Located, part: NDArray[Any]) -> SharedRows:
    arena = at.arena
    return SharedRows(
        arena.pid, arena.fd, arena.name, at.start, len(part), part.shape[1], bool(part.dtype == np.uint16)
    )


def _touch(first: SharedRows, second: SharedRows) -> bool:
    expected = replace(first, start=first.start + first.num_bytes, rows=second.rows)
    return second == expected


class SharedRowReader:
    """A worker's side."""

    def __init__(self) -> None:
        self._mapped = MappedBuffers()

    def resolved(self, batch: BatchRequest) -> BatchRequest:
        """A step whose embeddings are values. Raises `OSError` where the engine's memory cannot be mapped."""
        self._mapped.sweep()
        embeds = batch.embeds
        if embeds is None or not embeds.shared:
            return batch
        parts = [self._array(rows) for rows in embeds.shared]
        if any(part.dtype != np.uint16 for part in parts):  # bits of bfloat16 stay that where all are
            parts = [as_float32(part) for part in parts]
        return replace(batch, embeds=StepEmbeds(embeds.rows, parts[0] if len(parts) == 1 else np.concatenate(parts)))

    def sweep(self) -> None:
        """Let go of what the engine has let go of."""
        self._mapped.sweep()

    def _array(self, rows: SharedRows) -> NDArray[Any]:
        """``[rows, width]``, read-only and not copied."""
        end = rows.start + rows.num_bytes
        whole = self._mapped.array(SharedArena(rows.pid, rows.fd, rows.name), end)
        numbers = whole[rows.start : end].view(np.uint16 if rows.is_half else np.float32)
        return numbers.reshape(rows.rows, rows.width)


# ---- whether workers can ----


class MemoryProbe:
    """Some memory of the engine, and a file beside its socket that says where it is: who can read both can map the
    rest."""

    def __init__(self, socket: Path) -> None:
        self._path, buffers = _beside(socket), SharedBuffers()
        self._memory = buffers.allocate(len(_PROBE))
        self._memory[:] = np.frombuffer(_PROBE, np.uint8)
        at = buffers.find(self._memory)
        if at is not None:
            self._path.write_bytes(msgpack.packb((at.arena.pid, at.arena.fd, at.arena.name)))

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


def can_map(socket: Path) -> bool:
    """Whether this process can map the memory of the engine whose socket that is."""
    try:
        arena = SharedArena(*msgpack.unpackb(_beside(socket).read_bytes()))
        return MappedBuffers().array(arena, len(_PROBE))[: len(_PROBE)].tobytes() == _PROBE
    except (OSError, ValueError, TypeError):
        return False


def _beside(socket: Path) -> Path:
    return socket.with_name(f"{socket.name}.memory")
