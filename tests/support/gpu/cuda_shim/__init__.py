"""Kernels in CUDA C++ executed on a CPU: compiled by g++ with `shim.h`, launched on NumPy arrays.

A misuse that the shim sees (`shim.h` lists them) raises AssertionError at the launch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from headwise.kernels.cuda.launch import Grid
from headwise.kernels.cuda.programs import SOURCES, Defines

SHIM = Path(__file__).parent / "shim.h"
OPTIONS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-fsanitize=alignment", "-ffp-contract=off", "-w")


def _shared() -> Path:
    path = Path(tempfile.gettempdir()) / f"headwise-cuda-shim-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path if path.stat().st_uid == os.getuid() else Path(tempfile.mkdtemp())


_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(')

LIBRARIES = _shared()
"""Where tests keep libraries, for each other and for the next run: g++ takes a second for each."""

_one_launch = threading.Lock()
"""All libraries share the shim's state: its globals are the same symbols in each."""


class ShimKernel:
    """`Kernel` that runs at once. ``backwards``: threads and blocks take turns in descending order."""

    def __init__(self, library: Path, name: str, threads: int, backwards: bool) -> None:
        self.name = name
        self._launch = ctypes.CDLL(str(library))[f"shim_launch_{name}"]
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

    def __init__(self, directory: Path = LIBRARIES) -> None:
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
        return ShimKernel(_library(self._source, self._defines, self._directory), name, threads, self._backwards)


@cache
def _library(source: Path, defines: tuple[str, ...], directory: Path) -> Path:
    """The library of a source's kernels, built where no process built it before of the same source."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile CUDA C++ for the CPU")
    sources = [SHIM, source, *sorted(SOURCES.glob("*.cuh"))]
    told = "\0".join([*(path.read_text() for path in sources), str(source), *OPTIONS, *defines])
    library = directory / f"{source.stem}-{hashlib.sha256(told.encode()).hexdigest()[:24]}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        main, made = Path(scratch) / "main.cpp", Path(scratch) / "library.so"
        kernels = "".join(f"SHIM_KERNEL({name})\n" for name in _KERNEL.findall(source.read_text()))
        main.write_text(f'#include "{SHIM}"\n#include "{source}"\n{kernels}')
        command = [compiler, *OPTIONS, *defines, "-o", str(made), str(main)]
        compiled = subprocess.run(command, capture_output=True, text=True, check=False)
        assert compiled.returncode == 0, compiled.stderr
        os.replace(made, library)
    return library
