"""What is left when parts of a deployment on one machine are killed that nobody starts again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.waiting import PATIENCE_S, eventually

from headwise.runtime.config.engine_config import EngineConfig

pytestmark = [pytest.mark.soak, pytest.mark.ray, pytest.mark.model]

FLAGS = ["--port=0", "--max-model-len=128", "--kv-cache=32MiB", "--cpu-threads=1", "--tensor-ops=numpy"]


@contextmanager
def serve(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """`headwise serve`, once it serves; its stderr is in ``directory/stderr``."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with open(directory / "stderr", "w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "headwise", "serve", *FLAGS, f"--cache-dir={EngineConfig().cache_path}"],
            env={**environment, "HOME": str(directory), "TMPDIR": tempfile.gettempdir()},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving"), (directory / "stderr").read_text()
        yield process
    finally:
        process.kill()
        process.communicate()


def descendants(pid: int) -> dict[int, str]:
    """Names of the processes that a process has started, and those of theirs, by process id."""
    names: dict[int, str] = {}
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        for each in child.read_text().split():
            names[int(each)] = Path(f"/proc/{each}/comm").read_text().strip()
            names.update(descendants(int(each)))
    return names


def scratch_of(process: subprocess.Popen[str]) -> set[Path]:
    """The directories that a deployment's processes keep for as long as they live."""
    found = set()
    for pid in (process.pid, *descendants(process.pid)):
        for file in Path(f"/proc/{pid}/fd").glob("*"):
            target = Path(os.path.realpath(file))
            if target.name == "owner" and target.parent.name.startswith(("hw-", "headwise-")):
                found.add(target.parent)
    return found


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_a_serve_whose_ray_is_gone_ends_with_one_line(name: str, tmp_path: Path) -> None:
    with serve(tmp_path) as process:
        (pid,) = [pid for pid, each in descendants(process.pid).items() if each == name]
        os.kill(pid, signal.SIGKILL)
        assert process.wait(PATIENCE_S) == 1
    last = (tmp_path / "stderr").read_text().splitlines()[-1]
    assert last.startswith("error: the Ray cluster is lost: ")


def test_what_a_killed_serve_leaves_is_removed_by_the_next_start_and_what_lives_stays(tmp_path: Path) -> None:
    with serve(tmp_path) as living, serve(tmp_path) as process:
        left, kept = scratch_of(process), scratch_of(living)
        assert len(left) == len(kept) == 2
        others = descendants(process.pid)
        process.kill()
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in others), otherwise=lambda: others)
        with serve(tmp_path):  # another deployment of this machine may have done it before
            assert not any(path.exists() for path in left)
            assert all(path.exists() for path in kept)
        living.send_signal(signal.SIGINT)
        assert living.wait(PATIENCE_S) == 0
        assert not any(path.exists() for path in kept)
    assert not (tmp_path / ".ray").exists()
