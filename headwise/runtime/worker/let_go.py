"""What a worker has let go of, and must not be there any more when the next takes its place."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class LetGo:
    """Objects that nobody refers to but, maybe, each other.

    Those that do are gone once the garbage collector has looked at all that there is, which takes a large process a
    fifth of a second, in which requests stand still: so it is asked only where something is still there.

    collect: has it look
    """

    def __init__(self, collect: Callable[[], Any]) -> None:
        self._collect = collect
        self._objects: list[weakref.ref[Any]] = []
        self._is_unknown = False

    def note(self, *objects: Any) -> None:
        """These are about to be let go of; None is nothing."""
        for each in objects:
            if each is not None:
                try:
                    self._objects.append(weakref.ref(each))
                except TypeError:  # it does not tell
                    self._is_unknown = True

    def see_them_gone(self) -> None:
        """Nobody refers to them any more: their memory is free behind this."""
        if self._is_unknown or any(noted() is not None for noted in self._objects):
            self._collect()
        self._objects.clear()
        self._is_unknown = False
