"""Reading and writing one safetensors file: https://huggingface.co/docs/safetensors.

The ``safetensors`` package reads and checks the header. The data are mapped here, since the package copies what it
reads: a worker of Gemma 3 270M would hold 1.8 GB of its own instead of 0.4 GB and a mapped file that all workers of a
node share. Files are written here, since the package needs all tensors in memory at once.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.ops.fp4 import powers_of_two

# By the names of safetensors. BF16 is read as its bits: NumPy has no such type.
FLOATS: Mapping[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
INTEGERS: Mapping[str, np.dtype[Any]] = {"I8": np.dtype("i1"), "U8": np.dtype("u1")}
TABLES: Mapping[str, np.dtype[Any]] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
"""What a model looks up by token, as its experts."""
FLAGS: Mapping[str, np.dtype[Any]] = {"BOOL": np.dtype("?")}
WORDS: Mapping[str, np.dtype[Any]] = {"U16": np.dtype("<u2")}
CODES: Mapping[str, np.dtype[Any]] = {
    **INTEGERS,
    **TABLES,
    "F8_E4M3": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
}
"""What quantised weights are made of; FP8, and powers of two (E8M0), are read as their bits."""
_STORED = {**FLOATS, **CODES, **FLAGS, **WORDS}
_NUMPY_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_EXACT = 1 << 24
"""Up to which float32 holds every integer."""
_HEADER_ALIGNMENT = 64
_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class _Entry:
    """Where a tensor lies: ``start`` and ``stop`` are byte offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class TensorForm:
    """A tensor's shape, and its dtype by the name in safetensors, such as ``F32``."""

    dtype: str
    shape: tuple[int, ...]


class SafetensorsFile:
    """A memory-mapped safetensors file.

    dtypes: the dtypes that it may have, by their names in safetensors

    Raises `ModelError` if the file cannot be read, is truncated or corrupt, or has a tensor of another dtype. Methods
    raise `KeyError` for a name that is not in ``names``.
    """

    def __init__(self, path: Path, dtypes: Mapping[str, np.dtype[Any]] = FLOATS) -> None:
        from safetensors import SafetensorError, safe_open

        self.path, self._dtypes = path, dtypes
        try:
            with safe_open(path, framework="numpy") as file:
                self.metadata: Mapping[str, str] = file.metadata() or {}
                self._mapping = np.memmap(path, np.uint8, "r")
                self._data = self._mapping.view(np.ndarray)
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

    def is_bytes(self, name: str) -> bool:
        """Whether a tensor is stored as U8."""
        return self._entries[name].dtype == "U8"

    def dtype(self, name: str) -> str:
        """The dtype that floats are stored in, by NumPy's name, or bfloat16; of others the name in safetensors."""
        stored = self._entries[name].dtype
        return _NUMPY_NAMES.get(stored, stored)

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> NDArray[np.float32]:
        """A tensor, or a part of it, as float32: of F32 a read-only view of the mapped file, else a copy.

        columns: None: all, and the tensor need not be a matrix

        Raises:
            ModelError: the tensor has other numbers than floats, powers of two (E8M0) and integers that float32 holds.
        """
        dtype = self._entries[name].dtype
        if dtype not in FLOATS and dtype not in TABLES and dtype != "F8_E8M0":
            raise ModelError(_unreadable(self.path, name, dtype, FLOATS))
        part = self.stored(name)
        if part.ndim:
            part = part[rows] if columns is None else part[rows, columns]
        if self._entries[name].dtype == "BF16":
            bits = part.astype(np.uint32)
            bits <<= 16
            return bits.view(np.float32)
        if dtype == "F8_E8M0":
            return powers_of_two(part)
        if dtype in TABLES and part.size and not -_EXACT <= part.min() <= part.max() <= _EXACT:
            raise ModelError(f"{self.path}: {name!r} has integers beyond {_EXACT}: no index of this model is so large")
        return part.astype(np.float32, copy=False)

    def stored(self, name: str) -> NDArray[Any]:
        """A tensor in its stored dtype, as a read-only view of the mapped file; BF16 as uint16, its bits."""
        entry = self._entries[name]
        return self._data[entry.start : entry.stop].view(_STORED[entry.dtype]).reshape(entry.shape)

    def prefer_huge_pages(self) -> None:
        """Ask the kernel to map the file in huge pages, if it can: for a file that is read as a whole, and often."""
        memory: Any = self._mapping.base
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)

    def _locate(self, file: Any) -> dict[str, _Entry]:
        """Name -> where the tensor lies. The package has checked that each begins where the one before it ends."""
        entries: dict[str, _Entry] = {}
        at = 8 + int.from_bytes(self._data[:8].tobytes(), "little")
        for name in file.offset_keys():
            tensor = file.get_slice(name)
            dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
            if dtype not in self._dtypes:
                raise ModelError(_unreadable(self.path, name, dtype, self._dtypes))
            entry = _Entry(dtype, shape, at, at + prod(shape) * _STORED[dtype].itemsize)
            entries[name], at = entry, entry.stop
        return entries


def _unreadable(path: Path, name: str, dtype: str, readable: Iterable[str]) -> str:
    return (
        f"{path}: tensor {name!r} is stored as {dtype}; {', '.join(readable)} can be read: "
        "use an unquantised version of the model"
    )


def write_safetensors(
    path: Path,
    forms: Mapping[str, TensorForm],
    tensors: Iterable[NDArray[Any]],
    metadata: Mapping[str, str] = _METADATA,
) -> None:
    """Write tensors one after the other, holding one at a time in memory.

    forms:    name -> shape and dtype, in the order of ``tensors``
    tensors:  arrays of those shapes; they are converted to the dtypes
    metadata: the file's own, beside the tensors

    Raises:
        ValueError: a tensor has another shape than its form, or there are more or fewer tensors than forms.
        OSError: the file cannot be written.
    """
    header, at = {}, 0
    for name, form in forms.items():
        end = at + prod(form.shape) * _STORED[form.dtype].itemsize
        header[name] = {"dtype": form.dtype, "shape": list(form.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps({"__metadata__": dict(metadata), **header}, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, form), values in zip(forms.items(), tensors, strict=True):
            if values.shape != form.shape:
                raise ValueError(f"{name} was announced as {form.shape} and came as {values.shape}")
            file.write(np.ascontiguousarray(values, _STORED[form.dtype]).data)
