"""Opens the storage that a URL names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from headwise.errors import ConfigError
from headwise.storage.backends.base import BlockStorage, StorageNamespace
from headwise.units import parse_bytes

if TYPE_CHECKING:
    from headwise.storage.backends.mooncake import MooncakeConfig

FILE_EXAMPLE = "file:///var/cache/headwise?capacity=50GiB"
MOONCAKE_EXAMPLE = "mooncake://10.0.0.1:50051?segment=4GiB"


def open_storage(
    url: str, namespace: StorageNamespace, block_bytes: int, may_lend: bool = True, notes: Path | None = None
) -> BlockStorage:
    """The storage at ``url``, for blocks of ``block_bytes`` bytes. Raises ConfigError naming what is wrong with it.

    file:///path?capacity=50GiB
    mooncake://host:port?segment=4GiB&host=127.0.0.1&protocol=tcp   (`MooncakeConfig` tells what they mean)

    may_lend: whether this process lends Mooncake the segment; one that only asks what is stored should not
    notes:    where to remember what was mounted (`FileStorage`)
    """
    parts = _split(url)
    if parts.scheme == "file":
        from headwise.storage.backends.file import FileStorage

        return FileStorage(*_file_options(url, parts), namespace, block_bytes, notes)
    from headwise.storage.backends.mooncake import MooncakeStorage

    config = _mooncake_config(url, parts)
    return MooncakeStorage(config if may_lend else replace(config, segment_bytes=0), namespace, block_bytes)


def check_storage(url: str) -> None:
    """Raise ConfigError if the URL says something that cannot be opened. Touches neither files nor the network."""
    parts = _split(url)
    if parts.scheme == "file":
        _file_options(url, parts)
    else:
        _mooncake_config(url, parts)


def only_of_others(url: str, namespace: StorageNamespace) -> list[str]:
    """What the directory at ``url`` has blocks of, if it has some and none of them are of ``namespace``.

    The directory can be used: those blocks count towards the capacity, and are evicted in time. But a user who expects
    cache hits has changed the model, head pattern, block size or TP size.
    """
    from headwise.storage.backends.segment_space import namespaces_in

    parts = urlsplit(url)
    held = namespaces_in(Path(unquote(parts.path))) if parts.scheme == "file" else {}
    return [] if namespace.digest.hex() in held else sorted(held.values())


def _split(url: str) -> SplitResult:
    """The URL's parts, of a known scheme."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  raises where it is none
    except ValueError as error:
        raise ConfigError(
            f"storage {url!r} is not a URL: {error}; write {FILE_EXAMPLE} or {MOONCAKE_EXAMPLE}"
        ) from None
    if parts.scheme not in ("file", "mooncake"):
        raise ConfigError(f"storage {url!r} has an unknown scheme; write {FILE_EXAMPLE} or {MOONCAKE_EXAMPLE}")
    return parts


def _file_options(url: str, parts: SplitResult) -> tuple[Path, int]:
    """The directory, and its capacity in bytes."""
    if parts.netloc or not parts.path.strip("/"):
        raise ConfigError(f"storage {url!r} names no directory of this machine; write three slashes: {FILE_EXAMPLE}")
    options = _options(url, parts, {"capacity"})
    if "capacity" not in options:
        raise ConfigError(f"storage {url!r} gives no capacity; write {FILE_EXAMPLE}")
    return Path(unquote(parts.path)), _size(url, "capacity", options)


def _mooncake_config(url: str, parts: SplitResult) -> MooncakeConfig:
    from headwise.storage.backends.mooncake import MooncakeConfig

    if not parts.hostname or not parts.port or parts.path.strip("/"):
        raise ConfigError(f"storage {url!r} must name the master's host and port, no path; write {MOONCAKE_EXAMPLE}")
    options = _options(url, parts, {"segment", "host", "protocol"})
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    segment_bytes = _size(url, "segment", options) if "segment" in options else 0
    return MooncakeConfig(
        f"{host}:{parts.port}", segment_bytes, options.get("host", ""), options.get("protocol", "tcp")
    )


def _options(url: str, parts: SplitResult, known: set[str]) -> Mapping[str, str]:
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    options = dict(pairs)
    if parts.fragment or len(options) < len(pairs) or options.keys() - known:
        raise ConfigError(f"storage {url!r}: after '?' each of {', '.join(sorted(known))} may stand once, nothing else")
    return options


def _size(url: str, name: str, options: Mapping[str, str]) -> int:
    try:
        return parse_bytes(options[name])
    except ConfigError as error:
        raise ConfigError(f"storage {url!r}: {name}={error}") from None
