"""Arrays that come to the host late."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray


class LateFetch:
    """A `Fetch` that is done once it was waited for, or looked at some times: steps overlap as on a GPU."""

    def __init__(self, array: NDArray[Any], looks: int = 3) -> None:
        self._array, self._looks = array, looks

    @property
    def is_done(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    def get(self) -> NDArray[Any]:
        self._looks = 0
        return self._array
