"""Who waits for an actor's end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from support.waiting import PATIENCE_S, eventually

from headwise.actors.ending import Ending


def test_the_latest_caller_waits_for_the_end_and_those_before_it_do_not_any_more() -> None:
    ending, waiting = Ending(), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: (waiting.set(), ending.wait()))
        assert waiting.wait(PATIENCE_S)
        eventually(lambda: ending._callers == 1)
        second = pool.submit(ending.wait)
        first.result(PATIENCE_S)
        assert not second.done()
        ending.come()
        second.result(PATIENCE_S)
    ending.wait()
