"""What a process that serves has in memory from its start to its end."""

from __future__ import annotations

import gc


def settle() -> None:
    """Have the garbage collector look no more at what there is by now: modules, and what was opened at start.

    These are a hundred thousand objects and more, among which it would look for garbage now and then, once in some
    thousand requests: for a tenth of a second in which nobody gets a token. To be called before there is what may come
    to an end while the process goes on, such as a model: of that, objects that hold each other must still be found.
    """
    gc.collect()
    gc.freeze()
