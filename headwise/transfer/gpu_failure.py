"""Whether a GPU has come to an event, or has failed. ``runtime`` is `cupy.cuda.runtime`, of whoever has imported CuPy.

After a fault (an illegal address, a card that fell off the bus) all calls of the process give its error, for ever.
CuPy's ``Event.done`` is False then, as if work were still under way: so the runtime itself is asked here.

Sources: CUDA Runtime API, "Event Management" (`cudaEventQuery`) and "Data types used by CUDA Runtime" (`cudaError`);
CuPy 14, ``cupy/cuda/stream.pyx`` and ``cupy_backends/cuda/api/runtime.pyx``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headwise.errors import GpuFailedError, first_line

_SUCCESS, _NOT_READY = 0, 600
"""``cudaSuccess`` and ``cudaErrorNotReady``."""


def is_over(runtime: Any, event: Any) -> bool:
    """Whether the GPU is through with what was enqueued before a CuPy ``event`` was recorded. Never waits.

    Raises:
        GpuFailedError: it will never be.
    """
    code = runtime.eventQuery(event.ptr)
    if code in (_SUCCESS, _NOT_READY):
        return bool(code == _SUCCESS)
    raise _failure(runtime.CUDARuntimeError(code))


@contextmanager
def told_as_failure(runtime: Any) -> Iterator[None]:
    """For calls that wait: what the runtime raises there is no fault of who asked, but of work that ran before.

    Raises:
        GpuFailedError: in place of CuPy's error.
    """
    try:
        yield
    except runtime.CUDARuntimeError as error:
        raise _failure(error) from error


def _failure(error: BaseException) -> GpuFailedError:
    return GpuFailedError(
        f"the GPU failed: {first_line(error)}; what it had not finished is lost, and this process cannot use it again"
    )
