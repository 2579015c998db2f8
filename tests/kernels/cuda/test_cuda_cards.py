"""What keeps a GPU from being used is told in one line, before anything is loaded onto it."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np
import pytest

from headwise.errors import ConfigError
from headwise.kernels.cuda.cards import Card, check_room, count_cards, open_card, spare_bytes
from headwise.runtime.config.device import resolve_device
from headwise.runtime.config.engine_config import EngineConfig

GIB = 1 << 30


class CudaError(RuntimeError):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Machine:
    """A driver and a CuPy, as `cards` finds them; ``None`` for what is missing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver: int | None = 12080
        self.cupy_cuda, self.sm, self.count = 12090, 90, 1
        self.error: Exception | None = None
        cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                getDeviceCount=self._count,
                runtimeGetVersion=lambda: self.cupy_cuda,
                memGetInfo=lambda: (70 * GIB, 80 * GIB),
                getDeviceProperties=lambda index: {"name": b"NVIDIA H100"},
            ),
            Device=self._device,
        )
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(ctypes, "CDLL", self._load)

    def _load(self, name: str) -> Any:
        if self.driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace(cuDriverGetVersion=self._driver_version)

    def _driver_version(self, pointer: Any) -> int:
        pointer._obj.value = self.driver
        return 0

    def _count(self) -> int:
        if self.error is not None:
            raise self.error
        return self.count

    def _device(self, index: int) -> Any:
        return _Device(str(self.sm))


class _Device:
    def __init__(self, compute_capability: str) -> None:
        self.compute_capability = compute_capability
        self.attributes = {"ClockRate": 1_830_000, "MultiProcessorCount": 132}

    def __enter__(self) -> _Device:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_card_is_described(machine: Machine) -> None:
    card = open_card()
    assert replace(card, products_per_s=0) == Card("NVIDIA H100", 90, 80 * GIB, 70 * GIB)
    assert 2 * card.products_per_s == pytest.approx(989e12, rel=2e-3), "as published"
    assert count_cards() == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"driver": None}, "needs the NVIDIA driver, which is not on this machine .*use device cpu"),
        ({"driver": 11080}, "CuPy is made for CUDA 12.9, the driver runs CUDA 11.8 at most: update .*cupy-cuda11x"),
        ({"cupy_cuda": 13000}, "CuPy is made for CUDA 13.0, the driver runs CUDA 12.8 at most: .*install cupy-cuda12x"),
        ({"count": 0}, "no GPU 0: this process sees 0; look at CUDA_VISIBLE_DEVICES"),
        ({"error": CudaError(100, "cudaErrorNoDevice")}, "no GPU 0: this process sees 0"),
        ({"error": CudaError(46, "cudaErrorDevicesUnavailable: busy")}, "cannot be used: cudaErrorDevicesUnavailable"),
        ({"sm": 75}, r"NVIDIA H100 has compute capability 7\.5: headwise needs 8\.0 \(A100\) or newer"),
    ],
)
def test_a_gpu_that_cannot_be_used_says_why(machine: Machine, changes: dict[str, Any], message: str) -> None:
    for name, value in changes.items():
        setattr(machine, name, value)
    with pytest.raises(ConfigError, match=message):
        open_card()


@pytest.mark.parametrize(
    ("version", "is_enough"), [("2.0.2", False), ("2.1.1", False), ("2.1.2", True), ("2.10.0", True)]
)
def test_a_numpy_without_cupys_bfloat16_is_refused_with_the_remedy(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, version: str, is_enough: bool
) -> None:
    monkeypatch.setattr(np, "__version__", version)
    if is_enough:
        assert open_card().sm == 90
        return
    with pytest.raises(
        ConfigError, match=rf"needs NumPy 2\.1\.2 .* {version} is installed: `pip install 'numpy>=2\.1\.2"
    ):
        open_card()


def test_without_cupy_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert count_cards() == 0
    with pytest.raises(ConfigError, match=r"needs CuPy, which cannot be imported .*pip install 'headwise\[gpu\]'"):
        open_card()


def test_what_does_not_fit_the_card_is_refused_with_each_part() -> None:
    card = Card("NVIDIA L4", 89, 24 * GIB, 22 * GIB)
    check_room(card, {"weights": 16 * GIB, "KV cache": 6 * GIB})
    with pytest.raises(ConfigError, match=r"22\.0 of 24\.0 GiB free, .*16\.0 GiB of weights \+ 7\.0 GiB of KV"):
        check_room(card, {"weights": 16 * GIB, "KV cache": 7 * GIB})


def test_a_share_of_the_card_stays_free_whoever_takes_the_rest() -> None:
    card = Card("NVIDIA H100", 90, total_bytes=80 * GIB, free_bytes=60 * GIB)
    assert spare_bytes(card, 0.9) == 52 * GIB
    assert spare_bytes(card, 0.5) == 20 * GIB
    assert spare_bytes(card, 0.2) == 0, "others have taken more than that already"


def test_auto_is_cuda_where_every_rank_can_have_a_gpu_and_all_that_is_asked_for_goes_with_it() -> None:
    assert resolve_device(EngineConfig(), gpus=0).device == "cpu"
    assert resolve_device(EngineConfig(), gpus=1).device == "cuda"
    assert resolve_device(EngineConfig(tp_size=2, replicas=2), gpus=3).device == "cpu"
    assert resolve_device(EngineConfig(tp_size=2, replicas=2), gpus=4).device == "cuda"
    assert resolve_device(EngineConfig(tensor_ops="numpy"), gpus=1).device == "cpu"
    assert resolve_device(EngineConfig(device="cpu"), gpus=8).device == "cpu"
    with pytest.raises(ConfigError, match="dtype float16 does not go with device cpu: choose auto or float32 or bfl"):
        resolve_device(EngineConfig(dtype="float16"), gpus=0)


def test_numbers_are_narrow_on_a_gpu_unless_asked_for() -> None:
    on_gpu = EngineConfig(device="cuda")
    assert (on_gpu.dtype_name, on_gpu.kv_dtype_name, on_gpu.kv_cache_bytes) == ("bfloat16", "bfloat16", None)
    mixed = EngineConfig(device="cuda", dtype="float16", kv_dtype="int8", kv_cache="1GiB")
    assert (mixed.dtype_name, mixed.kv_dtype_name, mixed.kv_cache_bytes) == ("float16", "int8", GIB)
    on_cpu = EngineConfig(device="cpu")
    assert (on_cpu.dtype_name, on_cpu.kv_dtype_name, on_cpu.kv_cache_bytes) == ("float32", "float32", GIB // 2)
    with pytest.raises(ConfigError, match="kernels numba does not go with device cuda: choose auto or cuda"):
        EngineConfig(device="cuda", kernels="numba")
