"""Which device and dtype an engine computes with where it is not configured."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from headwise.errors import ConfigError
from headwise.kernels.native_dtypes import multiplies_bfloat16
from headwise.runtime.config.engine_config import EngineConfig


def resolve_device(config: EngineConfig, gpus: int) -> EngineConfig:
    """``device`` and ``dtype`` auto as what they stand for where ``gpus`` GPUs are to be had.

    All that is configured must go with the device. The dtype depends on this machine's CPU, and blocks are named by it:
    it is resolved once for a deployment, whose other processes are given the result.

    Raises:
        ConfigError: it goes with neither device.
    """
    config = _with_device(config, gpus)
    if config.on_gpu or config.dtype != "auto":
        return config
    return replace(config, dtype="bfloat16" if _takes_bfloat16(config) else "float32")


def _with_device(config: EngineConfig, gpus: int) -> EngineConfig:
    if config.device != "auto":
        return config
    if gpus >= config.first_ranks:
        with suppress(ConfigError):
            return replace(config, device="cuda")
    return replace(config, device="cpu")


def _takes_bfloat16(config: EngineConfig) -> bool:
    """Whether bfloat16 is natural to this CPU, and to all that is configured by name."""
    fits = config.tensor_ops in ("auto", "numba") and config.kernels in ("auto", "numba")
    return fits and config.weights_dtype != "float32" and multiplies_bfloat16()
