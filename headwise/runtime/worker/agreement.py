"""What ranks agree on, before all of them do the same."""

from __future__ import annotations

import numpy as np

from headwise.runtime.ops.comm import Communicator


class Agreement:
    """Of the ranks of ``comm``, all of which ask the same, in the same order. Raises what that raises."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def least(self, number: int) -> int:
        """The least of all ranks' numbers; up to 2**24, exactly."""
        gathered = self._comm.gather(np.array([[number]], dtype=np.float32))
        least = None if gathered is None else np.array([gathered.min()], dtype=np.int32)
        return int(self._comm.broadcast(least, (1,))[0])

    def is_so(self, is_so: bool) -> bool:
        """Whether it is so on every rank."""
        not_so = self._comm.all_reduce(np.array([not is_so], dtype=np.float32))
        return not not_so.any()
