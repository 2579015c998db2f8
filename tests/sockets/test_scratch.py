from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from headwise.sockets.scratch import ScratchDirectory, sweep

OWNER = """
import os, signal, sys
from headwise.sockets.scratch import ScratchDirectory
scratch = ScratchDirectory(sys.argv[1], "hw-")
(scratch.path / "file").touch()
print(scratch.path, flush=True)
sys.stdin.read()
"""


def test_a_directory_goes_with_its_process_by_the_next_sweep_and_not_before(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    path = Path(owner.stdout.readline().strip())
    assert sweep(str(tmp_path), "hw-") == []
    assert (path / "file").exists()
    owner.kill()
    owner.communicate()
    assert sweep(str(tmp_path), "hw-") == [path]
    assert not path.exists()


def test_a_process_removes_its_own_and_does_not_sweep_it_before(tmp_path: Path) -> None:
    scratch = ScratchDirectory(str(tmp_path), "hw-")
    assert sweep(str(tmp_path), "hw-") == []
    scratch.close()
    scratch.close()
    assert list(tmp_path.iterdir()) == []


def test_what_nobody_is_known_to_own_stays(tmp_path: Path) -> None:
    (tmp_path / "hw-unknown").mkdir()
    (tmp_path / "hw-file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "owner").touch()
    os.symlink(tmp_path / "other", tmp_path / "hw-link")
    assert sweep(str(tmp_path), "hw-") == []
    assert len(list(tmp_path.iterdir())) == 4
