"""The seam between the host halves and what runs their kernels: a GPU, or an interpreter on NumPy arrays.

Nothing here needs torch, a C compiler or Triton's own driver on the machine that serves: CuPy loads machine code from
files, and the CUDA driver launches it on CuPy's current stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headwise.errors import ConfigError
from headwise.kernels.cuda.driver import Driver, DriverKernel
from headwise.kernels.cuda.parameters import POINTER, Argument, triton_parameters

Array = Any
Grid = tuple[int, int, int]

STATIC_SHARED_BYTES = 48 * 1024
"""More dynamic shared memory than this must be asked for, kernel by kernel (CUDA C++ Programming Guide)."""


def address_of(array: Array) -> int:
    """Where the first element of a CuPy or NumPy array lies."""
    if isinstance(array, np.ndarray):
        return int(array.ctypes.data)
    address: int = array.data.ptr
    return address


def addresses_of(*arrays: Array | None) -> tuple[int, ...]:
    """The same of each; of None 0, which kernels take for no array."""
    return tuple([0 if array is None else address_of(array) for array in arrays])


OVERLAPS_FROM = 90
"""The compute capability from which on kernels may begin before those in front of them have ended."""

OVERLAPS = "OVERLAPS"
"""The constant of a Triton kernel that may: it waits by itself, see `overlap_jit`."""

_ALL_SHARED = 100
"""Percent of an SM's first-level cache for shared memory: as many blocks fit as that has room for."""


class Kernel(Protocol):
    """One kernel, ready to be launched."""

    def __call__(self, grid: Grid, arguments: Sequence[Argument]) -> None:
        """Enqueue it on the current stream, by one thread at a time.

        ``arguments`` are a number for each parameter, in their order, and of pointers the address. A grid with a zero
        launches nothing.
        """


class Program(Protocol):
    """Machine code, or what stands for it, with named kernels."""

    def kernel(self, name: str, threads: int, shared_bytes: int = 0) -> Kernel:
        """The kernel ``name``, for blocks of ``threads`` threads with ``shared_bytes`` of dynamic shared memory."""


class CubinProgram:
    """Kernels of a cubin file, on CuPy's current device.

    Raises:
        ConfigError: the driver does not take the file.
    """

    def __init__(self, path: Path, driver: Driver) -> None:
        import cupy

        self._path, self._driver = path, driver
        self._module = cupy.RawModule(path=str(path))

    def kernel(self, name: str, parameters: str, threads: int, shared_bytes: int = 0, waits: bool = False) -> Kernel:
        """See `Program.kernel`, and of ``parameters`` and ``waits`` `DriverKernel`."""
        try:
            raw = self._module.get_function(name)
            if shared_bytes > STATIC_SHARED_BYTES:
                raw.max_dynamic_shared_size_bytes = shared_bytes
                raw.preferred_shared_memory_carveout = _ALL_SHARED
            function = raw.kernel
        except Exception as error:
            raise ConfigError(
                f"the driver does not take kernel {name!r} of {self._path.name} ({error}): its compiler may be newer "
                "than the driver; update the driver, or install the Triton or CuPy made for its CUDA version"
            ) from error
        return DriverKernel(self._driver, function, name, parameters, threads, shared_bytes, waits)


@dataclass(frozen=True)
class Variant:
    """One Triton kernel and all that its machine code depends on, but for the target.

    kernel:     name of the function in ``module`` of this package
    signature:  (parameter, Triton type) of those passed at launch, e.g. ``("query", "*fp16")``, in their order
    constants:  (parameter, value) of those compiled in
    multiples:  parameters promised to be multiples of 16 (pointers: of 16 bytes)
    most_registers: of a thread, so that as many programs as there should be fit a multiprocessor; None: what is best
                    for one alone
    """

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    multiples: tuple[str, ...]
    num_warps: int
    num_stages: int
    module: str = "attention_jit"
    most_registers: int | None = None

    @property
    def waits(self) -> bool:
        """See `DriverKernel`."""
        return (OVERLAPS, True) in self.constants

    @property
    def parameters(self) -> str:
        """Their letters, see `headwise.kernels.cuda.parameters`."""
        return triton_parameters(type_ for _, type_ in self.signature)


class TritonLauncher(Protocol):
    """Runs variants of Triton kernels.

    sm: compute capability of the card, e.g. 90 for an H100; what the interpreter stands for, there.
    sms: its streaming multiprocessors: how many programs run side by side.
    """

    sm: int
    sms: int

    def prepare(self, variant: Variant) -> Kernel:
        """Have ``variant`` compiled and loaded. Its parameters are those of its signature."""

    def launch(self, variant: Variant, grid: Grid, arguments: Sequence[Argument]) -> None:
        """Enqueue ``variant``, as its kernel does. Who keeps that need not have it searched for."""


class CupyLauncher:
    """`TritonLauncher` on CuPy's current device: machine code from disk, compiled where it was never before.

    ``cubins`` is `cubins.CubinCache.get` or whatever else knows the file, kernel name, threads, shared bytes and
    number of parameters of a variant.
    """

    def __init__(self, cubins: Callable[[Variant], CubinFile], driver: Driver | None = None) -> None:
        self._cubins, self._driver = cubins, driver or Driver()
        self._kernels: dict[Variant, Kernel] = {}
        self.sm, self.sms = current_card()

    def prepare(self, variant: Variant) -> Kernel:
        """See `TritonLauncher.prepare`."""
        kernel = self._kernels.get(variant)
        if kernel is None:
            kernel = self._kernels[variant] = self._loaded(variant)
        return kernel

    def _loaded(self, variant: Variant) -> Kernel:
        file = self._cubins(variant)
        appended = file.parameters - len(variant.signature)
        parameters = variant.parameters + POINTER * appended
        program = CubinProgram(file.path, self._driver)
        kernel = program.kernel(file.name, parameters, file.threads, file.shared_bytes, variant.waits)
        return _TritonKernel(kernel, appended, file.scratch_bytes)

    def launch(self, variant: Variant, grid: Grid, arguments: Sequence[Argument]) -> None:
        """See `TritonLauncher.launch`."""
        self.prepare(variant)(grid, arguments)


class _TritonKernel:
    """`Kernel` whose last parameters are Triton's: pointers to scratch memory, how many depends on its version. The
    first one's is what descriptors are made in, of ``scratch_bytes`` a program; what profilers use has none."""

    def __init__(self, kernel: Kernel, appended: int, scratch_bytes: int) -> None:
        self._kernel, self._appended, self._scratch_bytes = kernel, (0,) * appended, scratch_bytes

    def __call__(self, grid: Grid, arguments: Sequence[Argument]) -> None:
        """See `Kernel`."""
        appended = self._appended
        if self._scratch_bytes and all(grid):
            # Given back while the kernel may still run: what takes it next is behind it on this stream.
            scratch = empty_array((math.prod(grid) * self._scratch_bytes,), np.uint8)
            appended = (address_of(scratch), *appended[1:])
        self._kernel(grid, (*arguments, *appended))


@dataclass(frozen=True)
class CubinFile:
    """Machine code of one Triton kernel on disk, how to launch it, and what the assembler said of it.

    spilled_bytes, is_serialised, scratch_bytes: see `cubins.Compiled`
    """

    path: Path
    name: str
    threads: int
    shared_bytes: int
    parameters: int
    registers: int = 0
    spilled_bytes: int = 0
    is_serialised: bool = False
    scratch_bytes: int = 0


def empty_array(shape: tuple[int, ...], dtype: Any) -> Array:
    """An uninitialised array on CuPy's current device."""
    import cupy

    return cupy.empty(shape, dtype)


def current_card() -> tuple[int, int]:
    """(compute capability, streaming multiprocessors) of CuPy's current device."""
    import cupy

    device = cupy.cuda.Device()
    return int(device.compute_capability), int(device.attributes["MultiProcessorCount"])


def driver_cuda() -> int:
    """The major CUDA version that the driver runs, e.g. 12."""
    import cupy

    return int(cupy.cuda.runtime.driverGetVersion()) // 1000
