"""Names of the transports: for the configuration, which loads none of them."""

from __future__ import annotations

from pathlib import Path

from headwise.errors import ConfigError

CUDA_IPC, SHARED_MEMORY, NIXL, MOONCAKE, TCP = "cuda_ipc", "shared_memory", "nixl", "mooncake", "tcp"

TRANSPORTS = (CUDA_IPC, SHARED_MEMORY, NIXL, MOONCAKE, TCP)
"""Those that there are, the best first."""
OF_DEVICES = (CUDA_IPC,)
"""Those that read what is on a GPU of the same node, and nothing else."""
OF_FAR_DEVICES = (NIXL,)
"""Those that read what is on a GPU of any node, and on hosts."""
BY_LIBRARIES = (NIXL, MOONCAKE)
"""Those of other packages, for RDMA. They neither encrypt nor authenticate."""


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
    if all(name in OF_DEVICES for name in names):
        raise ConfigError(
            f"peer_transports {text}: it reads what is on GPUs alone; name one for host caches, too, such as "
            f"{text},{SHARED_MEMORY}"
        )
    return tuple(name for name in TRANSPORTS if name in names)


def check_plain(text: str, is_encrypted: bool, may_be_plain: bool) -> None:
    """Raises `ConfigError` if ``peer_transports`` names what does not encrypt in a deployment that does."""
    plain = [name for name in parse_transports(text) if name in BY_LIBRARIES]
    if text != "auto" and plain and is_encrypted and not may_be_plain:
        raise ConfigError(
            f"peer_transports {','.join(plain)}: not encrypted and open to whoever reaches the ports, and this "
            "deployment is encrypted; leave it out, or say peer_plain on a network that you trust"
        )


def has_rdma(root: Path = Path("/")) -> bool:
    """Whether this machine has devices for RDMA."""
    try:
        return any((root / "sys/class/infiniband").iterdir())
    except OSError:
        return False
