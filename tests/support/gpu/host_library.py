"""The CUDA driver's library as `headwise.kernels.cuda.driver` calls it, on the host: reads what a launch gives it."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from headwise.kernels.cuda.driver import Driver

STREAM = 0x5000


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig`` of CUDA 12.8."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute``, with a value that is an int."""

    _fields_ = (
        ("id", ctypes.c_uint),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


@dataclass(frozen=True)
class Launch:
    """What `cuLaunchKernelEx` was given; ``arguments`` as the kernel reads them, ``attributes`` as (number, value)."""

    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    stream: int
    arguments: tuple[Any, ...]
    attributes: tuple[tuple[int, int], ...] = ()


class HostLibrary:
    """A driver whose kernels all have the parameters of these letters.

    launched: what was asked for, refused or not
    statuses: what the next launches answer; once there is none, 0
    """

    def __init__(self, parameters: str) -> None:
        self._parameters = parameters
        self.launched: list[Launch] = []
        self.statuses: list[int] = []
        self.stream = STREAM
        self.entered = 0

    def driver(self, overlaps: bool = False) -> Driver:
        pointer = ctypes.c_void_p
        launch = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer)(self._launch)
        named = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
        library = SimpleNamespace(
            cuLaunchKernelEx=launch,
            cuGetErrorName=named(lambda status, text: _told(status, text, b"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")),
            cuGetErrorString=named(
                lambda status, text: _told(status, text, b"too many resources requested for launch")
            ),
        )
        return Driver(library, lambda: self.stream, self._enter, overlaps)

    def _launch(self, config: int, function: int, parameters: int | None, extra: int | None) -> int:
        assert extra is None
        given = LaunchConfig.from_address(config)
        assert (given.attributes is None) == (given.num_attributes == 0)
        attributes = (LaunchAttribute * given.num_attributes).from_address(given.attributes or config)
        pointers = (ctypes.c_void_p * len(self._parameters)).from_address(parameters or 0)
        arguments = (
            struct.unpack(letter, ctypes.string_at(at, struct.calcsize(letter)))[0]
            for letter, at in zip(self._parameters, pointers, strict=True)
        )
        self.launched.append(
            Launch(
                function, tuple(given.grid), tuple(given.block), given.shared_bytes, given.stream or 0, (*arguments,),
                tuple((each.id, each.value) for each in attributes),
            )
        )  # fmt: skip
        return self.statuses.pop(0) if self.statuses else 0

    def _enter(self) -> None:
        self.entered += 1


def _told(status: int, text: Any, name: bytes) -> int:
    if status != 701:
        return 1  # CUDA_ERROR_INVALID_VALUE
    text[0] = name
    return 0
