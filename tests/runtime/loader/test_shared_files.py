"""Files in a directory that containers share, whose host names and process numbers may be the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headwise.runtime.loader.files import replace_file


def test_two_writers_of_equal_names_and_numbers_do_not_take_each_other_s_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One writes all of it while the other one's file is not yet in its place."""
    path, fsync, has_other_begun = tmp_path / "cached", os.fsync, False

    def fsync_late(handle: int) -> None:
        nonlocal has_other_begun
        fsync(handle)
        if not has_other_begun:
            has_other_begun = True
            replace_file(path, b"of the other one")
            assert path.read_bytes() == b"of the other one"

    monkeypatch.setattr(os, "fsync", fsync_late)
    replace_file(path, b"of this one")
    assert path.read_bytes() == b"of this one"
    assert list(tmp_path.iterdir()) == [path]


def test_what_could_not_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        replace_file(tmp_path / "cached", b"bytes")
    assert not list(tmp_path.iterdir())
