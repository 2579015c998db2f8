"""With this directory in PYTHONPATH, workers of all processes that Python starts compute on an emulated GPU each.

`support` must be found there, too.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

DEVICE = "headwise.runtime.worker.device"


class _Emulating(Loader):
    """Loads `DEVICE`, whose GPUs are emulated then."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        found: Any = module
        of_this_machine = found.open_device

        def open_device(config: Any, threads: int) -> Any:
            if not config.on_gpu:
                return of_this_machine(config, threads)
            from support.gpu.cuda_shim import LIBRARIES
            from support.gpu.emulated_gpu import EmulatedGpu

            return EmulatedGpu(LIBRARIES, config.dtype_name)

        found.open_device = open_device


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != DEVICE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Emulating(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
