"""A process that has settled is not looked through again, and what comes later is."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from headwise import heap

class Held:
    pass

def garbage():
    held = Held()
    held.itself = held
    return weakref.ref(held)

before = garbage()
heap.settle()
assert before() is None, "what was garbage by then is gone"
assert gc.get_freeze_count() > 1000 > len(gc.get_objects())
later = garbage()
gc.collect()
assert later() is None
"""


def test_what_is_there_stays_and_what_comes_later_may_go() -> None:
    """In a process of its own, since others' garbage is to be found after this."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)
