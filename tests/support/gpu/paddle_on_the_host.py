"""Paddle as a GPU worker uses it, on a CPU: its tensors' memory is lent to a CuPy that is NumPy's."""

from __future__ import annotations

import importlib
import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.gpu.host_cupy import host_cupy

WITH_CUPY = [f"headwise.runtime.ops.{name}" for name in ("cupy_lending", "paddle_gpu_ops", "step_upload")]
"""Modules that import CuPy."""


def poisoned(shape: Any, dtype: str) -> Any:
    """What `paddle.empty` gives, in the worst case."""
    import paddle

    return paddle.full(shape, float("nan") if "float" in dtype else -1 if dtype != "uint8" else 255, dtype)


@contextmanager
def cupy_on_the_host() -> Iterator[ModuleType]:
    """The module `paddle_gpu_ops`; what imported the stand-in for CuPy meanwhile is forgotten afterwards."""
    import paddle

    with pytest.MonkeyPatch.context() as patch:
        for name, module in host_cupy().items():
            patch.setitem(sys.modules, name, module)
        for name in WITH_CUPY:
            patch.delitem(sys.modules, name, raising=False)
        patch.setattr(paddle, "empty", poisoned)
        yield importlib.import_module("headwise.runtime.ops.paddle_gpu_ops")
        for name in WITH_CUPY:
            sys.modules.pop(name, None)


def die_in_every_order() -> None:
    """Tensors, arrays of them, parts of these, tensors of the parts: let go of in every order, in two threads."""
    with cupy_on_the_host() as module:
        ops = module.PaddleGpuOps("float32")

        def live_and_die() -> None:
            for order in itertools.permutations(range(5)):
                tensor = ops.tensor(np.ones((8, 8), dtype=np.float32))
                array = ops.kernel_array(tensor)
                part = ops.from_kernel_array(array[2:])
                chain: list[Any] = [tensor, array, part, ops.kernel_array(part), ops.from_kernel_array(array)]
                del tensor, array, part
                for index in order:
                    assert chain[index].sum() in (48, 64)
                    chain[index] = None

        threads = [threading.Thread(target=live_and_die) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print("all are dead")
