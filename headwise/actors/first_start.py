"""When a deployment that starts serves, and when it has failed. Pure: no clock, no Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwise.actors.restarts import Phase
from headwise.errors import ConfigError, HeadwiseError, ModelError

ROOM_S = 2.0
"""An engine that has waited for a node for so long is not waited for any more, once another one serves."""

_OF_ALL = (ConfigError, ModelError)
"""What one engine says of the configuration or the model, the others would say too."""


@dataclass(frozen=True)
class EngineStart:
    """How far one engine is.

    waited_s: for a node that has room
    error:    why its last start failed; None: none has failed, or a later one succeeded
    """

    name: str
    phase: Phase
    waited_s: float = 0.0
    error: HeadwiseError | None = None


def is_served(engines: Sequence[EngineStart]) -> bool:
    """Whether the deployment serves, and no engine that has room is still on its first start.

    Raises the error of an engine that all would have, and that of the first one if all that have room have failed.
    """
    for engine in engines:
        if isinstance(engine.error, _OF_ALL):
            raise engine.error
    pending = [engine for engine in engines if not (engine.phase is Phase.RUNNING or engine.error)]
    if any(engine.phase is not Phase.PLACING or engine.waited_s < ROOM_S for engine in pending):
        return False
    if any(engine.phase is Phase.RUNNING for engine in engines):
        return True
    failed = [engine.error for engine in engines if engine.error]
    if failed:
        raise failed[0]
    return not engines


def has_room(engines: Sequence[EngineStart]) -> bool:
    """Whether any engine has, or had, a node with room."""
    return not engines or any(engine.error or engine.phase in (Phase.STARTING, Phase.RUNNING) for engine in engines)
