"""Launches by the CUDA driver, asked directly: CuPy takes longer to make what it reads of a kernel's arguments than the
driver then takes to enqueue it.

Source: CUDA Driver API 12.8 and 13.0, "Execution Control" (`cuLaunchKernelEx`, since CUDA 11.8).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

from headwise.errors import ConfigError
from headwise.kernels.cuda.parameters import Argument, PackedArguments

_CONFIG = struct.Struct("@7IPPI")
"""``CUlaunchConfig``: grid and block, dynamic shared memory, stream, and attributes: where they are, how many."""

_CONFIG_WORDS = 7

_MAY_OVERLAP = ctypes.create_string_buffer(struct.pack("@I4xi60x", 6, 1), 72)
"""``CUlaunchAttribute``: ``CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION``, which is allowed."""

_INVALID_CONTEXT = 201
"""``CUresult`` where the calling thread has no context: it has not called CUDA's runtime yet."""


class Driver:
    """The driver's calls for a launch.

    overlaps:       whether kernels that wait by themselves may begin before those in front of them have ended
    library:        the driver; by default the one of this machine
    current_stream: tells the ``cudaStream_t`` that the calling thread enqueues to; by default CuPy's
    enter_context:  gives the calling thread the device's context; by default by CuPy

    Raises:
        ConfigError: the driver is too old.
    """

    def __init__(
        self,
        library: Any | None = None,
        current_stream: Callable[[], int] | None = None,
        enter_context: Callable[[], object] | None = None,
        overlaps: bool = False,
    ) -> None:
        self.overlaps = overlaps
        self._library = library or ctypes.CDLL("libcuda.so.1")
        try:
            self.launch = self._library.cuLaunchKernelEx
        except AttributeError as error:
            raise ConfigError("the driver of this GPU is older than CUDA 11.8: update it") from error
        self.launch.argtypes = (ctypes.c_void_p,) * 4
        self.current_stream = current_stream or cupy_stream()
        self.enter_context = enter_context or _enter_context

    def reason(self, status: int) -> str:
        """What the driver says of a ``CUresult``."""
        told = [f"CUresult {status}"]
        for ask in (self._library.cuGetErrorName, self._library.cuGetErrorString):
            text = ctypes.c_char_p()
            if not ask(ctypes.c_int(status), ctypes.byref(text)) and text.value is not None:
                told.append(text.value.decode())
        return ", ".join(told)


class DriverKernel:
    """`headwise.kernels.cuda.launch.Kernel` of machine code that is loaded.

    function:   CuPy's, which keeps its code loaded; ``ptr`` is the ``CUfunction``
    parameters: their letters, see `headwise.kernels.cuda.parameters`
    waits:      by itself for what is before it on its stream, so the driver need not: see `overlap.cuh`
    """

    def __init__(
        self,
        driver: Driver,
        function: Any,
        name: str,
        parameters: str,
        threads: int,
        shared_bytes: int = 0,
        waits: bool = False,
    ) -> None:
        self._driver, self._function, self._name = driver, function, name
        self._block = threads, 1, 1, shared_bytes
        self._arguments = PackedArguments(parameters)
        self._attributes = (ctypes.addressof(_MAY_OVERLAP), 1) if waits and driver.overlaps else (0, 0)
        self._config = (ctypes.c_uint64 * _CONFIG_WORDS)()
        self._call = ctypes.addressof(self._config), function.ptr, ctypes.addressof(self._arguments.pointers), None

    def __call__(self, grid: tuple[int, int, int], arguments: Sequence[Argument]) -> None:
        """See `Kernel`. The driver has read the arguments, and all else, when it returns.

        Raises:
            ValueError: the arguments are not those of the parameters.
            RuntimeError: the driver does not take the launch.
        """
        if 0 in grid:
            return
        driver = self._driver
        self._arguments.pack(arguments)
        _CONFIG.pack_into(self._config, 0, *grid, *self._block, driver.current_stream(), *self._attributes)
        status = driver.launch(*self._call)
        if status == _INVALID_CONTEXT:
            driver.enter_context()
            status = driver.launch(*self._call)
        if status:
            threads, *_, shared_bytes = self._block
            raise RuntimeError(
                f"the driver does not launch {self._name} as {grid} blocks of {threads} threads with {shared_bytes} "
                f"bytes of dynamic shared memory: {driver.reason(status)}"
            )


def cupy_stream() -> Callable[[], int]:
    """What tells the ``cudaStream_t`` of CuPy's current stream."""
    import cupy

    current = cupy.cuda.get_current_stream
    return lambda: int(current().ptr)


def _enter_context() -> None:
    import cupy

    cupy.cuda.runtime.memGetInfo()  # any call of the runtime's does; this one is allowed at all times
