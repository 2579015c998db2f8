"""Where the machine code of this package is kept between processes.

Numba notices a change of the file that an entry function stands in, and of no other file. Compiled code of this
package is spread over several, so its machine code lives in a directory named for all their sources: whatever
changes, nothing stale is ever found. Copies of the sources share it, wherever they lie: `ray job submit` makes a copy
of its working directory for each upload, and a kernel takes seconds to compile.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import event
from numba.misc import appdirs

from headwise.errors import ConfigError
from headwise.kernels.cpu import amx

PACKAGE = Path(__file__).parent

log = logging.getLogger(__name__)

_SHORT_S = 1.0
"""A shorter wait for another process is not worth a line: machine code that is there already is loaded in less."""

_numba: Any = numba
_appdirs: Any = appdirs
_event: Any = event
_one_thread_at_a_time = threading.Lock()


def unit(function: Callable[..., Any], integers: int, **options: Any) -> Any:
    """``function`` of some integers as a C function, compiled, or loaded, now; it has an ``address``.

    Compiled code that calls it by that address is not compiled again for each of its variants.
    """
    signature = _numba.types.void(*[_numba.types.int64] * integers)
    with kept_on_disk(), one_process_at_a_time(_name(function)), told():
        return _numba.cfunc(signature, cache=True, **options)(function)


def callable_from_python(function: Callable[..., Any], arguments: tuple[Any, ...], **options: Any) -> Any:
    """``function`` compiled, or loaded, now for arguments of these types of Numba's, and for others when they come."""
    with kept_on_disk(), one_process_at_a_time(_name(function)), told():
        compiled = _numba.njit(cache=True, **options)(function)
        compiled.compile(arguments)
    return compiled


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


@contextmanager
def kept_on_disk() -> Iterator[None]:
    """Numba functions with ``cache=True`` that are *made* meanwhile keep their machine code in this package's place.

    Raises:
        ConfigError: as `directory`.
    """
    with _one_thread_at_a_time:
        before = _numba.config.CACHE_LOCATOR_CLASSES
        _numba.config.CACHE_LOCATOR_CLASSES = f"{__name__}.{Locator.__name__}"
        try:
            yield
        finally:
            _numba.config.CACHE_LOCATOR_CLASSES = before


class Locator:
    """Tells Numba where the machine code of a function is, by what the sources say and not by where they lie.

    An implementation of Numba's cache locators, which it asks in this form (``NUMBA_CACHE_LOCATOR_CLASSES``).
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._line = function.__code__.co_firstlineno

    @classmethod
    def from_function(cls, function: Callable[..., Any], _file: str) -> Locator:
        """The locator of a function."""
        return cls(function)

    def ensure_cache_path(self) -> None:
        """Have the directory made; raises as `directory`."""
        _directory()

    def get_cache_path(self) -> str:
        """The directory of this package's machine code."""
        return str(_directory())

    def get_source_stamp(self) -> str:
        """What must be equal where machine code is to be found again: the directory says all of it."""
        return _directory().name

    def get_disambiguator(self) -> str:
        """What tells functions of one name and file from each other."""
        return str(self._line)


@contextmanager
def one_process_at_a_time(name: str) -> Iterator[None]:
    """For compilations of one function: whoever waits meanwhile finds its machine code on disk. Those of others go on:
    that of a new machine takes a minute, and processes that start together share it out.
    """
    with (_directory() / f"{name}.lock").open("w") as file:
        _lock(file.fileno())  # until it is closed
        yield


def _lock(file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        teller = threading.Timer(_SHORT_S, _say, ["kernels are being compiled by another process: waiting for it"])
        teller.daemon = True
        teller.start()
        fcntl.flock(file, fcntl.LOCK_EX)
        teller.cancel()


@contextmanager
def told() -> Iterator[None]:
    """Whoever waits meanwhile is told, by one line in the log, once there is anything to compile."""
    compiling = _Compiling()
    _event.register("numba:run_pass", compiling)
    try:
        yield
    finally:
        _event.unregister("numba:run_pass", compiling)


class _Compiling(event.Listener):
    """Hears of each pass of Numba's compiler, of which machine code from the disk needs none."""

    def on_start(self, event: Any) -> None:
        _say(
            f"compiling kernels for this machine's CPU, once: some twenty seconds for each dtype. They are kept in "
            f"{_directory()}"
        )

    def on_end(self, event: Any) -> None:
        pass


@cache
def _say(text: str) -> None:
    """Log a line, once."""
    log.info(text)


def directory(package: Path = PACKAGE) -> Path:
    """The directory of the machine code of ``package`` as its sources are now; it exists and can be written to.

    It lies in the directory that Numba was configured with, or in the user's cache directory, or, where that cannot be
    written, beside the sources.

    Raises:
        ConfigError: nothing can be written to any of these.
    """
    configured = _numba.config.CACHE_DIR
    places = [Path(configured)] if configured else [Path(_appdirs.user_cache_dir("headwise")), package / "__pycache__"]
    for place in places:
        chosen = place / f"{package.name}-{digest(package)}{'-amx' if amx.is_granted() else ''}"
        if _writable(chosen):
            return chosen
    tried = ", ".join(map(str, places))
    raise ConfigError(
        f"compiled kernels cannot be kept in {tried}: make one writable, or set NUMBA_CACHE_DIR to a directory that is"
    )


def digest(package: Path = PACKAGE) -> str:
    """A digest, 16 hex digits, of the names and contents of a package's Python sources, and of those beside the
    package: compiled code takes constants from there.
    """
    state = hashlib.sha256()
    for source in sorted([*package.glob("*.py"), *package.parent.glob("*.py")]):
        content = source.read_bytes()
        state.update(f"{source.name} {len(content)}\n".encode() + content)
    return state.hexdigest()[:16]


_directory = cache(directory)


def _writable(path: Path) -> bool:
    try:
        os.makedirs(path, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError:
        return False
    return True
