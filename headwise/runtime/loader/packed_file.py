"""One file of packed weights, which is mapped into memory and computed from as it is.

It is a safetensors file with a suffix of its own. A weight's arrays are its tensors ``NAME.ARRAY``. Its metadata have
the key, the recipe, each weight's number of elements and facts (see `PackedParts`), a CRC-32 for each array, and a
SHA-256 of all that. Every array begins at a multiple of 64 bytes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cores import usable_cores
from headwise.errors import ModelError
from headwise.runtime.loader.progress import Progress, SilentProgress
from headwise.runtime.loader.safetensors_file import (
    FLOATS,
    INTEGERS,
    WORDS,
    SafetensorsFile,
    TensorForm,
    write_safetensors,
)
from headwise.runtime.ops.base import PackedParts

ALIGNMENT = 64
"""In bytes."""

MAX_THREADS = 16
_DTYPES = {"F32": FLOATS["F32"], "F16": FLOATS["F16"], "I8": INTEGERS["I8"], **WORDS}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class DamagedError(Exception):
    """A file is not as `write_packed` wrote it, or was written under another key. The text says what is wrong."""


class StaleError(Exception):
    """A file is whole, but its weights were made by another recipe."""


def write_packed(path: Path, key: str, recipe: str, weights: Mapping[str, PackedParts], progress: Progress) -> None:
    """Write weights, by name, for `read_packed` with the same ``key`` and ``recipe``.

    Arrays are float32, float16, int8 or uint16.

    Raises:
        OSError: the file cannot be written.
        ValueError: an array's bytes are no multiple of `ALIGNMENT`.
    """
    arrays = {f"{name}.{part}": array for name, parts in weights.items() for part, array in parts.arrays.items()}
    odd = next((name for name, array in arrays.items() if array.nbytes % ALIGNMENT), None)
    if odd is not None:
        raise ValueError(f"{odd} has {arrays[odd].nbytes} bytes: what follows it would not be aligned")
    contents = json.dumps(
        {
            "key": key,
            "recipe": recipe,
            "weights": {name: [parts.elements, dict(parts.facts)] for name, parts in weights.items()},
            "checks": dict(zip(arrays, _checks(arrays, SilentProgress()), strict=True)),
        }
    )
    forms = {name: TensorForm(_NAMES[array.dtype], array.shape) for name, array in arrays.items()}
    metadata = {"contents": contents, "digest": sha256(contents.encode()).hexdigest()}
    write_safetensors(path, forms, _told(arrays, progress), metadata)


def read_packed(path: Path, key: str, recipe: str, progress: Progress) -> dict[str, PackedParts]:
    """The weights in a file, by name. Their arrays are read-only views of the mapped file.

    The whole file is read once, to check it.

    Raises:
        OSError: there is no such file, or it cannot be read.
        DamagedError: the file is truncated, its header or an array has changed, or it was written under another key.
        StaleError: it was written with another recipe.
    """
    path.open("rb").close()  # OSError for a file that is missing or not readable: it is not damaged
    try:
        file = SafetensorsFile(path, _DTYPES)
    except ModelError:
        raise DamagedError("it is truncated, or its header is corrupt") from None
    contents = _contents(file)
    if contents["key"] != key:
        raise DamagedError("it is of another model, or of other settings")
    if contents.get("recipe") != recipe:  # files before there were any have none
        raise StaleError
    checks: Mapping[str, int] = contents["checks"]
    if set(checks) != set(file.names):
        raise DamagedError("its header is corrupt")
    file.prefer_huge_pages()
    arrays = {name: file.stored(name) for name in checks}
    for name, check, expected in zip(checks, _checks(arrays, progress), checks.values(), strict=True):
        if check != expected:
            raise DamagedError(f"the bytes of {name!r} have changed")
    parts: dict[str, dict[str, NDArray[Any]]] = {name: {} for name in contents["weights"]}
    for name, array in arrays.items():
        weight, _, part = name.rpartition(".")
        parts[weight][part] = array
    return {name: PackedParts(elements, facts, parts[name]) for name, (elements, facts) in contents["weights"].items()}


def _contents(file: SafetensorsFile) -> dict[str, Any]:
    text = file.metadata.get("contents", "")
    if sha256(text.encode()).hexdigest() != file.metadata.get("digest"):
        raise DamagedError("its header is corrupt")
    contents: dict[str, Any] = json.loads(text)
    return contents


def _checks(arrays: Mapping[str, NDArray[Any]], progress: Progress) -> Iterator[int]:
    """The CRC-32 of each array's bytes, in order. Computes as many at once as there are cores."""
    threads = min(MAX_THREADS, usable_cores())
    with ThreadPoolExecutor(threads, thread_name_prefix="packed") as pool:
        checks = pool.map(lambda array: zlib.crc32(array.reshape(-1).view(np.uint8)), arrays.values())
        for check, _ in zip(checks, _told(arrays, progress), strict=True):
            yield check


def _told(arrays: Mapping[str, NDArray[Any]], progress: Progress) -> Iterator[NDArray[Any]]:
    total, done = sum(array.nbytes for array in arrays.values()), 0
    for array in arrays.values():
        progress.update(done, total)
        yield array
        done += array.nbytes
