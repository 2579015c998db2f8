"""A tensor of a Hugging Face model, and how it is made of a GGUF file's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.loader.gguf_blocks import FORMATS
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.ops.quantised import GroupQuantised

Change = Callable[[NDArray[Any]], NDArray[Any]]
_FLOATS = {"F16": "F16", "BF16": "BF16"}


@dataclass(frozen=True)
class Part:
    """One tensor of the Hugging Face model.

    name, shape: there
    sources:     GGUF tensors that it is made of
    values:      float32 of that shape
    kind:        of a matrix, the GGUF type that it has in the file; in words, if it is not kept as blocks for another
                 reason than its type. None: no matrix
    blocks:      the same matrix as codes, scales and minima; None: it is not kept so
    is_sole:     whether blocks are all that is kept
    dtype:       that floats are stored in, by the name in safetensors
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    values: Callable[[], NDArray[np.float32]]
    kind: str | None = None
    blocks: Callable[[], GroupQuantised] | None = None
    is_sole: bool = False
    dtype: str = "F32"


def whole(source: GgufFile, name: str, hf: str, change: Change, unit: int) -> Part:
    """The part that a GGUF tensor becomes.

    change: takes back what the GGUF converter did; see `Architecture.undo`, and `Architecture.columns` for ``unit``
    """
    shape, kind = source.tensors[name].shape, source.kind(name)

    def values() -> NDArray[np.float32]:
        return change(source.tensor(name))

    part = Part(hf, shape, (name,), values)
    if len(shape) != 2:
        return part
    if kind in FORMATS and unit % FORMATS[kind].group:
        return replace(part, kind=f"reordered {kind}")
    kept = kind in FORMATS
    return replace(part, kind=kind, blocks=(lambda: _changed(source, name, change)) if kept else None)


def _changed(source: GgufFile, name: str, change: Change) -> GroupQuantised:
    matrix = source.quantised(name, 0, source.tensors[name].shape[0])
    minimum = None if matrix.minimum is None else change(matrix.minimum)
    return replace(matrix, codes=change(matrix.codes), scale=change(matrix.scale), minimum=minimum)


def rows_of(source: GgufFile, name: str, hf: str, start: int, stop: int) -> Part:
    """A matrix that is rows ``start`` to ``stop`` of a GGUF tensor, all axes but the last counted as one."""
    kind, shape = source.kind(name), (stop - start, source.tensors[name].shape[-1])
    kept = kind in FORMATS
    return Part(
        hf,
        shape,
        (name,),
        values=lambda: source.rows(name, start, stop),
        kind=kind,
        blocks=(lambda: source.quantised(name, start, stop)) if kept else None,
        is_sole=kept,
        dtype=_FLOATS.get(kind, "F32"),
    )


def made_of(source: GgufFile, hf: str, shape: tuple[int, ...], names: tuple[str, ...], make: Callable[[], Any]) -> Part:
    """A tensor that is computed of several, or of one whose numbers change."""
    kinds = list(dict.fromkeys(source.kind(name) for name in names))
    kind = f"joined {' and '.join(kinds)}" if set(kinds) & FORMATS.keys() else kinds[0]
    return Part(hf, shape, names, values=make, kind=kind if len(shape) == 2 else None)
