"""What GGUF files of models with recurrent states have in common."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_part import Part, made_of


def decay_logarithms(source: GgufFile, name: str) -> NDArray[np.float32]:
    """``A_log [heads]``; GGUF has what it is used as: ``-exp(A_log)``. Raises `ModelError` if that is not negative."""
    values = source.tensor(name).reshape(-1)
    if not (values < 0).all():
        raise ModelError(f"{source.path}: {name} must have negative numbers only; download it again")
    return np.log(-values)


def reshaped(source: GgufFile, name: str, hf: str, shape: tuple[int, ...]) -> Part:
    """The numbers of a GGUF tensor as one of that shape; raises `ModelError` if it has more or fewer."""
    check_size(source, name, shape)
    return made_of(source, hf, shape, (name,), lambda: source.tensor(name).reshape(shape))


def check_size(source: GgufFile, name: str, shape: tuple[int, ...]) -> None:
    """Raise `ModelError` unless the tensor has as many numbers as one of that shape."""
    found = source.tensors[name].shape
    if prod(found) != prod(shape):
        raise ModelError(
            f"{source.path}: {name} has the shape {found}, and the metadata say {prod(shape)} numbers; "
            "download it again"
        )
