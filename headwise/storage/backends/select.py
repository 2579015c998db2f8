"""Opens the storage that a URL names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from headwise.errors import ConfigError
from headwise.storage.backends.base import BlockStorage, StorageNamespace
from headwise.units import parse_bytes

FILE_EXAMPLE = "file:///var/cache/headwise?capacity=50GiB"
MOONCAKE_EXAMPLE = "mooncake://10.0.0.1:50051?segment=4GiB"


def open_storage(url: str, namespace: StorageNamespace, block_bytes: int, may_lend: bool = True) -> BlockStorage:
    """The storage at ``url``, for blocks of ``block_bytes`` bytes. Raises ConfigError naming what is wrong with it.

    file:///path?capacity=50GiB
    mooncake://host:port?segment=4GiB&host=127.0.0.1&protocol=tcp   (`MooncakeConfig` tells what they mean)

    may_lend: whether this process lends Mooncake the segment; one that only asks what is stored should not
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(
            f"storage {url!r} is not a URL: {error}; write {FILE_EXAMPLE} or {MOONCAKE_EXAMPLE}"
        ) from None
    if parts.scheme == "file":
        return _open_file(url, parts, namespace, block_bytes)
    if parts.scheme == "mooncake":
        return _open_mooncake(url, parts, port, namespace, block_bytes, may_lend)
    raise ConfigError(f"storage {url!r} has an unknown scheme; write {FILE_EXAMPLE} or {MOONCAKE_EXAMPLE}")


def only_of_others(url: str, namespace: StorageNamespace) -> list[str]:
    """What the directory at ``url`` has blocks of, if it has some and none of them are of ``namespace``.

    It can be used: those blocks count towards the capacity, and are evicted in time. But who expects it to be warm
    has another model, head pattern, block size or TP size than whoever filled it.
    """
    from headwise.storage.backends.segment_space import namespaces_in

    parts = urlsplit(url)
    held = namespaces_in(Path(unquote(parts.path))) if parts.scheme == "file" else {}
    return [] if namespace.digest.hex() in held else sorted(held.values())


def _open_file(url: str, parts: SplitResult, namespace: StorageNamespace, block_bytes: int) -> BlockStorage:
    from headwise.storage.backends.file import FileStorage

    if parts.netloc or not parts.path.strip("/"):
        raise ConfigError(f"storage {url!r} names no directory of this machine; write three slashes: {FILE_EXAMPLE}")
    options = _options(url, parts, {"capacity"})
    if "capacity" not in options:
        raise ConfigError(f"storage {url!r} gives no capacity; write {FILE_EXAMPLE}")
    return FileStorage(Path(unquote(parts.path)), _size(url, "capacity", options), namespace, block_bytes)


def _open_mooncake(
    url: str, parts: SplitResult, port: int | None, namespace: StorageNamespace, block_bytes: int, may_lend: bool
) -> BlockStorage:
    from headwise.storage.backends.mooncake import MooncakeConfig, MooncakeStorage

    if not parts.hostname or not port or parts.path.strip("/"):
        raise ConfigError(f"storage {url!r} must name the master's host and port, no path; write {MOONCAKE_EXAMPLE}")
    options = _options(url, parts, {"segment", "host", "protocol"})
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    segment_bytes = _size(url, "segment", options) if "segment" in options else 0
    config = MooncakeConfig(
        f"{host}:{port}", segment_bytes if may_lend else 0, options.get("host", ""), options.get("protocol", "tcp")
    )
    return MooncakeStorage(config, namespace, block_bytes)


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
