"""Kernels in CUDA C++ executed on a CPU: compiled by g++ with `shim.h`, launched on NumPy arrays.

A misuse that the shim sees (`shim.h` lists them) raises AssertionError at the launch.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from headwise.kernels.cuda.launch import Grid
from headwise.kernels.cuda.programs import SOURCES, Defines

OPTIONS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-fsanitize=alignment", "-ffp-contract=off", "-w")

_one_launch = threading.Lock()
"""All libraries share the shim's state: its globals are the same symbols in each."""


class ShimKernel:
    """`Kernel` that runs at once. ``backwards``: threads and blocks take turns in descending order."""

    def __init__(self, library: Path, threads: int, backwards: bool) -> None:
        self._launch = ctypes.CDLL(str(library)).shim_launch
        self._launch.restype = ctypes.c_char_p
        self._threads, self._backwards = threads, backwards

    def __call__(self, grid: Grid, arguments: Sequence[np.generic]) -> None:
        cells = [np.array(argument) for argument in arguments]
        with _one_launch:
            error = self._launch(
                (ctypes.c_uint * 3)(*grid), self._threads, (ctypes.c_uint * len(cells))(*(c.nbytes for c in cells)),
                len(cells), (ctypes.c_void_p * len(cells))(*(c.ctypes.data for c in cells)), int(self._backwards),
            )  # fmt: skip
        assert not error, error.decode()


class ShimPrograms:
    """`headwise.kernels.cuda.programs.Programs`: libraries are built in ``directory``, once each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.backwards = False

    def __call__(self, source: str, defines: Defines) -> ShimProgram:
        return ShimProgram(SOURCES / source, defines, self._directory, self.backwards)


class ShimProgram:
    """`Program` of the CUDA C++ file ``source``, compiled with the macros ``defines``."""

    def __init__(self, source: Path, defines: Defines, directory: Path, backwards: bool = False) -> None:
        self._source, self._directory, self._backwards = source, directory, backwards
        self._defines = tuple(f"-D{name}={value}" for name, value in defines.items())

    def kernel(self, name: str, threads: int, shared_bytes: int = 0) -> ShimKernel:
        assert not shared_bytes, "the shim has no dynamic shared memory"
        return ShimKernel(_library(self._source, name, self._defines, self._directory), threads, self._backwards)


@cache
def _library(source: Path, kernel: str, defines: tuple[str, ...], directory: Path) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile CUDA C++ for the CPU")
    number = len(list(directory.glob("*.cpp")))
    main = directory / f"{source.stem}-{number}.cpp"
    main.write_text(f'#include "{Path(__file__).parent}/shim.h"\n#include "{source}"\nSHIM_KERNEL({kernel})\n')
    library = main.with_suffix(".so")
    command = [compiler, *OPTIONS, *defines, "-o", str(library), str(main)]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
    return library
