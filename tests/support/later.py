"""Large modules that few tests use: imported when they do, and not by every worker that collects them."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Later:
    """Stands for a module."""

    def __init__(self, name: str) -> None:
        self.__name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):  # by which pytest asks every object whether it is one of its own
            raise AttributeError(name)
        return getattr(import_module(self.__name), name)


anthropic = Later("anthropic")
openai = Later("openai")
paddle = Later("paddle")
