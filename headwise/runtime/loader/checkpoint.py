"""The weights of a Hugging Face model directory. A tensor-parallel rank reads only its parts of them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.loader.block_file import BLOCKS, EXPERTS, BlockFile
from headwise.runtime.loader.safetensors_file import FLOATS, INTEGERS, TABLES, SafetensorsFile
from headwise.runtime.ops.quantised import GroupQuantised, Matrix, as_float32

QUANTISATION = "quantization_config"
"""What a config.json says of how matrices are stored."""
MODELOPT = "hf_quant_config.json"
"""Where Model Optimizer says it; some checkpoints have it there alone."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {**FLOATS, **TABLES, "U8": INTEGERS["U8"]}
"""Bytes are for models that have packed numbers of their own (MXFP4), tables for those that look experts up."""

MOST_JSON_BYTES = 64 << 20
"""The largest JSON file that is read. An index of 400,000 tensors is smaller."""


class Checkpoint:
    """A directory with ``config.json`` and safetensors weights, in one file or in shards.

    A file is mapped when one of its tensors is first asked for. What is stored as F32 is returned as a read-only view
    of the mapped file; F16 and BF16 are converted to float32, and experts of a GGUF file expanded. All methods raise
    `ModelError`, which names the file at fault, if a file or tensor is missing or corrupt, or a range lies outside a
    tensor.

    blocks: whether `kept_rows` and `kept_columns` give matrices as a GGUF file has them. The directory must
            then be one that `converted_directory` made
    keeps:  float16 or bfloat16: they give matrices that are stored so as they are; None: no others
    also:   dtypes that tensors may be stored in besides, by their names in safetensors
    """

    def __init__(
        self,
        directory: Path,
        *,
        blocks: bool = False,
        keeps: np.dtype[Any] | None = None,
        also: Mapping[str, np.dtype[Any]] = MappingProxyType({}),
    ) -> None:
        self._keeps = keeps
        self.directory, self._dtypes = directory, {**_DTYPES, **also}
        self.config = read_config(directory)
        self._blocks = BlockFile(directory / BLOCKS) if blocks else None
        self._files: dict[str, SafetensorsFile] = {}

    @cached_property
    def _experts(self) -> BlockFile | None:
        """The experts that a GGUF model has as blocks alone; None if there are none."""
        path = self.directory / EXPERTS
        return BlockFile(path) if path.exists() else None

    def _home(self, name: str) -> BlockFile | None:
        """The file of experts, if a matrix is there."""
        return self._experts if self._experts is not None and name in self._experts.kinds else None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every tensor's name."""
        return (*self._file_of, *(self._experts.kinds if self._experts else ()))

    @property
    def num_elements(self) -> int:
        """Number of elements in all tensors together; bytes count as two numbers each."""
        return sum(prod(self.shape(name)) * (2 if self._is_bytes(name) else 1) for name in self.names)

    def _is_bytes(self, name: str) -> bool:
        return not self._home(name) and self._open(name).is_bytes(name)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of or self._home(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        experts = self._home(name)
        return self._open(name).shape(name) if experts is None else experts.shape(name)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The whole tensor, as float32."""
        if self._home(name) is not None:
            return self.rows(name, 0, self.shape(name)[0])
        return self._open(name).read(name)

    def stored(self, name: str) -> NDArray[Any]:
        """The whole tensor in the dtype it is stored in, a read-only view of the mapped file; see `SafetensorsFile`."""
        return self._open(name).stored(name)

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """``tensor(name)[start:stop]``, reading no more than that."""
        self._check_range(name, 0, start, stop)
        experts = self._home(name)
        if experts is not None:
            return _expanded(experts.rows(name, start, stop))
        return self._open(name).read(name, slice(start, stop))

    def columns(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """``tensor(name)[:, start:stop]`` of a matrix, reading no more than that."""
        self._check_range(name, 1, start, stop)
        experts = self._home(name)
        if experts is not None:
            return _expanded(experts.columns_within(name, start, stop))
        return self._open(name).read(name, columns=slice(start, stop))

    def byte_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """``[start:stop]`` of a tensor that is stored as U8, a read-only view of the mapped file."""
        self._check_range(name, 0, start, stop)
        stored = self._open(name).stored(name)
        if stored.dtype != np.uint8:
            raise ModelError(f"{name!r} of {self.directory} is stored as {stored.dtype}, not as bytes")
        return stored[start:stop]

    def kept_rows(self, name: str, start: int, stop: int) -> Matrix | None:
        """``rows(name, start, stop)`` of a matrix, quantised as in the GGUF file, or in the dtype that it is stored in.

        None if the checkpoint was opened without ``blocks``, or the GGUF file has it in a type that is not in
        `FORMATS`, such as floating point; and if it was opened without ``keeps``, or has it in another dtype.
        Codes of more than 4 bits, and floats, are a read-only view of the mapped file; those of 4 are unpacked.
        """
        if self._blocks is None:
            return self._kept(name, 0, slice(start, stop))
        self._check_range(name, 0, start, stop)
        return (self._home(name) or self._blocks).rows(name, start, stop)

    def kept_columns(self, name: str, start: int, stop: int) -> Matrix | None:
        """``columns(name, start, stop)`` of a matrix, otherwise as `kept_rows`.

        Raises:
            ConfigError: ``start`` or ``stop`` lies within a quantisation group.
        """
        if self._blocks is None:
            return self._kept(name, 1, slice(start, stop))
        self._check_range(name, 1, start, stop)
        return (self._home(name) or self._blocks).columns(name, start, stop)

    def _kept(self, name: str, axis: int, part: slice) -> NDArray[Any] | None:
        """A part of a matrix along an axis, as a view of the mapped file, if it has the dtype that is kept."""
        if self._keeps is None or self._home(name) or self._open(name).dtype(name) != self._keeps.name:
            return None
        self._check_range(name, axis, part.start, part.stop)
        stored = self._open(name).stored(name).view(self._keeps)
        return stored[part] if axis == 0 else stored[:, part]

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
        """Tensor name -> name of the file that holds it."""
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
            self._files[file_name] = SafetensorsFile(self.directory / file_name, self._dtypes)
        return self._files[file_name]


def _expanded(matrix: GroupQuantised | NDArray[np.float32] | None) -> NDArray[np.float32]:
    assert matrix is not None, "it is kept as blocks alone"
    return as_float32(matrix)


def has_weights(directory: Path) -> bool:
    """Whether there are any, not whether they are all there."""
    return (directory / SINGLE).exists() or (directory / INDEX).exists()


def weight_files(directory: Path, *, blocks: bool = False) -> list[Path]:
    """The files of ``directory`` that a `Checkpoint` reads tensors from and, for shards, their index.

    An empty list if there are no weights. Raises `ModelError` if the index is corrupt or a shard is missing.

    blocks: as for `Checkpoint`
    """
    if (directory / SINGLE).exists():
        more = [directory / EXPERTS] if (directory / EXPERTS).exists() else []
        return [directory / SINGLE, *more, *([directory / BLOCKS] if blocks else [])]
    if not (directory / INDEX).exists():
        return []
    return [directory / name for name in (INDEX, *sorted(set(_weight_map(directory).values())))]


def _weight_map(directory: Path) -> dict[str, str]:
    """Tensor name -> name of its shard, from the index of ``directory``."""
    weight_map = read_json(directory / INDEX).get("weight_map")
    weight_map = weight_map if isinstance(weight_map, dict) else {}
    if not weight_map or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelError(f"{directory / INDEX} has no weight_map of file names; fetch the model again")
    for shard in sorted(set(weight_map.values())):
        # A shard's name with a path in it would read outside the model's directory.
        if Path(shard).name != shard or not (directory / shard).exists():
            raise ModelError(f"{directory} lacks the shard {shard!r} that {INDEX} names; fetch the model again")
    return weight_map


def read_config(directory: Path) -> dict[str, Any]:
    """A model's ``config.json``, with what another file may say of how it was quantised. Raises `ModelError`."""
    return with_quantisation(directory, read_json(directory / "config.json"))


def with_quantisation(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The same of a ``config.json`` that was read."""
    if config.get(QUANTISATION) is not None or not (directory / MODELOPT).is_file():
        return config
    said = read_json(directory / MODELOPT).get("quantization")
    return {**config, QUANTISATION: {"quant_method": "modelopt", **(said if isinstance(said, dict) else {})}}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model's directory.

    Raises:
        ModelError: the file is missing, cannot be read, is longer than `MOST_JSON_BYTES` or holds no JSON object.
    """
    return parse_json(path, read_small_file(path))


def read_small_file(path: Path) -> bytes:
    """The bytes of a file of a model's directory, other than weights.

    Raises:
        ModelError: the file is missing, cannot be read or is longer than `MOST_JSON_BYTES`.
    """
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
    """The JSON object in ``raw``, the bytes of ``path``; raises `ModelError` if they are no JSON object."""
    try:
        values = json.loads(raw.decode("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); fetch the model again") from None
    except RecursionError:
        raise ModelError(f"{path} is nested too deeply to be read; fetch the model again") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(values).__name__}; fetch the model again")
    return values
