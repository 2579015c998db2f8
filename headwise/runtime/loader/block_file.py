"""The block file: a GGUF model's quantised matrices, kept without loss beside its weights converted to float32.

It is a safetensors file with a suffix of its own, so that no loader takes it for a part of the weights. A matrix
``NAME`` is stored as the tensors ``NAME.codes``, ``NAME.scale`` and, for some types, ``NAME.minimum`` (see
`GroupQuantised`), a code to a byte. Codes of 4 bits are packed two to a byte, the first of a pair in the low half.
Signed ones, -8..7, are stored with 8 added; where a type has no more than 16 codes (`BlockFormat.numbers`), each by its
place among them.

Experts have a file of their own, of the same kind, and no copy as float32: that would take up to eight times a GGUF
file's size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ConfigError, ModelError
from headwise.runtime.loader.gguf_blocks import FORMATS, BlockFormat
from headwise.runtime.loader.safetensors_file import INTEGERS, SafetensorsFile, TensorForm, write_safetensors
from headwise.runtime.ops.quantised import CodeForm, GroupQuantised

BLOCKS, EXPERTS = "model.gguf-blocks", "model.gguf-experts"
"""The block files' names in a model's directory; there is none of experts where none are kept as blocks."""

_DTYPES = {"F32": np.dtype("<f4"), **INTEGERS}
_NIBBLE_ZERO = 8
"""The stored value of code 0, where codes of 4 bits are signed."""


class BlockFile:
    """A memory-mapped block file.

    kinds: Hugging Face name -> GGUF type, such as ``Q4_K``, of every matrix of the model. The file has those matrices
           whose type is in `FORMATS`. Of one that was made of several, or changed, the type says so in words

    Raises `ModelError` if the file cannot be read, is truncated or corrupt.
    """

    def __init__(self, path: Path) -> None:
        self._file = SafetensorsFile(path, _DTYPES)
        try:
            self.kinds: Mapping[str, str] = json.loads(self._file.metadata["kinds"])
        except (KeyError, ValueError):
            raise ModelError(
                f"{path} is corrupt: it does not say what is in it; delete {path.parent}, and it is made again"
            ) from None

    def rows(self, name: str, start: int, stop: int) -> GroupQuantised | None:
        """Rows ``start`` to ``stop`` of a matrix; None if the file does not have it.

        Codes of more than 4 bits, scales and minima are read-only views of the mapped file; those of 4 are unpacked.
        """
        return self._part(name, slice(start, stop), None)

    def columns(self, name: str, start: int, stop: int) -> GroupQuantised | None:
        """Columns ``start`` to ``stop`` of a matrix, otherwise as `rows`.

        Raises:
            ConfigError: ``start`` or ``stop`` lies within a quantisation group.
        """
        form = self._form(name)
        if form is not None and (start % form.group or stop % form.group):
            raise ConfigError(
                f"weights_dtype gguf has {name} in groups of {form.group} columns, and a rank's part of it begins or "
                f"ends within one (columns {start} to {stop}): choose another tp_size, or weights_dtype bfloat16"
            )
        return self._part(name, slice(None), slice(start, stop))

    def columns_within(self, name: str, start: int, stop: int) -> NDArray[np.float32] | None:
        """Columns ``start`` to ``stop`` of a matrix as float32, wherever its groups begin; None as for `rows`."""
        form = self._form(name)
        if form is None:
            return None
        first = start // form.group * form.group
        matrix = self._part(name, slice(None), slice(first, -(-stop // form.group) * form.group))
        return None if matrix is None else matrix.dequantised()[:, start - first : stop - first]

    def shape(self, name: str) -> tuple[int, int]:
        """Rows and columns of a matrix that the file has."""
        rows, columns = self._file.shape(f"{name}.codes")
        return rows, columns * (8 // _stored_bits(FORMATS[self.kinds[name]]))

    def code_form(self, name: str) -> CodeForm | None:
        """That of a matrix; None if the file does not have it."""
        form = self._form(name)
        if form is None:
            return None
        return CodeForm("int8" if form.signed else "uint8", form.bits, form.group, form.has_minimum)

    def _form(self, name: str) -> BlockFormat | None:
        return FORMATS.get(self.kinds.get(name, ""))

    def _part(self, name: str, rows: slice, columns: slice | None) -> GroupQuantised | None:
        form = self._form(name)
        if form is None:
            return None
        codes = self._stored(f"{name}.codes", rows, columns, 8 // _stored_bits(form))
        scale = self._stored(f"{name}.scale", rows, columns, form.group)
        minimum = self._stored(f"{name}.minimum", rows, columns, form.group) if form.has_minimum else None
        return GroupQuantised(_unpacked(codes, form), scale, minimum, form.group, form.bits)

    def _stored(self, name: str, rows: slice, columns: slice | None, share: int) -> NDArray[Any]:
        """A part of a stored tensor, of which one element stands for ``share`` columns of the matrix."""
        stored = self._file.stored(name)[rows]
        return stored if columns is None else stored[:, columns.start // share : columns.stop // share]


def write_blocks(
    path: Path,
    kinds: Mapping[str, str],
    shapes: Mapping[str, tuple[int, int]],
    matrices: Iterable[GroupQuantised],
) -> None:
    """Write a file for `BlockFile`, holding one matrix at a time in memory.

    kinds:    Hugging Face name -> GGUF type, of every matrix of the model
    shapes:   Hugging Face name -> ``(rows, columns)``, of every matrix
    matrices: those whose type is in `FORMATS`, in the order of ``kinds``
    """
    forms: dict[str, TensorForm] = {}
    for name, kind in kinds.items():
        if kind in FORMATS:
            forms |= _tensor_forms(name, shapes[name], FORMATS[kind])
    kept = [FORMATS[kind] for kind in kinds.values() if kind in FORMATS]
    metadata = {"kinds": json.dumps(dict(kinds), separators=(",", ":"))}
    write_safetensors(path, forms, _tensors(matrices, kept), metadata)


def _tensor_forms(name: str, shape: tuple[int, int], form: BlockFormat) -> dict[str, TensorForm]:
    rows, columns = shape
    bits, groups = _stored_bits(form), (rows, columns // form.group)
    codes = TensorForm("I8" if form.signed and bits == 8 else "U8", (rows, columns // (8 // bits)))
    floats = ("scale", "minimum") if form.has_minimum else ("scale",)
    return {f"{name}.codes": codes, **{f"{name}.{part}": TensorForm("F32", groups) for part in floats}}


def _stored_bits(form: BlockFormat) -> int:
    return 4 if form.numbers or form.bits == 4 else 8


def _tensors(matrices: Iterable[GroupQuantised], forms: Iterable[BlockFormat]) -> Iterator[NDArray[Any]]:
    for matrix, form in zip(matrices, forms, strict=True):
        yield _packed(matrix, form)
        yield matrix.scale
        if matrix.minimum is not None:
            yield matrix.minimum


def _packed(matrix: GroupQuantised, form: BlockFormat) -> NDArray[Any]:
    """A matrix's codes in their stored form: 4 bits two to a byte, more as they are."""
    if _stored_bits(form) == 8:
        return matrix.codes
    codes = matrix.codes.view(np.uint8)
    if form.numbers:
        codes = _places(form)[codes]
    elif form.signed:
        codes = codes + np.uint8(_NIBBLE_ZERO)  # wraps around: -8 is 248, and becomes 0
    return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)


def _places(form: BlockFormat) -> NDArray[np.uint8]:
    """The place of each code (int8, by its bits) among a type's numbers."""
    found = np.zeros(256, np.uint8)
    for place, number in reversed(list(enumerate(form.numbers))):
        found[number] = place  # of a negative one from the end, as its bits say
    return found


def _unpacked(stored: NDArray[Any], form: BlockFormat) -> NDArray[Any]:
    """The reverse of `_packed`: one code to a byte, ``[rows, columns]``."""
    if _stored_bits(form) == 8:
        return stored
    codes = np.empty((*stored.shape, 2), np.uint8)
    np.bitwise_and(stored, 0x0F, out=codes[..., 0])
    np.right_shift(stored, 4, out=codes[..., 1])
    if form.numbers:
        codes = np.array(form.numbers, np.int8).view(np.uint8)[codes]
    elif form.signed:
        codes -= np.uint8(_NIBBLE_ZERO)
    unpacked = codes.reshape(len(stored), -1)
    return unpacked.view(np.int8) if form.signed else unpacked
