"""Requests of a trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simulation.machine import BLOCK

if TYPE_CHECKING:
    from simulation.cluster import Engine


@dataclass(eq=False)
class Request:
    """One request of the trace, and what became of it.

    path: hashes of the prompt's full blocks
    peer: number of the engine that is asked for what the chosen one lacks; -1: none
    is_apart: that engine is to compute the prompt
    target: the request and the engine for which this one's prompt is computed
    number: in which requests came to the engine that serves it
    since, turn: see `Sequence` of an engine
    began:  when its prompt was begun to be computed
    """

    name: str
    arrived: float
    path: list[bytes]
    num_tokens: int
    output: int
    engine: int = -1
    peer: int = -1
    is_apart: bool = False
    target: tuple[Request, Engine] | None = None
    number: int = 0
    since: float = 0.0
    turn: float = 0.0
    began: float = 0.0
    device: int = 0
    loaded_host: int = 0
    loaded_peer: int = 0
    loaded_storage: int = 0
    left: int = 0
    computed: int = 0
    held: list[bytes] = field(default_factory=list)
    reserved: int = 0
    first_token: float = -1.0
    ended: float = -1.0

    @property
    def order(self) -> tuple[float, int]:
        return self.turn, self.number

    @property
    def blocks(self) -> int:
        return -(-(self.num_tokens + self.output) // BLOCK)

    @property
    def loaded(self) -> int:
        """Tokens that came to the device by the host."""
        return self.loaded_host + self.loaded_peer + self.loaded_storage

    @property
    def found(self) -> int:
        """Tokens that were not computed."""
        return self.device + self.loaded
