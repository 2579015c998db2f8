"""What the configuration says of HTTP: files that go together, and where traces go."""

from __future__ import annotations

from importlib.util import find_spec
from urllib.parse import urlsplit

from headwise.errors import ConfigError


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
