"""Files of keys: those that users have, and the one by which they know the deployment."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from headwise.errors import ConfigError
from headwise.sockets.curve import check_key, new_secret

MAX_KEY_FILE_BYTES = 1 << 20
_KEY = re.compile(r"[!-~]{8,512}")
"""Printable ASCII without spaces, as a header can bear."""


def read_keys(key: str, file: str) -> list[str]:
    """The API keys: this one, and those of a file; either may be empty. Raises `ConfigError`, which names no key."""
    keys = [key] if key else []
    if file:
        keys += _read_file(Path(file).expanduser())
    for number, each in enumerate(keys, 1):
        if not _KEY.fullmatch(each):
            raise ConfigError(f"API key {number} must have 8 to 512 characters: letters, digits and signs, no spaces")
    return keys


def _read_file(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_KEY_FILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"api_key_file {path} has no key: write one on each line")
    return keys


def server_secret(file: str) -> str:
    """The secret key in this file, which is made if it is not there; empty: a new one. Raises `ConfigError`."""
    if not file:
        return new_secret()
    path = Path(file).expanduser()
    try:
        with (
            suppress(FileExistsError),
            os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new,
        ):
            new.write(new_secret() + "\n")
        with path.open(encoding="utf-8") as old:
            secret = old.read(MAX_KEY_FILE_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"server_key_file {path}: {getattr(error, 'strerror', None) or error}") from None
    check_key(secret, f"the key in server_key_file {path}")
    return secret
