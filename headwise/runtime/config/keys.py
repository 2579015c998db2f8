"""Files of keys: those that users have, with what each may, and the one by which they know the deployment."""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from headwise.errors import ConfigError
from headwise.sockets.curve import check_key, new_secret

MAX_KEY_FILE_BYTES = 1 << 20
MAX_KEYS = 4096
LOOK_S = 1.0
"""How often it is looked whether a file of keys has changed."""
_KEY = re.compile(r"[!-~]{8,512}")
"""Printable ASCII without spaces, as a header can bear."""
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PRIORITY = re.compile(r"-?[0-9]{1,9}")
_SHARE = re.compile(r"[1-9][0-9]{0,2}")


@dataclass(frozen=True)
class ApiKey:
    """key:   itself
    tenant:   who has it: its requests are this tenant's, and it may ask for nothing else; empty: an operator, who may
              do anything
    priority: the most urgent one that its requests have, of which lower ones go first; None: any
    share:    of engines, beside a tenant that has one: see `headwise.prompt_turns`
    """

    key: str = field(repr=False)
    tenant: str = ""
    priority: int | None = None
    share: int = 1


def read_keys(key: str, file: str) -> list[ApiKey]:
    """The API keys: this one, and those of a file; either may be empty. Raises `ConfigError`, which names no key."""
    lines = [key] if key else []
    if file:
        lines += _read_file(Path(file).expanduser())
    if len(lines) > MAX_KEYS:
        raise ConfigError(f"{len(lines)} API keys are given; at most {MAX_KEYS} are allowed")
    keys = [_parse(number, line.split()) for number, line in enumerate(lines, 1)]
    if len({each.key for each in keys}) < len(set(keys)):
        raise ConfigError("an API key is given twice, and once as another tenant's or with another priority or share")
    shares: dict[str, int] = {}
    for each in keys:
        if each.tenant and shares.setdefault(each.tenant, each.share) != each.share:
            raise ConfigError(f"tenant {each.tenant} has keys with other shares: give all of them the same")
    return keys


class KeyFile:
    """The API keys, read again when their file has changed.

    key, path: see `read_keys`
    """

    def __init__(self, key: str, path: str) -> None:
        self._key, self._path = key, path
        self._read: _Stamp | None = None
        self._seen: _Stamp | None = None

    def changed(self) -> list[ApiKey] | None:
        """The keys, if there are others than when it was asked last, or it was not yet; None: there are not. A file
        that is just being written counts once it has stayed the same from one call to the next.

        Raises `ConfigError`, once for each state of a file that has no keys.
        """
        now = _stamp(self._path)
        is_settled, self._seen = self._read is None or now == self._seen, now
        if now == self._read or not is_settled:
            return None
        self._read = now
        return read_keys(self._key, self._path)


class KeyWatch:
    """Looks after a file of keys on a thread of its own: a file system that hangs holds up nobody but it."""

    def __init__(self, file: KeyFile, every_s: float = LOOK_S) -> None:
        self._file, self._every_s = file, every_s
        self._news: deque[list[ApiKey] | ConfigError] = deque()
        self._closing = threading.Event()
        threading.Thread(target=self._run, name="headwise-keys", daemon=True).start()

    def news(self) -> list[ApiKey] | None:
        """What `KeyFile.changed` told last since this was asked; None: nothing. Never waits.

        Raises `ConfigError` where the last that happened is that there are no keys; those before it are told first.
        """
        told = list(self._news)
        last = max((place for place, each in enumerate(told) if isinstance(each, list)), default=len(told) - 1)
        for _ in told[: last + 1]:
            self._news.popleft()
        newest = told[last] if told else None
        if isinstance(newest, ConfigError):
            raise newest
        return newest

    def close(self) -> None:
        """Look no more. Does not wait for the thread."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            try:
                keys = self._file.changed()
            except ConfigError as error:
                self._news.append(error)
            else:
                if keys is not None:
                    self._news.append(keys)


_Stamp = tuple[int, ...]


def _stamp(path: str) -> _Stamp:
    """Of a file's state: it differs where its text does."""
    try:
        found = Path(path).expanduser().stat()
    except OSError as error:
        return (-1, error.errno or 0)
    return found.st_mtime_ns, found.st_size, found.st_ino


def _parse(number: int, line: list[str]) -> ApiKey:
    """The key of one line, by its words, and what those behind it say."""
    key, *words = line or [""]
    if not _KEY.fullmatch(key):
        raise ConfigError(f"API key {number} must have 8 to 512 characters: letters, digits and signs, no spaces")
    tenant, priority, share = "", None, None
    for word in words:
        name, _, value = word.partition("=")
        if name == "tenant" and not tenant and _TENANT.fullmatch(value):
            tenant = value
        elif name == "priority" and priority is None and _PRIORITY.fullmatch(value):
            priority = int(value)
        elif name == "share" and share is None and _SHARE.fullmatch(value):
            share = int(value)
        else:
            raise ConfigError(
                f"API key {number}: behind a key come tenant=NAME (1 to 64 letters, digits, '.', '_' and '-'), "
                "priority=N and share=N (1 to 999), each once"
            )
    if not tenant and (priority is not None or share is not None):
        raise ConfigError(f"API key {number} has a priority or share and no tenant: an operator's requests have any")
    return ApiKey(key, tenant, priority, share or 1)


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
