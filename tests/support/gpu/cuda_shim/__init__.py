"""Kernels in CUDA C++ executed on a CPU: compiled by g++ with `shim.h`, launched on NumPy arrays.

A misuse that the shim sees (`shim.h` lists them) raises AssertionError at the launch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest

from headwise.kernels.cuda.launch import Grid
from headwise.kernels.cuda.parameters import Argument, PackedArguments, cuda_parameters
from headwise.kernels.cuda.programs import SOURCES, Defines

SHIM = Path(__file__).parent / "shim.h"
OPTIONS = (
    "-std=c++17",
    "-O1",
    "-shared",
    "-fPIC",
    "-fsanitize=alignment",
    "-ffp-contract=off",
    "-fno-gnu-unique",
    "-w",
)


def _shared() -> Path:
    path = Path(tempfile.gettempdir()) / f"headwise-cuda-shim-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path if path.stat().st_uid == os.getuid() else Path(tempfile.mkdtemp())


_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(')

LIBRARIES = _shared()
"""Where tests keep libraries, for each other and for the next run: g++ takes a second for each."""

_one_launch: dict[str, threading.Lock] = defaultdict(threading.Lock)
"""By library: the shim's state is a library's, and of one launch at a time."""


class ShimKernel:
    """`Kernel` that runs at once, on arguments that are packed as for the driver, by the letters of its parameters.

    build:     its library, built when it is first launched: most of those that are prepared never are
    backwards: threads and blocks take turns in descending order
    """

    def __init__(
        self,
        build: Callable[[], Path],
        name: str,
        parameters: str,
        threads: int,
        backwards: bool,
        shared_bytes: int = 0,
    ) -> None:
        self.name, self._build, self._shared_bytes = name, build, shared_bytes
        self._threads, self._backwards = threads, backwards
        self._packed, self._count = PackedArguments(parameters), len(parameters)
        self._widths = (ctypes.c_uint * self._count)(*map(struct.calcsize, parameters))

    @cached_property
    def _library(self) -> str:
        return str(self._build())

    @cached_property
    def _launch(self) -> Any:
        launch = ctypes.CDLL(self._library)[f"shim_launch_{self.name}"]
        launch.restype = ctypes.c_char_p
        return launch

    def __call__(self, grid: Grid, arguments: Sequence[Argument]) -> None:
        with _one_launch[self._library]:
            self._packed.pack(arguments)
            error = self._launch(
                (ctypes.c_uint * 3)(*grid), self._threads, self._shared_bytes, self._widths, self._count,
                self._packed.pointers, int(self._backwards),
            )  # fmt: skip
        assert not error, error.decode()


class ShimPrograms:
    """`headwise.kernels.cuda.programs.Programs`: libraries are built in ``directory``, once each.

    apart: a name of whose launches wait for others' in this process: their libraries have a state of their own
    """

    def __init__(self, directory: Path = LIBRARIES, apart: str = "") -> None:
        self._directory, self._apart = directory, apart
        self.backwards = False

    def __call__(self, source: str, defines: Defines) -> ShimProgram:
        return ShimProgram(SOURCES / source, defines, self._directory, self.backwards, self._apart)


class ShimProgram:
    """`Program` of the CUDA C++ file ``source``, compiled with the macros ``defines``."""

    def __init__(
        self, source: Path, defines: Defines, directory: Path, backwards: bool = False, apart: str = ""
    ) -> None:
        self._source, self._directory, self._backwards, self._apart = source, directory, backwards, apart
        self._defines = tuple(f"-D{name}={value}" for name, value in defines.items())

    def kernel(self, name: str, threads: int, shared_bytes: int = 0, parameters: str | None = None) -> ShimKernel:
        """parameters: their letters, if they are not those of the source"""
        if parameters is None:
            parameters = cuda_parameters(self._source.read_text(), name)
        return ShimKernel(self._built, name, parameters, threads, self._backwards, shared_bytes)

    def _built(self) -> Path:
        library = _library(self._source, self._defines, self._directory)
        return _copied(library, self._apart) if self._apart else library


def _copied(library: Path, apart: str) -> Path:
    """The same code in a file of its own, so that it is loaded once more."""
    copy = library.with_name(f"{library.stem}-{apart}.so")
    if not copy.exists():
        with tempfile.NamedTemporaryFile(dir=library.parent, delete=False) as scratch:
            scratch.write(library.read_bytes())
        os.replace(scratch.name, copy)
    return copy


@cache
def _library(source: Path, defines: tuple[str, ...], directory: Path) -> Path:
    """The library of a source's kernels, built where no process built it before of the same source."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile CUDA C++ for the CPU")
    sources = [SHIM, source, *sorted(SOURCES.glob("*.cuh"))]
    told = "\0".join([*(path.read_text() for path in sources), source.name, *OPTIONS, *defines])
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
