"""Names of the transports: for the configuration, which loads none of them."""

from __future__ import annotations

from headwise.errors import ConfigError

SHARED_MEMORY, TCP = "shared_memory", "tcp"

TRANSPORTS = (SHARED_MEMORY, TCP)
"""Those that there are, the best first."""


def parse_transports(text: str) -> tuple[str, ...]:
    """The transports that ``peer_transports`` names, the best first. Raises `ConfigError`."""
    if text == "auto":
        return TRANSPORTS
    if text == "none":
        return ()
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in TRANSPORTS:
            raise ConfigError(f"peer_transports has {name!r:.40}: choose auto, none, or some of {','.join(TRANSPORTS)}")
    return tuple(name for name in TRANSPORTS if name in names)
