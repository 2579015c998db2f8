"""What a SOCKS5 client says, in bytes."""

from __future__ import annotations

import ipaddress

HELLO = b"\x05\x01\x00"
ACCEPTED = b"\x05\x00"
ANYWHERE = b"\x01" + bytes(6)


def ask(host: str, port: int, command: int = 1) -> bytes:
    """A request for an IP address, or a name."""
    try:
        address = ipaddress.ip_address(host)
        kind = bytes((1 if address.version == 4 else 4,)) + address.packed
    except ValueError:
        kind = bytes((3, len(host))) + host.encode("latin-1")
    return bytes((5, command, 0)) + kind + port.to_bytes(2, "big")


def told(code: int) -> bytes:
    """The answer to a request."""
    return bytes((5, code, 0)) + ANYWHERE
