"""NVRTC, the run-time compiler of CUDA C++, by ctypes: to find it, and to compile with it. No GPU is needed for either.

Source: NVRTC 12.9 and 13.0, "User Interface". The functions used here are the same in both.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.errors import ConfigError, first_line

MAJORS = (12, 13)
"""CUDA versions, in the order of choice: every newer driver takes the machine code of an older compiler."""


@dataclass(frozen=True)
class Compiled:
    """Machine code of one source, the PTX it was made from, and what the compiler had to say (registers, spills)."""

    cubin: bytes
    ptx: str
    log: str


class Nvrtc:
    """One NVRTC library.

    Raises:
        OSError: it cannot be loaded.
        AttributeError: it is none, or older than CUDA 11.2.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        targets = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", targets)
        self.version = (major.value, minor.value)
        self.targets = frozenset(targets)

    def compile(self, source: str, name: str, options: Sequence[str]) -> Compiled:
        """Compile CUDA C++ ``source``, which the log calls ``name``, for the one real target that ``options`` name.

        Raises:
            ConfigError: it does not compile; the message has the compiler's log.
        """
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        try:
            flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            code = self._library.nvrtcCompileProgram(program, len(options), flags)
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if code:
                raise ConfigError(f"{name} does not compile with {self.path} {' '.join(options)}:\n{log}")
            ptx = self._read(program, "PTX").rstrip(b"\0").decode()
            return Compiled(self._read(program, "CUBIN"), ptx, log)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            raise ConfigError(f"{function} of {self.path} failed: {self._library.nvrtcGetErrorString(code).decode()}")


def find_nvrtc(sm: int, newest: int = MAJORS[-1]) -> Nvrtc:
    """The first NVRTC that can compile for compute capability ``sm`` (90 for 9.0), of CUDA ``newest`` or older.

    Looked for, for CUDA 12 and then 13: in the pip wheels (nvidia-cuda-nvrtc-cu12, nvidia-cuda-nvrtc), where the
    system's loader looks, in the CUDA toolkit that CuPy found.

    Raises:
        ConfigError: there is none; the message names each that was found and why it will not do.
    """
    refused = []
    for major, path in _candidates():
        if major > newest:
            continue
        try:
            nvrtc = Nvrtc(path)
        except (OSError, AttributeError, ConfigError) as error:
            if "/" in path:  # that the system's loader has none is no news
                refused.append(f"{path} ({first_line(error)})")
            continue
        if sm in nvrtc.targets:
            return nvrtc
        refused.append(f"{path} (CUDA {nvrtc.version[0]}.{nvrtc.version[1]} cannot compile for sm_{sm})")
    raise ConfigError(
        f"no NVRTC of CUDA {newest} or older compiles for sm_{sm}: `pip install nvidia-cuda-nvrtc-cu12` (CUDA 12) or "
        f"`pip install nvidia-cuda-nvrtc` (CUDA 13); found: {', '.join(refused) or 'none'}"
    )


def _candidates() -> Iterator[tuple[int, str]]:
    roots = _wheel_roots()
    for major in MAJORS:
        name = f"libnvrtc.so.{major}"
        folders = [root / part / "lib" for root in roots for part in ("cuda_nvrtc", f"cu{major}")]
        yield from ((major, str(folder / name)) for folder in folders if (folder / name).exists())
        yield major, name
        toolkit = _toolkit()
        if toolkit is not None:
            yield from ((major, str(path)) for path in sorted(toolkit.glob(f"lib*/{name}")))


def _wheel_roots() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(root) for root in (spec.submodule_search_locations or ())] if spec is not None else []


def _toolkit() -> Path | None:
    try:
        import cupy
    except ImportError:
        return None
    path = cupy.cuda.get_cuda_path()
    return Path(path) if path else None
