"""headwise: LLM serving on Ray with a KV cache managed per attention head."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "Client": "headwise.runtime.client.client",
    "ClientKeys": "headwise.sockets.curve",
    "EngineConfig": "headwise.runtime.config.engine_config",
    "GenerationResult": "headwise.runtime.protocol.request",
    "HeadwiseError": "headwise.errors",
    "LocalEngine": "headwise.runtime.client.local_engine",
    "PromptItem": "headwise.runtime.protocol.prompt_items",
    "SamplingParams": "headwise.runtime.protocol.request",
}

__all__ = [
    "Client",
    "ClientKeys",
    "EngineConfig",
    "GenerationResult",
    "HeadwiseError",
    "LocalEngine",
    "PromptItem",
    "SamplingParams",
]

if TYPE_CHECKING:
    from headwise.errors import HeadwiseError
    from headwise.runtime.client.client import Client
    from headwise.runtime.client.local_engine import LocalEngine
    from headwise.runtime.config.engine_config import EngineConfig
    from headwise.runtime.protocol.prompt_items import PromptItem
    from headwise.runtime.protocol.request import GenerationResult, SamplingParams
    from headwise.sockets.curve import ClientKeys


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that ``import headwise`` costs nothing."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'headwise' has no attribute {name!r}")
