"""Which device blocks have all of what the tree says that they hold, for who reads them past the device's streams.

A step's result may come while its kernels still write: whatever the engine orders afterwards follows them on the
device. Another engine's GPU does not. So a step is marked, and workers tell when the device is through with all before
it: what the tree knew by then is settled.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.eviction import Blocks
from headwise.cache_controller.radix_tree import Residency


class Settling:
    def __init__(self, device: Residency) -> None:
        self._device = device
        self._marks: dict[int, int] = {}  # by the step that has it: generations before it
        self._settled = self._marked = 0  # generations, through with and marked
        self._is_wanted = False

    @property
    def has_work(self) -> bool:
        """Whether a step should be sent for a mark, or for word of one."""
        return self._is_wanted or bool(self._marks)

    def are_settled(self, blocks: Blocks) -> NDArray[np.bool_]:
        """Which of the attached device ``blocks [n]`` hold what they should."""
        return np.asarray(self._device.generations(blocks) < self._settled)

    def want(self, blocks: Blocks) -> None:
        """Have these attached device blocks settled."""
        if len(blocks) and int(self._device.generations(blocks).max()) >= self._marked:
            self._is_wanted = True

    def take_mark(self, step_id: int) -> bool:
        """Whether step ``step_id``, which is being sent, has a mark."""
        is_wanted, self._is_wanted = self._is_wanted, False
        if is_wanted:
            self._marked = self._marks[step_id] = self._device.num_generations
        return is_wanted

    def settled(self, step_id: int) -> None:
        """The device is through with all before the mark of that step."""
        for marked in [step for step in self._marks if step <= step_id]:
            self._settled = max(self._settled, self._marks.pop(marked))
