"""What an attention head may see, and therefore what its cache must keep."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class HeadPolicy:
    """The visible tokens of one (layer, KV head) pair.

    ``window == 0`` means full attention. Otherwise a query at position ``p`` sees the keys at positions
    ``k <= p`` with ``k < sink`` or ``p - k < window`` (the query's own token counts as one of the window).
    """

    window: int = 0
    sink: int = 0

    def __post_init__(self) -> None:
        if self.window < 0 or self.sink < 0:
            raise ValueError(f"window and sink must not be negative, got window={self.window} sink={self.sink}")
        if self.window == 0 and self.sink:
            raise ValueError(f"a full head has no sink, got sink={self.sink}; give it a window or drop the sink")

    @property
    def is_full(self) -> bool:
        return self.window == 0


FULL = HeadPolicy()
