"""What GGUF files of models with recurrent states have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import integer, served_layers
from headwise.runtime.loader.gguf_part import Part, made_of

RESHAPED_STATES = ("ssm_conv1d.weight", "ssm_a", "ssm_d", "ssm_norm.weight")
"""What of a state space model (Mamba-2) has another shape, or is other numbers, in GGUF."""


@dataclass(frozen=True)
class StateSpaceSizes:
    """Of a state space model.

    groups:      of heads, which share keys and queries of size ``state``
    convolution: how many tokens it sees
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    convolution: int

    @property
    def inner(self) -> int:
        """All heads' numbers of a token."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """What the convolution goes over."""
        return self.inner + 2 * self.groups * self.state


def state_space_names(at: str) -> dict[str, str]:
    """`Architecture.layer_names` of what of a state space model is in GGUF as it is. at: its name in a layer"""
    return {
        "ssm_in.weight": f"{at}.in_proj.weight",
        "ssm_conv1d.bias": f"{at}.conv1d.bias",
        "ssm_dt.bias": f"{at}.dt_bias",
        "ssm_out.weight": f"{at}.out_proj.weight",
    }


def state_space_sizes(source: GgufFile, name: str) -> StateSpaceSizes:
    """Of the architecture ``name``; raises `ModelError` if one is missing, or does not fit the others."""
    heads, inner = integer(source, f"{name}.ssm.time_step_rank"), integer(source, f"{name}.ssm.inner_size")
    if inner % heads:
        raise ModelError(f"{source.path}: {name}.ssm.inner_size {inner} is no multiple of {heads} heads")
    return StateSpaceSizes(
        heads,
        inner // heads,
        integer(source, f"{name}.ssm.group_count"),
        integer(source, f"{name}.ssm.state_size"),
        integer(source, f"{name}.ssm.conv_kernel"),
    )


def state_space_parts(source: GgufFile, at: str, hf: str, sizes: StateSpaceSizes, hidden: int) -> Iterable[Part]:
    """`RESHAPED_STATES` of one layer, as Hugging Face has them.

    at, hf: what names begin with, there and here
    hidden: numbers of what goes into it

    Raises:
        ModelError: a tensor has another size than the metadata say.
    """
    heads, decays = (sizes.heads,), f"{at}ssm_a"
    check_size(source, decays, heads)
    yield made_of(source, f"{hf}A_log", heads, (decays,), partial(decay_logarithms, source, decays))
    yield reshaped(source, f"{at}ssm_d", f"{hf}D", heads)
    yield reshaped(source, f"{at}ssm_conv1d.weight", f"{hf}conv1d.weight", (sizes.channels, 1, sizes.convolution))
    yield reshaped(source, f"{at}ssm_norm.weight", f"{hf}norm.weight", (sizes.inner,))
    check_size(source, f"{at}ssm_in.weight", (sizes.inner + sizes.channels + sizes.heads, hidden))
    check_size(source, f"{at}ssm_out.weight", (hidden, sizes.inner))


def of_some_layers(source: GgufFile, key: str, lacks: str) -> list[int]:
    """A number of each layer that is served, all the same but for those that are 0, of which not all are.

    lacks: what makes a layer's number 0, in words

    Raises:
        ModelError: the key is missing, or says something else.
    """
    layers, found = served_layers(source), source.require(key)
    every = integer(source, f"{source.require('general.architecture')}.block_count")
    listed: list[int] = found if isinstance(found, list) else [found] * layers
    numbers = listed[:layers]
    if (
        len(listed) not in (layers, every)
        or len({each for each in numbers if each}) != 1
        or not all(map(_is_count, numbers))
    ):
        raise ModelError(
            f"{source.path}: {key} must be a number for each of {layers} layers, 0 for those {lacks} and the same "
            f"for all others, of which there is at least one; got {found!r}"
        )
    return numbers


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


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
