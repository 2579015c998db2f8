"""The parameters of kernels, and a launch's arguments in memory as a driver reads them.

Types are the letters that `struct` has for them: machine code of a kernel is told neither by its arguments' types nor
by their number, so both come from where the kernel is written.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ConfigError

Argument = int | float | np.generic
"""What a parameter is given: a number, an address where it is a pointer."""

POINTER = "Q"
_OF_TRITON = {"i32": "i", "i64": "q", "fp32": "f"}
_OF_CUDA = {"int": "i", "long long": "q", "float": "f"}


def triton_parameters(types: Iterable[str]) -> str:
    """The letters of parameters of Triton's types, e.g. ``"*fp16"`` and ``"i32"``."""
    return "".join(POINTER if type_.startswith("*") else _OF_TRITON[type_] for type_ in types)


def cuda_parameters(text: str, kernel: str) -> str:
    """The letters of the parameters of ``kernel``, of a source in CUDA C++: pointers, int, long long and float.

    Raises:
        ConfigError: the source has no such kernel, or one with parameters of other types.
    """
    found = _head_of(text, kernel)
    return "".join(_letter(kernel, parameter) for parameter in found[1].split(",") if parameter.strip())


def waits_by_itself(text: str, kernel: str) -> bool:
    """Whether ``kernel``, of a source in CUDA C++, waits by itself for those before it: see `overlap.cuh`."""
    body, _, _ = text[_head_of(text, kernel).end() :].partition("\n}")
    return "wait_for_earlier()" in body


def _head_of(text: str, kernel: str) -> re.Match[str]:
    found = re.search(rf"__global__ void (?:__launch_bounds__\((?:[^()]|\([^)]*\))*\) )?{kernel}\(([^)]*)\)", text)
    if found is None:
        raise ConfigError(f"the source has no kernel {kernel!r}")
    return found


def _letter(kernel: str, parameter: str) -> str:
    type_, _, name = parameter.strip().rpartition(" ")
    if "*" in parameter:
        return POINTER
    if type_ not in _OF_CUDA:
        raise ConfigError(f"{name} of kernel {kernel} is {type_!r}: give a pointer, {', '.join(_OF_CUDA)}")
    return _OF_CUDA[type_]


class PackedArguments:
    """Memory for the arguments of a kernel's launches, of one launch at a time: each as wide as its parameter.

    letters:  of the parameters, in their order
    pointers: to each argument, an array that stays where it is: ``kernelParams`` of the driver's launches
    """

    def __init__(self, letters: str) -> None:
        self._letters = letters
        layout = struct.Struct(f"@{letters}")
        self._pack_into = layout.pack_into
        self._memory = (ctypes.c_uint64 * (layout.size // 8 + 1))()
        start = ctypes.addressof(self._memory)
        offsets = (struct.calcsize(f"@{letters[:at]}0{letter}") for at, letter in enumerate(letters))
        self.pointers = (ctypes.c_void_p * len(letters))(*(start + offset for offset in offsets))

    def pack(self, arguments: Sequence[Argument]) -> None:
        """Write those of the next launch.

        Raises:
            ValueError: they are not as many as the parameters, or a number does not fit its parameter.
        """
        try:
            self._pack_into(self._memory, 0, *arguments)
        except struct.error as error:
            raise ValueError(f"arguments {(*arguments,)} do not fit parameters {self._letters!r}: {error}") from error

    def numbers(self) -> list[NDArray[Any]]:
        """What a kernel reads where `pointers` point to, ``[1]`` each."""
        return [
            np.frombuffer(ctypes.string_at(pointer, struct.calcsize(letter)), letter)
            for letter, pointer in zip(self._letters, self.pointers, strict=True)
        ]
