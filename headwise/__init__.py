"""headwise: LLM serving on Ray with a KV cache managed per attention head."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "Client": "headwise.runtime.client",
    "EngineConfig": "headwise.runtime.config",
    "GenerationResult": "headwise.runtime.request",
    "HeadwiseError": "headwise.errors",
    "LocalEngine": "headwise.runtime.local",
    "SamplingParams": "headwise.runtime.request",
}

__all__ = ["Client", "EngineConfig", "GenerationResult", "HeadwiseError", "LocalEngine", "SamplingParams"]

if TYPE_CHECKING:
    from headwise.errors import HeadwiseError
    from headwise.runtime.client import Client
    from headwise.runtime.config import EngineConfig
    from headwise.runtime.local import LocalEngine
    from headwise.runtime.request import GenerationResult, SamplingParams


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that ``import headwise`` costs nothing."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'headwise' has no attribute {name!r}")
