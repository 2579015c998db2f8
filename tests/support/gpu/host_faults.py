"""A GPU's faults, as the CUDA runtime and CuPy tell of them: once there is one, all calls return it."""

from __future__ import annotations

ILLEGAL_ADDRESS, NOT_READY = 700, 600
_NAMES = {ILLEGAL_ADDRESS: "cudaErrorIllegalAddress: an illegal memory access was encountered"}


class CUDARuntimeError(RuntimeError):
    """`cupy.cuda.runtime.CUDARuntimeError`."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(_NAMES.get(status, f"error {status}"))


class HostFaults:
    """code: that of the fault; 0: there was none"""

    code = 0

    def fault(self) -> None:
        """What a kernel does that reads where it must not."""
        self.code = ILLEGAL_ADDRESS

    def check(self) -> None:
        """What every call of the runtime does but ``cudaEventQuery``, whose code CuPy returns as it is."""
        if self.code:
            raise CUDARuntimeError(self.code)
