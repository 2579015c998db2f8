"""Which tokens of a sequence a rank keeps, where ranks keep the same members together.

Positions are dealt out in turn, so that ranks have equally many tokens of every sequence, and of every block:

    block of 8 tokens, 2 ranks    part 0: | 0 2 4 6 |    part 1: | 1 3 5 7 |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TokenShare:
    """The tokens at positions that are ``part`` modulo ``parts``; position ``p`` of all is ``p // parts`` of these."""

    part: int = 0
    parts: int = 1

    @classmethod
    def of_rank(cls, rank: int, parts: int) -> TokenShare:
        """That of a rank where each ``parts`` neighbours keep all tokens together."""
        return cls(rank % parts, parts)

    def has(self, positions: Any) -> Any:
        """Whether these positions, a number or an array, are here."""
        return positions % self.parts == self.part

    def count(self, tokens: Any) -> Any:
        """How many of a sequence's first ``tokens``, a number or an array, are here."""
        return (tokens + self.parts - 1 - self.part) // self.parts


ALL_TOKENS = TokenShare()
