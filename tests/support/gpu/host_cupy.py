"""What Paddle's tensors need of CuPy, on host memory: for code that imports CuPy, where there is no GPU."""

from __future__ import annotations

import ctypes
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class HostArray(np.ndarray):
    """A NumPy array that says like CuPy's whose memory it lies in."""

    mem: Any = None

    def __new__(cls, shape: tuple[int, ...], dtype: np.dtype[Any], memptr: MemoryPointer) -> HostArray:
        assert memptr.ptr == memptr.mem.ptr
        lent = SimpleNamespace(
            __array_interface__={
                "data": (memptr.ptr, False), "shape": (memptr.mem.size,), "typestr": "|u1", "version": 3
            },
        )  # fmt: skip
        array = np.asarray(lent).view(dtype).reshape(shape).view(cls)
        array.mem = memptr.mem
        return array

    def __array_finalize__(self, source: Any) -> None:
        mem = getattr(source, "mem", None)
        if mem is not None and mem.ptr <= self.ctypes.data <= mem.ptr + mem.size:
            self.mem = mem

    @property
    def data(self) -> MemoryPointer:
        address = self.ctypes.data
        own = SimpleNamespace(ptr=address)
        return MemoryPointer(own, 0) if self.mem is None else MemoryPointer(self.mem, address - self.mem.ptr)

    def set(self, values: NDArray[Any]) -> None:
        assert type(values) is np.ndarray
        assert (values.shape, values.dtype) == (self.shape, self.dtype)
        self[...] = values


class Event:
    def __init__(self, **options: bool) -> None:
        pass

    def record(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Runtime:
    memcpyHostToDevice = 1  # noqa: N815

    def memcpyAsync(self, target: int, source: int, num_bytes: int, kind: int, stream: int) -> None:  # noqa: N802
        assert kind == self.memcpyHostToDevice
        ctypes.memmove(target, source, num_bytes)


def host_cupy() -> dict[str, ModuleType]:
    """Modules by the names under which they are imported."""
    cupy, cupyx = ModuleType("cupy"), ModuleType("cupyx")
    cupy.ndarray, cupy.asnumpy = HostArray, np.array
    cupy.cuda = SimpleNamespace(
        UnownedMemory=UnownedMemory,
        MemoryPointer=MemoryPointer,
        Event=Event,
        Device=lambda: SimpleNamespace(id=0),
        get_current_stream=lambda: SimpleNamespace(ptr=0x5000),
        runtime=Runtime(),
    )
    cupyx.empty_pinned = np.empty
    return {"cupy": cupy, "cupyx": cupyx}
