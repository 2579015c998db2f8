"""The CUDA C++ of this package as machine code: compiled by NVRTC once per card and variant, then kept on disk."""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from headwise.kernels.cuda.driver import Driver
from headwise.kernels.cuda.files import write_whole
from headwise.kernels.cuda.launch import OVERLAPS_FROM, CubinProgram, Kernel, Program, current_card, driver_cuda
from headwise.kernels.cuda.nvrtc import MAJORS, Compiled, find_nvrtc
from headwise.kernels.cuda.parameters import cuda_parameters, waits_by_itself

SOURCES = Path(__file__).parent
"""Where the ``.cu`` files lie."""

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)

log = logging.getLogger(__name__)

Defines = Mapping[str, str | int]
"""Macros of a variant, by name."""


class Programs(Protocol):
    """Makes programs of the CUDA C++ files of this package."""

    def __call__(self, source: str, defines: Defines) -> Program:
        """The file ``source`` (``block_copy.cu``) with the macros ``defines``, ready to run."""


class CudaPrograms:
    """`Programs` on CuPy's current device, with cubins in ``directory``.

    Raises:
        ConfigError: at a call, as `cubin_path`, or the driver does not take the machine code.
    """

    def __init__(self, directory: Path, driver: Driver | None = None) -> None:
        self._directory, self._driver = directory, driver or Driver()
        self._sm, _ = current_card()
        self._newest = driver_cuda()

    def __call__(self, source: str, defines: Defines) -> Program:
        """See `Programs`."""
        path = cubin_path(self._directory, source, defines, self._sm, self._newest)
        return CudaProgram(source, CubinProgram(path, self._driver), self._sm)


class MachineCode(Protocol):
    """Kernels whose parameters must be told: see `CubinProgram`."""

    def kernel(self, name: str, parameters: str, threads: int, shared_bytes: int = 0, waits: bool = False) -> Kernel:
        """See `CubinProgram.kernel`."""


class CudaProgram:
    """`Program` of a CUDA C++ file.

    code: the same as machine code
    sm:   compute capability that it is for
    """

    def __init__(self, source: str, code: MachineCode, sm: int) -> None:
        self._text, self._code, self._can_wait = source_text(source), code, sm >= OVERLAPS_FROM

    def kernel(self, name: str, threads: int, shared_bytes: int = 0) -> Kernel:
        """See `Program.kernel`."""
        waits = self._can_wait and waits_by_itself(self._text, name)
        return self._code.kernel(name, cuda_parameters(self._text, name), threads, shared_bytes, waits)


def cubin_path(directory: Path, source: str, defines: Defines, sm: int, newest: int = MAJORS[-1]) -> Path:
    """The cubin of ``source`` with the macros ``defines`` for compute capability ``sm``; compiled if it is not there.

    ``newest`` is the latest CUDA version whose machine code is wanted: that of the driver. What is there is found
    without a compiler, and only what this driver takes: a file's name has the CUDA version of the compiler that made
    it, since nodes whose drivers differ may share a directory.

    Raises:
        ConfigError: there is no cubin, and no NVRTC to make it; or ``directory`` cannot be written.
    """
    text = source_text(source)
    options = compile_options(defines, sm)
    key = hashlib.sha256("\0".join((text, *options)).encode()).hexdigest()[:16]
    made = {major: directory / f"{Path(source).stem}-sm{sm}-cuda{major}-{key}.cubin" for major in MAJORS}
    for major, path in made.items():
        if major <= newest and path.exists():
            return path
    started = time.monotonic()
    nvrtc = find_nvrtc(sm, newest)
    path = made[nvrtc.version[0]]
    write_whole(path, nvrtc.compile(text, source, options).cubin)
    log.info("compiled %s %s for sm_%d in %.1f s: %s", source, dict(defines), sm, time.monotonic() - started, path)
    return path


def compile_source(source: str, defines: Defines, sm: int) -> Compiled:
    """``source`` compiled for compute capability ``sm``, and what is told of registers and spills. Not kept.

    Raises:
        ConfigError: there is no NVRTC, or the source does not compile.
    """
    options = (*compile_options(defines, sm), "--ptxas-options=-v")
    return find_nvrtc(sm).compile(source_text(source), source, options)


def source_text(source: str) -> str:
    """The file ``source`` with the headers of this package that it includes: all that its machine code depends on."""
    return _INCLUDE.sub(lambda match: (SOURCES / match[1]).read_text(), (SOURCES / source).read_text())


def compile_options(defines: Defines, sm: int) -> tuple[str, ...]:
    """NVRTC's options for a variant. Products and sums are not fused: every implementation is to round alike."""
    macros = tuple(f"-D{name}={value}" for name, value in sorted(defines.items()))
    return (f"--gpu-architecture=sm_{sm}", "--std=c++17", "--fmad=false", *macros)
