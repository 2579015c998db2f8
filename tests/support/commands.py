"""The `headwise` command, as tests call it."""

from __future__ import annotations

from headwise import EngineConfig


def as_flags(config: EngineConfig) -> list[str]:
    """What is not as by default."""
    default = EngineConfig()
    changed = {name: value for name, value in config.to_dict().items() if value != getattr(default, name)}
    return [f"--{name.replace('_', '-')}={value}" for name, value in changed.items()]
