"""Kernels compiled for cards, without a GPU, and what their machine code tells.

What a compiler makes of the same source is the same: it is kept, for other tests and for the next run.
"""

from __future__ import annotations

import hashlib
import inspect
import pickle
import re
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest
from support.gpu.cuda_shim import LIBRARIES

from headwise.kernels.cuda import cubins, nvrtc, programs
from headwise.kernels.cuda.cubins import Target, compile_variant
from headwise.kernels.cuda.files import write_whole
from headwise.kernels.cuda.launch import Variant
from headwise.kernels.cuda.nvrtc import Compiled
from headwise.kernels.cuda.programs import Defines, compile_options, compile_source, source_text

TARGETS = (80, 90, 100)
SERVED = [pytest.param(sm, marks=() if sm == 90 else pytest.mark.soak) for sm in TARGETS]
"""The same as parameters, for what takes seconds: the other cards are for `make soak`."""
Made = TypeVar("Made")


def need_nvrtc() -> None:
    """Skip where its wheel is not installed; where it is, that it is not found is a failure."""
    pytest.importorskip("nvidia.cuda_nvrtc", reason="nvidia-cuda-nvrtc-cu12 compiles the kernels, and is not installed")


def machine_code(source: str, defines: Defines, sm: int) -> Compiled:
    """``source`` compiled; where NVRTC is not installed, the test is skipped."""
    need_nvrtc()
    compiler = nvrtc.find_nvrtc(sm)
    told = (_stamp(Path(compiler.path)), compiler.version, source, source_text(source), compile_options(defines, sm))
    return _kept(lambda: compile_source(source, defines, sm), (nvrtc, programs), told)


def variant_code(variant: Variant, target: Target) -> cubins.Compiled:
    """``variant`` compiled by Triton."""
    sources = [path.read_text() for path in cubins._sources(variant.module)]
    return _kept(lambda: compile_variant(variant, target), (cubins,), (_triton(), sources, variant, target))


def parameters_of(cubin: bytes, kernel: str) -> list[int]:
    """Widths in bytes of a kernel's parameters, in their order, as the driver finds them in the machine code.

    Attributes lie in the section ``.nv.info.KERNEL``, one behind another: format, number, and a value or the size of
    one that follows. ``cuobjdump -elf`` prints the same.
    """
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections + at * size) for at in range(count)]
    (attributes,) = (
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in headers
        if cubin[headers[names][4] + name :].startswith(f".nv.info.{kernel}\0".encode())
    )
    widths, total, at = {}, 0, 0
    while at < len(attributes):
        form, number, value = struct.unpack_from("<BBH", attributes, at)
        at += 4
        if number == 0x17:  # EIATTR_KPARAM_INFO
            _, ordinal, _, flags = struct.unpack_from("<IHHI", attributes, at)
            widths[ordinal] = flags >> 18
        elif number == 0x19:  # EIATTR_CBANK_PARAM_SIZE
            total = value
        at += value if form == 4 else 0
    assert sorted(widths) == list(range(len(widths)))
    assert 0 <= total - sum(widths.values()) < 4 * len(widths), "the rest is padding"
    return [widths[ordinal] for ordinal in sorted(widths)]


def _kept(make: Callable[[], Made], by: Sequence[ModuleType], told: object) -> Made:
    """What ``make`` returns; from disk, where modules of the same text made it of the same ``told`` before."""
    texts = [inspect.getsource(module) for module in by]
    path = LIBRARIES / f"{hashlib.sha256(repr((texts, told)).encode()).hexdigest()[:32]}.pickle"
    if not path.exists():
        write_whole(path, pickle.dumps(make()))
    made: Made = pickle.loads(path.read_bytes())
    return made


@cache
def _triton() -> tuple[object, ...]:
    """Its release, its compiler and its assemblers."""
    import triton

    home = Path(triton.__file__).parent
    tools = (home / "_C" / "libtriton.so", *sorted(home.glob("backends/nvidia/bin/*")))
    return triton.__version__, *map(_stamp, tools)


def _stamp(tool: Path) -> tuple[str, float, int]:
    """What changes where another is installed."""
    found = tool.stat() if tool.exists() else None
    return str(tool), found.st_mtime if found else 0, found.st_size if found else 0


def spilled(compiled: Compiled) -> list[str]:
    """Bytes of stack and spills, as ptxas tells."""
    return re.findall(r"([1-9]\d*) bytes (?:stack frame|spill stores|spill loads)", compiled.log)


def accesses(compiled: Compiled, kind: str) -> set[str]:
    """The kinds of access to global memory, e.g. ``v4.u32``."""
    return set(re.findall(rf"\b{kind}\.global\.([.\w]*)", compiled.ptx))
