"""What recurrent states are made of, by kind."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.kernels.state_layout import StateSizes


@dataclass(frozen=True)
class StatesConfig:
    """Recurrent states that stand for keys and values in some layers.

    layers:  those layers, ascending
    members: that what each of them keeps has, over all ranks
    sizes:   of a member
    """

    layers: tuple[int, ...]
    members: int
    sizes: StateSizes


@dataclass(frozen=True)
class DeltaConfig(StatesConfig):
    """Gated delta-nets. A member is a key head and the value heads that share it."""


@dataclass(frozen=True)
class KdaConfig(StatesConfig):
    """Kimi Delta Attention. A member is a head; its decays, and its gates, are made of ``rank`` numbers of a token."""

    rank: int


@dataclass(frozen=True)
class SsmConfig(StatesConfig):
    """State space models (Mamba-2). A member is some heads of one group.

    groups:      whose heads share keys and queries; they have equally many members
    norm_groups: parts of what comes out of all heads that are normed, each by itself
    eps:         of that norm
    """

    groups: int
    norm_groups: int
    eps: float

    def group_of(self, member: int) -> int:
        """The group whose heads a member has."""
        return member * self.groups // self.members
