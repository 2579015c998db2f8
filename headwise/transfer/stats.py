"""Statistics of copies, the same for every direction between the tiers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TransferStats:
    """One direction's copies since the start. Failed ones do not count as copied.

    busy_s:        seconds the stream was copying
    waited_s:      seconds of these that the forward pass stood still for them
    queued_blocks: blocks on their way now
    failed_blocks: blocks whose copy failed, or came too late
    """

    blocks: int = 0
    bytes: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0
    queued_blocks: int = 0
    failed_blocks: int = 0

    @property
    def hidden_s(self) -> float:
        """Seconds of copying that cost the forward pass nothing."""
        return max(0.0, self.busy_s - self.waited_s)

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth while copying; 0 if nothing was copied yet."""
        return self.bytes / self.busy_s if self.busy_s else 0.0


@dataclass
class TransferTotals:
    """What `TransferStats` counts, of copies that are over."""

    blocks: int = 0
    bytes: int = 0
    busy_s: float = 0.0
    failed_blocks: int = 0

    def add(self, blocks: int, num_bytes: int, busy_s: float, failed_blocks: int = 0) -> None:
        """Count a copy: ``blocks`` of ``num_bytes`` together were copied, ``failed_blocks`` were not."""
        self.blocks += blocks
        self.bytes += num_bytes
        self.busy_s += busy_s
        self.failed_blocks += failed_blocks

    def stats(self, waited_s: float, queued_blocks: int) -> TransferStats:
        return TransferStats(self.blocks, self.bytes, self.busy_s, waited_s, queued_blocks, self.failed_blocks)
