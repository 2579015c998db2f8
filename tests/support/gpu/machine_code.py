"""CUDA C++ compiled by NVRTC, and what its machine code tells."""

from __future__ import annotations

import re

import pytest

from headwise.kernels.cuda.nvrtc import Compiled
from headwise.kernels.cuda.programs import Defines, compile_source

TARGETS = (80, 90, 100)


def need_nvrtc() -> None:
    """Skip where its wheel is not installed; where it is, that it is not found is a failure."""
    pytest.importorskip("nvidia.cuda_nvrtc", reason="nvidia-cuda-nvrtc-cu12 compiles the kernels, and is not installed")


def machine_code(source: str, defines: Defines, sm: int) -> Compiled:
    """``source`` compiled; where NVRTC is not installed, the test is skipped."""
    need_nvrtc()
    return compile_source(source, defines, sm)


def spilled(compiled: Compiled) -> list[str]:
    """Bytes of stack and spills, as ptxas tells."""
    return re.findall(r"([1-9]\d*) bytes (?:stack frame|spill stores|spill loads)", compiled.log)


def accesses(compiled: Compiled, kind: str) -> set[str]:
    """The kinds of access to global memory, e.g. ``v4.u32``."""
    return set(re.findall(rf"\b{kind}\.global\.([.\w]*)", compiled.ptx))
