"""``tcp://HOST:PORT``, taken apart so that two ways to write one address are equal."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

_ENDPOINT = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\[\]/:\s]+):([0-9]{1,5})")


@dataclass(frozen=True)
class Endpoint:
    """host: an IP address, without brackets, or a name in lower case"""

    host: str
    port: int

    @classmethod
    def of(cls, host: str, port: int) -> Endpoint:
        try:
            return cls(str(ipaddress.ip_address(host)), port)
        except ValueError:
            return cls(host.lower(), port)

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Raises `ValueError` unless it is ``tcp://HOST:PORT``."""
        match = _ENDPOINT.fullmatch(text)
        if match is None or not 0 < int(match[2]) < 65536:
            raise ValueError(f"{text!r:.80} is not tcp://HOST:PORT")
        return cls.of(match[1].strip("[]"), int(match[2]))

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"
