"""Reading a GGUF file: its metadata, and its tensors, dequantised to float32 or as they are quantised.

The format is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The ``gguf`` package dequantises.
Its reader is not used: it does not check counts (a file of 60 bytes makes it fill the memory), and it keeps an array
object for each vocabulary entry (Gemma 3 270M: 10.5 s and 740 MB, against 0.3 s and 76 MB here).
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.loader.gguf_blocks import take_apart
from headwise.runtime.ops.quantised import GroupQuantised

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""The names that `llama-gguf-split` gives parts."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies in the file.

    shape:        in NumPy's order, the fastest dimension last; GGUF writes it first
    quantization: the number of its ``GGMLQuantizationType``, which may be one of plain floats
    offset:       in bytes, from the beginning of the file
    nbytes:       size in the file
    part:         of a file in several parts, which one, from 0 on
    """

    name: str
    shape: tuple[int, ...]
    quantization: int
    offset: int
    nbytes: int
    part: int = 0


def paths_of(path: Path) -> list[Path]:
    """The files that a GGUF model is in: those of all parts, if ``path`` is called as the first of several."""
    match = _PART.fullmatch(path.name)
    if match is None or int(match["number"]) != 1:
        return [path]
    count = match["count"]
    return [path.with_name(f"{match['stem']}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]


class GgufFile:
    """A memory-mapped GGUF file, of which there may be several parts.

    path:     of the file, or of the first part
    metadata: key -> value: a string, a number, a bool, or a list of these
    tensors:  name -> where it lies

    Raises `ModelError` if the file cannot be read, is not GGUF, is truncated or corrupt, and `ImportError` without the
    ``gguf`` package.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        first = _Header(_map(path), path)
        self.metadata = first.read_metadata()
        self._parts, self.tensors = [first.data], first.read_tensors(_alignment(self.metadata))
        parts = self.metadata.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            self._read_others(parts)

    def _read_others(self, parts: int) -> None:
        """Read what all parts but the first have."""
        paths = paths_of(self.path)
        if self.metadata.get("split.no", 0) != 0 or len(paths) != parts:
            raise ModelError(
                f"{self.path} is one of {parts} parts: give the first, whose name ends in -00001-of-{parts:05}.gguf, "
                "with the others beside it, or join them with `llama-gguf-split --merge`"
            )
        for number, path in enumerate(paths[1:], start=1):
            header = _Header(_map(path), path)
            metadata = header.read_metadata()
            if (metadata.get("split.no"), metadata.get("split.count")) != (number, parts):
                raise ModelError(f"{path} is not part {number + 1} of {parts} of {self.path}; download it again")
            self._parts.append(header.data)
            self.tensors |= header.read_tensors(_alignment(metadata), number)
        told = self.metadata.get("split.tensors.count", len(self.tensors))
        if told != len(self.tensors):
            raise ModelError(
                f"{self.path} and its {parts - 1} other parts have {len(self.tensors)} tensors, for {told}: "
                "download them again"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value, or ``default``."""
        return self.metadata.get(key, default)

    def require(self, key: str) -> Any:
        """A metadata value; raises `ModelError` if the file lacks it."""
        if key not in self.metadata:
            raise ModelError(f"{self.path} lacks the metadata key {key!r}; convert or download the file again")
        return self.metadata[key]

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A tensor's values as float32, dequantised if need be.

        Raises:
            ModelError: there is no such tensor, or its type cannot be read.
        """
        found = self._find(name)
        return self.rows(name, 0, prod(found.shape[:-1])).reshape(found.shape)

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows ``start`` to ``stop`` of a tensor, all axes but the last counted as one; otherwise as `tensor`."""
        from gguf import GGMLQuantizationType, dequantize, quant_shape_to_byte_shape

        found = self._find(name)
        kind, shape = GGMLQuantizationType(found.quantization), (stop - start, found.shape[-1])
        try:
            values = dequantize(self._raw(found, start, stop).reshape(quant_shape_to_byte_shape(shape, kind)), kind)
        except NotImplementedError:
            raise ModelError(
                f"{self.path}: tensor {name!r} is stored as {kind.name}, which cannot be read; "
                "use a file quantised as Q4_K_M, Q8_0, F16 or BF16"
            ) from None
        return np.asarray(values, np.float32).reshape(shape)

    def kind(self, name: str) -> str:
        """The name of a tensor's type, such as ``Q4_K`` or ``F16``; raises `ModelError` if there is no such tensor."""
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType(self._find(name).quantization).name

    def quantised(self, name: str, start: int, stop: int) -> GroupQuantised:
        """`rows` of a tensor whose type is in `FORMATS`, without loss; raises `ModelError` without that tensor."""
        found = self._find(name)
        return take_apart(self._raw(found, start, stop), self.kind(name), (stop - start, found.shape[-1]))

    def _find(self, name: str) -> GgufTensor:
        if name not in self.tensors:
            raise ModelError(f"{self.path} lacks the tensor {name!r}; convert or download the file again")
        return self.tensors[name]

    def _raw(self, tensor: GgufTensor, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of some of a tensor's rows."""
        each = tensor.nbytes // max(1, prod(tensor.shape[:-1]))
        return np.frombuffer(self._parts[tensor.part], np.uint8, (stop - start) * each, tensor.offset + start * each)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise ModelError(f"{path} is empty; download it again") from None


def _alignment(metadata: dict[str, Any]) -> int:
    return int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))


class _Header:
    """A cursor over the header; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self._path, self._at = data, path, 0
        if self._take(4) != _MAGIC:
            raise ModelError(f"{path} is not a GGUF file: it does not start with the bytes 'GGUF'")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ModelError(f"{path} is GGUF version {version}; versions 2 and 3 (little endian) can be read")
        self._tensor_count, self._metadata_count = self._scalar("Q"), self._scalar("Q")

    def read_metadata(self) -> dict[str, Any]:
        return {self._string(): self._value(self._scalar("I")) for _ in range(self._metadata_count)}

    def read_tensors(self, alignment: int, part: int = 0) -> dict[str, GgufTensor]:
        infos = [self._tensor_info() for _ in range(self._tensor_count)]
        start = -(-self._at // max(alignment, 1)) * max(alignment, 1)
        return {name: self._tensor(name, shape, kind, start + offset, part) for name, shape, kind, offset in infos}

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._numbers("Q", self._scalar("I"))
        return name, tuple(reversed(dimensions)), self._scalar("I"), self._scalar("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int, part: int) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except ValueError:
            raise ModelError(
                f"{self._path}: tensor {name!r} has the unknown type {kind}; the file is corrupt, or newer than the "
                "installed gguf package"
            ) from None
        if not shape or shape[-1] % block:
            raise self._corrupt(f"tensor {name!r} has the shape {shape}, which is no multiple of {block}")
        nbytes = prod(shape) // block * block_bytes
        if offset + nbytes > len(self.data):
            raise self._truncated(offset + nbytes)
        return GgufTensor(name, shape, kind, offset, nbytes, part)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            element, count = self._scalar("I"), self._scalar("Q")
            if element in _SCALARS:
                return self._numbers(_SCALARS[element], count)
            return [self._value(element) for _ in range(count)]
        if kind not in _SCALARS:
            raise self._corrupt(f"the value type {kind} at byte {self._at} is unknown")
        return self._scalar(_SCALARS[kind])

    def _string(self) -> str:
        length = self._scalar("Q")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self._corrupt(f"the string before byte {self._at} is not UTF-8") from None

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _numbers(self, code: str, count: int) -> list[Any]:
        raw = self._take(count * struct.calcsize("<" + code))
        return list(struct.unpack(f"<{count}{code}", raw))

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self.data):
            raise self._truncated(end)
        part = self.data[self._at : end]
        self._at = end
        return part

    def _truncated(self, end: int) -> ModelError:
        return ModelError(
            f"{self._path} is truncated or corrupt: it should have at least {end} bytes and has {len(self.data)}; "
            "download it again"
        )

    def _corrupt(self, what: str) -> ModelError:
        return ModelError(f"{self._path} is corrupt: {what}; download it again")
