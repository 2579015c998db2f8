"""Reading and writing one safetensors file: https://huggingface.co/docs/safetensors.

The package reads and checks the header. The data are mapped here, since it copies what it reads: a worker of Gemma 3
270M would hold 1.8 GB of its own instead of 0.4 GB and a mapped file that all workers of a node share. Writing is done
here, since it writes only what is in memory all at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError

# bfloat16 is read as its bits: NumPy has no such type.
_STORED: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_HEADER_ALIGNMENT = 64


@dataclass(frozen=True)
class _Entry:
    """Where a tensor lies: ``start`` and ``stop`` are bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """A mapped safetensors file of F32, F16 or BF16 tensors. Raises `ModelError` if it is truncated or corrupt."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            with safe_open(path, framework="numpy") as file:
                self._data = np.memmap(path, np.uint8, "r").view(np.ndarray)
                self._entries = self._locate(file)
        except SafetensorError as error:
            raise ModelError(f"{path} is truncated or corrupt: {error}; delete it and fetch the model again") from None
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error}; fetch the model again") from None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> NDArray[np.float32]:
        """A tensor, or a part of it, as float32. A part stored as F32 is a read-only view of the mapped file."""
        entry = self._entries[name]
        stored = self._data[entry.start : entry.stop].view(_STORED[entry.dtype]).reshape(entry.shape)
        part = stored[rows] if columns is None else stored[rows, columns]
        if entry.dtype == "BF16":
            bits = part.astype(np.uint32)
            bits <<= 16
            return bits.view(np.float32)
        return part.astype(np.float32, copy=False)

    def _locate(self, file: Any) -> dict[str, _Entry]:
        """The tensors of a checked file, in which each begins where the one before it ends: gaps are refused."""
        entries: dict[str, _Entry] = {}
        at = 8 + int.from_bytes(self._data[:8].tobytes(), "little")
        for name in file.offset_keys():
            tensor = file.get_slice(name)
            dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
            if dtype not in _STORED:
                raise ModelError(
                    f"{self.path}: tensor {name!r} is stored as {dtype}; {', '.join(_STORED)} can be read: "
                    "use an unquantised version of the model"
                )
            entry = _Entry(dtype, shape, at, at + prod(shape) * _STORED[dtype].itemsize)
            entries[name], at = entry, entry.stop
        return entries


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], tensors: Iterable[NDArray[np.float32]]) -> None:
    """Write float32 tensors one after the other, in the order of ``shapes``, holding one at a time in memory."""
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + prod(shape) * 4
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, shape), values in zip(shapes.items(), tensors, strict=True):
            if values.shape != shape:
                raise ValueError(f"{name} was announced as {shape} and came as {values.shape}")
            file.write(np.ascontiguousarray(values, "<f4").data)
