"""What each engine is for, where prompts are computed apart from decoding: dealt anew whenever engines come or go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from headwise.runtime.config.engine_config import EngineConfig
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


@dataclass(frozen=True)
class RankSizes:
    """Tensor-parallel ranks that engines are to have, by what they are for. An engine with others can do the same, and
    does until one with these has taken its place."""

    mixed: int = 1
    prefill: int = 1
    decode: int = 1

    @classmethod
    def of(cls, config: EngineConfig) -> RankSizes:
        tp_size = config.tp_size
        return cls(tp_size, config.prefill_tp_size or tp_size, config.decode_tp_size or tp_size)

    @property
    def are_alike(self) -> bool:
        return self.mixed == self.prefill == self.decode

    def of_role(self, role: EngineRole) -> int:
        return {"mixed": self.mixed, "prefill": self.prefill, "decode": self.decode}[role]

    def to_start(self, split: Split, there: Sequence[int], count: int) -> list[int]:
        """The ranks of ``count`` engines that are to be started beside those that are ``there``, by their ranks."""
        numbers = split.of(len(there) + count)
        roles = ["decode"] * numbers.decode + ["prefill"] * numbers.prefill
        lacking = [self.of_role(role) for role in cast("list[EngineRole]", roles)]
        lacking += [self.mixed] * (len(there) + count - numbers.total)
        for ranks in there:
            if ranks in lacking:
                lacking.remove(ranks)
        return lacking[:count]


def deal(
    engines: Sequence[str],
    split: Split,
    before: Mapping[str, EngineRole],
    fits: Callable[[str, EngineRole], bool] = lambda name, role: True,
) -> dict[str, EngineRole]:
    """The role of each engine, as far as it is not ``mixed``. As few engines as possible have one that does not fit
    them, and then as few as possible change theirs.

    engines: that serve or will, without those that leave, in an order that does not change
    before:  what they were
    """
    numbers = split.of(len(engines))
    wanted: dict[EngineRole, int] = {"prefill": numbers.prefill, "decode": numbers.decode}
    wanted["mixed"] = len(engines) - numbers.total
    roles: dict[str, EngineRole] = {}

    def give(may_have: Callable[[str, EngineRole], bool]) -> None:
        for name in engines:
            role = next((role for role, count in wanted.items() if count and may_have(name, role)), None)
            if name not in roles and role is not None:
                wanted[role] -= 1
                roles[name] = role

    def is_own(name: str, role: EngineRole) -> bool:
        return role == before.get(name, "mixed")

    give(lambda name, role: is_own(name, role) and fits(name, role))
    give(fits)
    give(is_own)
    give(lambda name, role: True)
    return {name: role for name, role in roles.items() if role != "mixed"}
