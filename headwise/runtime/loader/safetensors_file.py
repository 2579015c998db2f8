"""Reading and writing one safetensors file: https://huggingface.co/docs/safetensors."""

from __future__ import annotations

import json
import mmap
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
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsFile:
    """A mapped safetensors file of F32, F16 or BF16 tensors. Raises `ModelError` if it is truncated or corrupt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _map(path)
        self._entries = {name: self._entry(name, info) for name, info in self._header().items()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> NDArray[np.float32]:
        """A tensor, or a part of it, as float32. A part stored as F32 is a read-only view of the mapped file."""
        entry = self._entries[name]
        stored = np.ndarray(entry.shape, _STORED[entry.dtype], self._data, entry.offset)
        part = stored[rows] if columns is None else stored[rows, columns]
        if entry.dtype == "BF16":
            return (part.astype(np.uint32) << 16).view(np.float32)
        return part.astype(np.float32, copy=False)

    def _header(self) -> dict[str, Any]:
        length = int.from_bytes(self._data[:8], "little")
        self._start = 8 + length
        if len(self._data) < 8 or self._start > len(self._data):
            raise self._unusable(f"its header should end at byte {self._start} and the file at {len(self._data)}")
        try:
            header = json.loads(self._data[8 : self._start])
        except ValueError:
            raise self._unusable("its header is not JSON") from None
        if not isinstance(header, dict):
            raise self._unusable("its header is not a JSON object")
        header.pop("__metadata__", None)
        return header

    def _entry(self, name: str, info: Any) -> _Entry:
        try:
            dtype, shape, (begin, end) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise self._unusable(f"the entry of {name!r} is malformed") from None
        if dtype not in _STORED:
            raise ModelError(
                f"{self.path}: tensor {name!r} is stored as {dtype}; {', '.join(_STORED)} can be read: "
                "use an unquantised version of the model"
            )
        if self._start + end > len(self._data):
            raise self._unusable(f"{name!r} should end at byte {self._start + end} and the file at {len(self._data)}")
        if end - begin != prod(shape) * _STORED[dtype].itemsize:
            raise self._unusable(f"{name!r} has {end - begin} bytes, which is not {dtype} of shape {list(shape)}")
        return _Entry(dtype, shape, self._start + begin)

    def _unusable(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is truncated or corrupt: {what}; delete it and fetch the model again")


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


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}; fetch the model again") from None
    except ValueError:
        raise ModelError(f"{path} is empty; delete it and fetch the model again") from None
