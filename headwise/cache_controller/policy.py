"""What a member of the cache may see of a sequence, and therefore what must be kept for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class HeadPolicy:
    """The visible tokens of one (layer, KV head) pair, or that it keeps a state in their place.

    ``window == 0`` means full attention. Otherwise a query at position ``p`` sees the keys at positions
    ``k <= p`` with ``k < sink`` or ``p - k < window`` (the query's own token counts as one of the window).

    is_state: a recurrent state of fixed size, which stands for all tokens up to its own and for no other number of
              them: what is kept is the live one, and checkpoints of it
    """

    window: int = 0
    sink: int = 0
    is_state: bool = False

    def __post_init__(self) -> None:
        if self.window < 0 or self.sink < 0:
            raise ValueError(f"window and sink must not be negative, got window={self.window} sink={self.sink}")
        if self.window == 0 and self.sink:
            raise ValueError(f"a full head has no sink, got sink={self.sink}; give it a window or drop the sink")
        if self.is_state and self.window:
            raise ValueError(f"a state has no window, got window={self.window}")

    @property
    def is_full(self) -> bool:
        return self.window == 0 and not self.is_state


FULL = HeadPolicy()
STATE = HeadPolicy(is_state=True)
