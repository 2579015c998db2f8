"""The weights of a Hugging Face directory, read in the parts that a rank needs."""

from __future__ import annotations

import difflib
import json
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.loader.block_file import BLOCKS, BlockFile
from headwise.runtime.loader.safetensors_file import SafetensorsFile
from headwise.runtime.ops.quantised import GroupQuantised

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_JSON_BYTES = 64 << 20
"""Of a file that is read whole: an index of 400,000 tensors has less."""


class Checkpoint:
    """A directory with ``config.json`` and safetensors weights, in one file or in shards.

    Files are mapped when one of their tensors is first asked for. What is stored as F32 comes back as a read-only view
    of the mapped file; F16 and BF16 are widened to float32. Raises `ModelError` naming the file at fault.

    blocks: also gives what a GGUF file had quantised, as it was: the directory must have been made of one
    """

    def __init__(self, directory: Path, *, blocks: bool = False) -> None:
        self.directory = directory
        self.config = read_json(directory / "config.json")
        self._blocks = BlockFile(directory / BLOCKS) if blocks else None
        self._files: dict[str, SafetensorsFile] = {}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every tensor's name."""
        return tuple(self._file_of)

    @property
    def num_elements(self) -> int:
        """Numbers in all tensors together."""
        return sum(prod(self.shape(name)) for name in self.names)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return self._open(name).shape(name)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The whole tensor."""
        return self._open(name).read(name)

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """``tensor(name)[start:stop]``, reading no more than that."""
        self._check_range(name, 0, start, stop)
        return self._open(name).read(name, slice(start, stop))

    def columns(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """``tensor(name)[:, start:stop]`` of a matrix, reading no more than that."""
        self._check_range(name, 1, start, stop)
        return self._open(name).read(name, columns=slice(start, stop))

    def quantised_rows(self, name: str, start: int, stop: int) -> GroupQuantised | None:
        """``rows(name, start, stop)`` of a matrix as the GGUF file had it; None where that is in floating point.

        Codes of 8 bits are a read-only view of the mapped file; those of 4 are unpacked.
        """
        if self._blocks is None:
            return None
        self._check_range(name, 0, start, stop)
        return self._blocks.rows(name, start, stop)

    def quantised_columns(self, name: str, start: int, stop: int) -> GroupQuantised | None:
        """``columns(name, start, stop)`` in the same way. Raises `ConfigError` where they cut a group in two."""
        if self._blocks is None:
            return None
        self._check_range(name, 1, start, stop)
        return self._blocks.columns(name, start, stop)

    def _check_range(self, name: str, axis: int, start: int, stop: int) -> None:
        shape = self.shape(name)
        if len(shape) <= axis or not 0 <= start <= stop <= shape[axis]:
            raise ModelError(
                f"{name!r} of {self.directory} has the shape {shape}: no part {start}:{stop} of axis {axis}"
            )

    def _open(self, name: str) -> SafetensorsFile:
        file_name = self._file_of.get(name)
        if file_name is None:
            near = difflib.get_close_matches(name, self.names, n=1)
            hint = f"; the nearest it has is {near[0]!r}" if near else ""
            raise ModelError(
                f"{self.directory} lacks the tensor {name!r}{hint}; its weights do not fit its config.json: "
                "fetch the model again"
            )
        file = self._load(file_name)
        if name not in file.names:
            raise ModelError(f"{file.path} lacks the tensor {name!r} that {INDEX} places there; fetch the model again")
        return file

    @cached_property
    def _file_of(self) -> dict[str, str]:
        """Which file holds each tensor."""
        if (self.directory / SINGLE).exists():
            return dict.fromkeys(self._load(SINGLE).names, SINGLE)
        if not (self.directory / INDEX).exists():
            raise ModelError(
                f"{self.directory} has neither {SINGLE} nor {INDEX}; only safetensors weights (or a GGUF file) "
                "can be read"
            )
        return _weight_map(self.directory)

    def _load(self, file_name: str) -> SafetensorsFile:
        if file_name not in self._files:
            self._files[file_name] = SafetensorsFile(self.directory / file_name)
        return self._files[file_name]


def weight_files(directory: Path, *, blocks: bool = False) -> list[Path]:
    """The files of ``directory`` that a `Checkpoint` takes tensors from, and the one that says which are where.

    None where there are no weights. Raises `ModelError` as `Checkpoint` does.
    """
    if (directory / SINGLE).exists():
        return [directory / SINGLE, *([directory / BLOCKS] if blocks else [])]
    if not (directory / INDEX).exists():
        return []
    return [directory / name for name in (INDEX, *sorted(set(_weight_map(directory).values())))]


def _weight_map(directory: Path) -> dict[str, str]:
    """Which shard holds each tensor, by the index of ``directory``."""
    weight_map = read_json(directory / INDEX).get("weight_map")
    weight_map = weight_map if isinstance(weight_map, dict) else {}
    if not weight_map or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelError(f"{directory / INDEX} has no weight_map of file names; fetch the model again")
    for shard in sorted(set(weight_map.values())):
        # A shard's name with a path in it would read outside the model's directory.
        if Path(shard).name != shard or not (directory / shard).exists():
            raise ModelError(f"{directory} lacks the shard {shard!r} that {INDEX} names; fetch the model again")
    return weight_map


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model's directory; raises `ModelError` if it is missing or malformed."""
    return parse_json(path, read_small_file(path))


def read_small_file(path: Path) -> bytes:
    """A file of a model's directory that is no weights; raises `ModelError` if it is missing, or far too long."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_JSON_BYTES + 1)
    except FileNotFoundError:
        raise ModelError(f"{path.parent} lacks {path.name}; give a complete Hugging Face model directory") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    if len(raw) > MOST_JSON_BYTES:
        raise ModelError(f"{path} is more than {MOST_JSON_BYTES} bytes long; fetch the model again")
    return raw


def parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    """The JSON object that ``path`` holds; raises `ModelError` if it is malformed."""
    try:
        values = json.loads(raw.decode("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); fetch the model again") from None
    except RecursionError:
        raise ModelError(f"{path} is nested too deeply to be read; fetch the model again") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(values).__name__}; fetch the model again")
    return values
