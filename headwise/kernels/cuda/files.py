"""Machine code on disk, where several processes and users may look for it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from headwise.errors import ConfigError


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that others see whole or not at all, and may read.

    Raises:
        ConfigError: its folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        raise ConfigError(
            f"machine code cannot be kept in {path.parent} ({error}): name a folder to write to"
        ) from error
