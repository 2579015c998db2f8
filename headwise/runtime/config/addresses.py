"""Ports and hosts as people write them."""

from __future__ import annotations

import ipaddress
import re

from headwise.errors import ConfigError

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")
_NUMBERS = re.compile(r"[0-9.]+")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    return host in ("localhost", "::1") or host.startswith("127.")


def parse_ports(text: str, name: str = "engine_ports") -> range:
    """The ports of ``FIRST-LAST``, such as ``9000-9015``; empty text: none. Raises `ConfigError`."""
    if not text:
        return range(0)
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last <= 65535:
        raise ConfigError(f"{name} must be FIRST-LAST, such as 9000-9015, with ports from 1 to 65535, got {text!r:.80}")
    return range(first, last + 1)


def check_advertised(host: str) -> None:
    """Raise `ConfigError` unless clients could connect to this host: an IPv4 address, or a name."""
    if not host:
        return
    try:
        is_there = not ipaddress.IPv4Address(host).is_unspecified
    except ValueError:
        is_there = bool(_NAME.fullmatch(host)) and not _NUMBERS.fullmatch(host)
    if not is_there:
        raise ConfigError(
            f"advertise_host must be an IPv4 address or a name that clients can connect to, without a port, got "
            f"{host!r:.80}"
        )
