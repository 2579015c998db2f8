"""What each engine is for, where prompts are computed apart from decoding: dealt anew whenever engines come or go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headwise.runtime.frontend.routing.base import EngineRole


@dataclass(frozen=True)
class Split:
    """How many engines only compute prompts, and how many only decode; all others serve whole requests."""

    prefill: int = 0
    decode: int = 0

    def __post_init__(self) -> None:
        if self.prefill < 0 or self.decode < 0:
            raise ValueError(f"numbers of engines must not be negative, got {self.prefill} and {self.decode}")
        if self.decode and not self.prefill:
            raise ValueError(f"{self.decode} engines that only decode need one for prompts at least")

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def of(self, engines: int) -> Split:
        """As many of ``engines`` as there are: both kinds shrink alike, and of two engines there is one of each. One
        engine alone serves whole requests, and so do all where nobody would decode."""
        if engines >= self.total and engines > self.prefill:
            return self
        if engines < 2 or not self.prefill:
            return Split()
        if not self.decode:
            return Split(engines - 1)
        prefill = min(engines - 1, max(1, round(engines * self.prefill / self.total)))
        return Split(prefill, engines - prefill)


def deal(engines: Sequence[str], split: Split, before: Mapping[str, EngineRole]) -> dict[str, EngineRole]:
    """The role of each engine, as far as it is not ``mixed``. As few engines as possible change theirs.

    engines: that serve or will, without those that leave, in an order that does not change
    before:  what they were
    """
    numbers = split.of(len(engines))
    wanted: dict[EngineRole, int] = {"prefill": numbers.prefill, "decode": numbers.decode}
    wanted["mixed"] = len(engines) - numbers.total
    roles: dict[str, EngineRole] = {}
    for name in engines:
        role = before.get(name, "mixed")
        if wanted[role]:
            wanted[role] -= 1
            roles[name] = role
    free = [role for role, count in wanted.items() for _ in range(count)]
    for name in engines:
        if name not in roles:
            roles[name] = free.pop(0)
    return {name: role for name, role in roles.items() if role != "mixed"}
