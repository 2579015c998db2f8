"""Where a deployment's front is, and what its processes know each other by."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headwise.runtime.config.engine_config import EngineConfig
from headwise.storage.index.encryption import CurveKeys

if TYPE_CHECKING:
    from headwise.runtime.frontend.scaling import Wish


@dataclass(frozen=True)
class Front:
    """Where the scheduler and the store are, as all engines know. Both are on one node, and may move to another one.

    node:           its address, by Ray's count
    port:           of the scheduler
    store_endpoint: ``tcp://HOST:PORT``
    namespace:      of the index: which model and cache layout its blocks belong to
    """

    node: str
    port: int
    store_endpoint: str
    namespace: str


@dataclass(frozen=True)
class About:
    """What an actor says of itself to a new owner.

    front:      where it knows scheduler and store to be; None: it knows nothing
    is_leaving: whether it is being drained
    wish:       what clients asked for last, and the owner before did
    """

    front: Front | None = None
    is_leaving: bool = False
    wish: Wish | None = None


@dataclass(frozen=True)
class Keys:
    """What only a deployment's own processes have, for as long as it lives.

    secret: engines report with it
    curve:  the index's connections are encrypted with it; None: they are not
    """

    secret: str = field(repr=False)
    curve: CurveKeys | None = None

    @classmethod
    def generate(cls, config: EngineConfig) -> Keys:
        return cls(secrets.token_hex(16), CurveKeys.generate() if config.secure else None)
