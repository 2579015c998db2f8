"""Machine code on disk is found again as long as no source of its package changes, and never afterwards."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numba
import pytest
from support.waiting import eventually

from headwise.errors import ConfigError
from headwise.kernels.cpu import attention_plan, machine_code
from headwise.log_lines import LatestLines

COMPILES = (
    "from headwise.log_lines import show_log_lines; show_log_lines(); "
    "from headwise.kernels.cpu import attention_plan as of; of.plan(); print(of.__file__)"
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of an entry function's file and a helper's, on a machine whose user has nothing cached yet."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    path = tmp_path / "kernels"
    path.mkdir()
    (path / "entry.py").write_text("from helper import f")
    (path / "helper.py").write_text("def f(): return 1")
    return path


def test_directory_changes_with_any_source_of_the_package(package: Path) -> None:
    seen = [machine_code.directory(package)]
    assert machine_code.directory(package) == seen[0]
    (package / "helper.py").write_text("def f(): return 2")
    seen.append(machine_code.directory(package))
    (package / "helper.py").rename(package / "other.py")
    seen.append(machine_code.directory(package))
    (package.parent / "constants.py").write_text("")
    seen.append(machine_code.directory(package))
    (package / "new.py").write_text("")
    seen.append(machine_code.directory(package))
    assert len(set(seen)) == len(seen)
    (package / "new.py").unlink()
    assert machine_code.directory(package) == seen[-2]


def test_directory_lies_with_the_user(package: Path, tmp_path: Path) -> None:
    chosen = machine_code.directory(package)
    assert chosen.parent == tmp_path / "user" / "headwise"
    assert chosen.is_dir()


def test_directory_lies_where_numba_is_configured_to_keep_things(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "configured"))
    assert machine_code.directory(package).parent == tmp_path / "configured"


def test_a_user_whose_cache_cannot_be_written_keeps_machine_code_beside_the_sources(
    package: Path, tmp_path: Path
) -> None:
    (tmp_path / "user").write_text("a file is in the way of the directory")
    assert machine_code.directory(package).parent == package / "__pycache__"
    (package / "__pycache__").rename(tmp_path / "moved")
    (package / "__pycache__").write_text("")
    with pytest.raises(ConfigError, match=r"__pycache__.*NUMBA_CACHE_DIR"):
        machine_code.directory(package)


def test_numba_is_configured_for_the_time_of_the_decoration_only() -> None:
    before = numba.config.CACHE_LOCATOR_CLASSES
    with machine_code.kept_on_disk():
        assert "machine_code" in numba.config.CACHE_LOCATOR_CLASSES
    assert before == numba.config.CACHE_LOCATOR_CLASSES


def test_a_process_waits_for_those_that_compile_the_same_and_for_no_others() -> None:
    with machine_code.one_process_at_a_time("of_this_test"), machine_code.one_process_at_a_time("another_of_this_test"):
        locks = list(machine_code.directory().glob("*of_this_test.lock"))
        assert len(locks) == 2
        for lock in locks:
            with lock.open("w") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.unlink()


def test_who_waits_for_another_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, lines = logging.getLogger("headwise"), LatestLines()
    monkeypatch.setattr(logger, "level", logging.INFO)
    monkeypatch.setattr(logger, "handlers", [lines])
    monkeypatch.setattr(machine_code, "_SHORT_S", 0.0)
    machine_code._say.cache_clear()

    def compile_it() -> None:
        with machine_code.one_process_at_a_time("of_this_test"):
            pass

    with machine_code.one_process_at_a_time("of_this_test"):
        other = threading.Thread(target=compile_it)
        other.start()
        eventually(lambda: lines.since(0)[0] == 1)
    other.join()
    assert "another process: waiting for it" in lines.since(0)[1][0][1]
    (machine_code.directory() / "of_this_test.lock").unlink()


def test_a_copy_of_the_sources_elsewhere_finds_the_machine_code_again(tmp_path: Path) -> None:
    compiled, lines = {}, []
    for place in ("one", "two"):
        copy = tmp_path / place / "headwise"
        shutil.copytree(Path(machine_code.__file__).parents[2], copy, ignore=shutil.ignore_patterns("__pycache__"))
        command = [sys.executable, "-c", COMPILES]
        environment = {**os.environ, "PYTHONPATH": str(copy.parent), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        told = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert str(copy) in told.stdout
        lines.append(told.stderr)
        compiled[place] = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.nb[ci]")}
    assert compiled["one"] == compiled["two"]
    assert compiled["one"]
    assert "compiling kernels for this machine's CPU" in lines[0], "who waits is told why"
    assert not lines[1]


def test_compiled_functions_are_kept_in_the_directory_of_these_sources() -> None:
    assert machine_code.digest() in attention_plan.plan()._cache.cache_path
