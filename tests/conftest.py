"""What every test keeps to."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import time
from collections.abc import Generator, Iterator
from typing import Any

# Read when NumPy is imported. Its threads spin for a while after each product, and here several tests share the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings
from threadpoolctl import ThreadpoolController
from xdist.scheduler import LoadScopeScheduling

from headwise.runtime.config import threads
from headwise.sockets.context import num_open

# Thousands of tests and all that they import are a million objects, which are garbage at no time.
gc.set_threshold(10_000, 20, 50)

settings.register_profile("headwise", deadline=None)  # a timing is no proof: other programs may have the cores
settings.load_profile("headwise")


HANGS_S, LOOK_S = 660.0, 60.0
"""A test that takes longer hangs where Python's own limit does not reach: its process ends, and says where it is. What
counts is the last time that a test began at least `LOOK_S` behind the one before: to arm this for each test costs a
thread's start and end, and so 7 ms on a busy machine."""


class Watch:
    """Ends this process once tests hang."""

    def __init__(self) -> None:
        self._armed_at = float("-inf")

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if time.monotonic() - self._armed_at > LOOK_S:
            file = item.config.stash[fault_handler_stderr_fd_key]
            faulthandler.dump_traceback_later(HANGS_S + LOOK_S, file=file, exit=True)
            self._armed_at = time.monotonic()
        return (yield)

    def pytest_unconfigure(self) -> None:
        faulthandler.cancel_dump_traceback_later()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Watch())


@pytest.fixture(autouse=True, scope="module")
def every_context_is_closed() -> Iterator[None]:
    """ZeroMQ contexts have threads and files: whoever opens one closes it."""
    before = num_open()
    yield
    assert num_open() == before, "a client, server or connection was left open"


@pytest.fixture(autouse=True, scope="module")
def what_is_logged_stays_the_same() -> Iterator[None]:
    """Commands set the level of headwise's log for their process, which here is that of other tests, too."""
    logger = logging.getLogger("headwise")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture(autouse=True, scope="session")
def engines_compute_on_one_thread() -> Iterator[None]:
    """Where tests do not say otherwise: they share the cores with others, and threads that wait for each other's take a
    quarter more of them. What several threads do together is for tests of kernels, and of `test_tokens`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "usable_cores", lambda: 1)
        yield


@pytest.fixture(autouse=True, scope="module")
def numpy_computes_on_one_thread_again() -> Iterator[None]:
    """Engines whose tensors are NumPy's have its products run on their threads, which here would spin ever after."""
    yield
    ThreadpoolController().select(internal_api="openblas").limit(limits=1)


TOGETHER = ("tests/e2e/two_engines",)
"""Directories whose files share what takes long to start: one worker runs them all."""
LONGEST = (
    "two_engines",
    "test_tokens",
    "test_engine_benchmarks",
    "test_storage_tier",
    "test_cluster",
    "test_commands",
    "test_engine",
)
"""Of the parts, by the time that they take: whoever comes to one of them last keeps the other workers waiting."""


def part_of(nodeid: str) -> str:
    """What one worker runs of the tests: a directory of `TOGETHER`, or a file."""
    file = nodeid.partition("::")[0]
    return next((directory for directory in TOGETHER if file.startswith(f"{directory}/")), file)


class Parts(LoadScopeScheduling):
    """Deals parts of the tests to workers."""

    def _split_scope(self, nodeid: str) -> str:
        return part_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Parts:
    """Whatever ``--dist`` says."""
    return Parts(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Every worker begins with other files: what it compiles, of the tests and of what they import, the others find."""
    report = yield
    worker = getattr(collector.config, "workerinput", None)
    if worker is not None and isinstance(collector, pytest.Directory):
        own = int(worker["workerid"].removeprefix("gw")) * len(report.result) // worker["workercount"]
        report.result = [*report.result[own:], *report.result[:own]]
    return report


def pytest_collection_finish() -> None:
    """What there is of the tests by now stays to the end: the garbage collector need not look at it each time."""
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where files are dealt to several workers: long ones first, then those of whole engines, then all others.

    Of whole engines, what mostly waits for Ray and what computes take turns: together they make use of all cores.
    """
    if not hasattr(config, "workerinput"):
        return
    items.sort(key=lambda item: item.path)  # as all workers must, wherever they began

    def name_of(item: pytest.Item) -> str:
        return part_of(item.nodeid).rpartition("/")[2].removesuffix(".py")

    whole = [name_of(item) for item in items if "e2e" in item.path.parts]
    waiting = {name_of(item) for item in items if item.get_closest_marker("ray")}
    turns: dict[str, int] = {}
    for name in dict.fromkeys(whole):
        turns[name] = sum((other in waiting) == (name in waiting) for other in turns)
    last = len(LONGEST) + len(turns)
    order = {name: len(LONGEST) + turn for name, turn in turns.items()} | {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (order.get(name_of(item), last), name_of(item) in waiting))
