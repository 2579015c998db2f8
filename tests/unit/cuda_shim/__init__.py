"""Kernels in CUDA C++ executed on a CPU: compiled by g++ with `shim.h`, launched on NumPy arrays.

A `ShimProgram` is a `headwise.kernels.cuda.launch.Program`. A misuse that the shim sees (`shim.h` lists them) raises
AssertionError at the launch.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import headwise.kernels.cuda
from headwise.kernels.cuda.launch import Grid

SOURCES = Path(headwise.kernels.cuda.__file__).parent
OPTIONS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-fsanitize=alignment", "-ffp-contract=off", "-w")


class ShimKernel:
    """`Kernel` that runs at once. ``backwards``: threads and blocks take turns in descending order."""

    def __init__(self, library: Path, threads: int) -> None:
        self._launch = ctypes.CDLL(str(library)).shim_launch
        self._launch.restype = ctypes.c_char_p
        self._threads = threads
        self.backwards = False

    def __call__(self, grid: Grid, arguments: Sequence[np.generic]) -> None:
        cells = [np.array(argument) for argument in arguments]
        error = self._launch(
            (ctypes.c_uint * 3)(*grid), self._threads, (ctypes.c_uint * len(cells))(*(cell.nbytes for cell in cells)),
            len(cells), (ctypes.c_void_p * len(cells))(*(cell.ctypes.data for cell in cells)), int(self.backwards),
        )  # fmt: skip
        assert not error, error.decode()


class ShimProgram:
    """`Program` of the CUDA C++ ``source``, a file, compiled with the macros ``defines``."""

    def __init__(self, source: Path, defines: Mapping[str, object], directory: Path) -> None:
        self._source, self._directory = source, directory
        self._defines = tuple(f"-D{name}={value}" for name, value in defines.items())
        self.backwards = False

    def kernel(self, name: str, threads: int, shared_bytes: int = 0) -> ShimKernel:
        assert not shared_bytes, "the shim has no dynamic shared memory"
        kernel = ShimKernel(_library(self._source, name, self._defines, self._directory), threads)
        kernel.backwards = self.backwards
        return kernel


@cache
def _library(source: Path, kernel: str, defines: tuple[str, ...], directory: Path) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile CUDA C++ for the CPU")
    number = len(list(directory.glob("*.cpp")))
    main = directory / f"{source.stem}-{number}.cpp"
    main.write_text(f'#include "{Path(__file__).parent}/shim.h"\n#include "{source}"\nSHIM_KERNEL({kernel})\n')
    library = main.with_suffix(".so")
    subprocess.run([compiler, *OPTIONS, *defines, "-o", str(library), str(main)], check=True, capture_output=True)
    return library
