"""Which GPU there is, and one clear line where none can be used."""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.errors import ConfigError, first_line

INSTALL = "`pip install 'headwise[gpu]'`"
OLDEST_SM = 80
OLDEST_NUMPY = (2, 1, 2)
"""CuPy's bfloat16 needs it."""
NO_DEVICE = 100
"""``cudaErrorNoDevice``."""


PRODUCTS = {80: 1024, 86: 512, 87: 1024, 89: 512, 90: 2048, 100: 4096, 120: 512}
"""Products of bfloat16 that a multiprocessor's tensor cores add up in a clock, by the first compute capability that has
so many: what the data sheets of A100, A10, L40S, H100, B200 and RTX PRO 6000 say of whole cards, over their
multiprocessors and boost clocks."""


@dataclass(frozen=True)
class Card:
    """A GPU, as it was when it was opened.

    sm:           compute capability, e.g. 90 for an H100
    products_per_s: of bfloat16, at the highest clock: what the hardware can; 0 where the driver does not tell the clock
    """

    name: str
    sm: int
    total_bytes: int
    free_bytes: int
    products_per_s: float = 0.0


def count_cards() -> int:
    """GPUs that this process sees; 0 where CuPy or the driver is missing."""
    try:
        return int(importlib.import_module("cupy").cuda.runtime.getDeviceCount())
    except Exception:  # CuPy's own kinds come with CuPy
        return 0


def open_card(index: int = 0) -> Card:
    """GPU ``index``, looked at before anything is loaded onto it.

    Raises:
        ConfigError: CuPy is missing or made for another CUDA, NumPy is too old for it, there is no driver or too old a
            one, or no such GPU, or it is too old.
    """
    _check_numpy(np.__version__)
    try:
        cupy = importlib.import_module("cupy")
        runtime = cupy.cuda.runtime
    except Exception as error:
        raise ConfigError(
            f"device cuda needs CuPy, which cannot be imported ({first_line(error)}): {INSTALL}, or use device cpu"
        ) from None
    driver = _driver_version()
    count = _count(runtime, driver)
    if index >= count:
        raise ConfigError(f"there is no GPU {index}: this process sees {count}; look at CUDA_VISIBLE_DEVICES")
    return _card(cupy, index)


def _check_numpy(version: str) -> None:
    if release_of(version) < OLDEST_NUMPY:
        oldest = ".".join(map(str, OLDEST_NUMPY))
        raise ConfigError(
            f"device cuda needs NumPy {oldest} or newer for bfloat16, and {version} is installed: "
            f"`pip install 'numpy>={oldest},<3'`, or use device cpu"
        )


def release_of(version: str) -> tuple[int, ...]:
    """The release that a version names: ``3.10.0+git1`` is later than ``3.9.1``."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _driver_version() -> int:
    """The newest CUDA that the driver runs, such as 12080 for 12.8."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(
            f"device cuda needs the NVIDIA driver, which is not on this machine ({error}): install it, or use "
            "device cpu"
        ) from None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        raise ConfigError("the NVIDIA driver does not answer: is its kernel module loaded? See `nvidia-smi`")
    return version.value


def _count(runtime: Any, driver: int) -> int:
    built = int(runtime.runtimeGetVersion())
    if built // 1000 > driver // 1000:
        raise ConfigError(
            f"CuPy is made for CUDA {_dotted(built)}, the driver runs CUDA {_dotted(driver)} at most: update the "
            f"driver, or install cupy-cuda{driver // 1000}x in place of it"
        )
    try:
        return int(runtime.getDeviceCount())
    except Exception as error:
        if getattr(error, "status", None) == NO_DEVICE:
            return 0
        raise ConfigError(f"the GPU cannot be used: {first_line(error)}; see `nvidia-smi`") from None


def _card(cupy: Any, index: int) -> Card:
    with cupy.cuda.Device(index) as device:
        free, total = cupy.cuda.runtime.memGetInfo()
        sm = int(device.compute_capability)
        attributes = device.attributes
    name = cupy.cuda.runtime.getDeviceProperties(index)["name"]
    card = Card(
        name.decode() if isinstance(name, bytes) else str(name), sm, int(total), int(free), _products(sm, attributes)
    )
    if card.sm < OLDEST_SM:
        raise ConfigError(
            f"{card.name} has compute capability {card.sm / 10}: headwise needs {OLDEST_SM / 10} (A100) or newer; "
            "use device cpu"
        )
    return card


def _products(sm: int, attributes: Mapping[str, Any]) -> float:
    of_clock = next((PRODUCTS[first] for first in sorted(PRODUCTS, reverse=True) if first <= sm), 0)
    clock_khz, sms = (int(attributes.get(name, 0)) for name in ("ClockRate", "MultiProcessorCount"))
    return of_clock * sms * clock_khz * 1e3


def check_room(card: Card, wanted: dict[str, int]) -> None:
    """Refuse what does not fit the card: bytes by what they are for.

    Raises:
        ConfigError: naming each part and what is free.
    """
    if sum(wanted.values()) > card.free_bytes:
        parts = " + ".join(f"{num_bytes / 2**30:.1f} GiB of {what}" for what, num_bytes in wanted.items())
        raise ConfigError(
            f"{card.name} has {card.free_bytes / 2**30:.1f} of {card.total_bytes / 2**30:.1f} GiB free, which does "
            f"not hold {parts}: give a smaller kv_cache, a larger tp_size, or a larger card"
        )


def spare_bytes(card: Card, utilization: float) -> int:
    """Bytes that may still be taken of a card, of which the share ``1 - utilization`` is to stay free."""
    return max(0, card.free_bytes - round((1.0 - utilization) * card.total_bytes))


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
