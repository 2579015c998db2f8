"""Which LoRA adapters a deployment serves, as its configuration says it."""

from __future__ import annotations

import re
from pathlib import Path

from headwise.errors import ConfigError
from headwise.units import parse_pairs

MAX_ADAPTERS = 64

_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")


def parse_adapters(text: str, model: str) -> dict[str, Path]:
    """Directories by name, of ``NAME=DIRECTORY,...``; raises ConfigError if they are written wrongly."""
    pairs = parse_pairs(text, "adapters such as sql=/models/sql-lora,chat=/models/chat-lora")
    if model in pairs:
        raise ConfigError(f"an adapter cannot be called {model!r}, as the model is: give it another name")
    wrong = next((name for name in pairs if not _NAME.fullmatch(name)), None)
    if wrong is not None:
        raise ConfigError(f"an adapter is called {wrong!r:.80}: 1 to 64 letters, digits and any of '._:-' name one")
    if len(pairs) > MAX_ADAPTERS:
        raise ConfigError(f"{len(pairs)} adapters were given; at most {MAX_ADAPTERS} are served")
    return {name: Path(path).expanduser() for name, path in pairs.items()}
