"""What the configuration says of HTTP: files that go together, and API keys."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from headwise.errors import ConfigError

MAX_KEY_FILE_BYTES = 1 << 20
_KEY = re.compile(r"[!-~]{8,512}")
"""Printable ASCII without spaces, as a header can bear."""


def check_http(port: int, other_port: int, certificate: str, key: str, max_body: int) -> None:
    """Raise `ConfigError` for values that do not go together."""
    if port and port == other_port:
        raise ConfigError(f"http and port are both {port}: they are two ports")
    if bool(certificate) != bool(key):
        raise ConfigError("http_cert and http_key go together: give both files, or none")
    if max_body < 1024:
        raise ConfigError(f"http_max_body must be at least 1KiB, got {max_body} bytes")


def check_collector(endpoint: str, port: int) -> None:
    """Raise `ConfigError` unless this is where traces could be sent; empty: nowhere."""
    if not endpoint:
        return
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or half of an IPv6 address
        is_url = False
    if not is_url:
        raise ConfigError(f"otlp_endpoint must be a URL such as http://localhost:4318, got {endpoint!r:.200}")
    if not port:
        raise ConfigError("otlp_endpoint is for spans of HTTP requests: give http, the port of OpenAI's API, too")


def check_otel() -> None:
    """Raise `ConfigError` unless what sends traces is installed."""
    try:
        is_there = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # not even a package above it
        is_there = False
    if not is_there:
        raise ConfigError("otlp_endpoint needs OpenTelemetry: pip install 'headwise[otel]', on every node")


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
