"""Copies of directories that a node lacks: made once, whole or not at all, and deleted when nobody needs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from headwise.errors import ModelError
from headwise.runtime.loader.directory_copies import MARK, CutOffError, DirectoryCopies

FILES = {
    "config.json": b"{}",
    "model-1.safetensors": bytes(range(256)) * 40,
    "sub/model-2.safetensors": b"2",
    "empty": b"",
}


@dataclass
class Elsewhere:
    """Another node that has `FILES`.

    asked:  how often it was asked for them
    breaks: how often it does not send all
    sizes_: that it says
    """

    asked: int = 0
    breaks: int = 0
    sizes_: Mapping[str, int] = field(default_factory=lambda: {name: len(data) for name, data in FILES.items()})
    where: str = "node 10.0.0.9"

    def find(self, directory: Path) -> Elsewhere:
        self.asked += 1
        return self

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.sizes_

    def pieces(self) -> Iterator[tuple[str, memoryview]]:
        for number, (name, data) in enumerate(FILES.items()):
            for at in range(0, len(data), 1000):
                yield name, memoryview(data[at : at + 1000])
            if number == 1 and self.breaks:
                self.breaks -= 1
                raise CutOffError("node 10.0.0.9 is gone")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "steps"


def copies(place: Path, elsewhere: Elsewhere) -> DirectoryCopies:
    """Those of one process: locks are of descriptors, so another instance is as another process."""
    return DirectoryCopies([place], elsewhere.find, 5.0)


def read(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def left(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_what_is_lacking_is_copied_once_and_deleted_when_nobody_needs_it(place: Path) -> None:
    elsewhere = Elsewhere()
    one, other = copies(place, elsewhere), copies(place, elsewhere)
    for each in (one, other, one):
        each.have(place / "1")
    assert read(place / "1") == FILES
    assert elsewhere.asked == 1
    one.have(place / "2")
    one.keep([place / "2"])
    assert left(place) == ["1", f"1{MARK}", "2", f"2{MARK}"], "another one needs it still"
    other.keep([])
    assert left(place) == ["2", f"2{MARK}"]
    one.keep([])
    assert left(place) == []


def test_what_is_not_a_copy_is_neither_held_nor_deleted(place: Path) -> None:
    (place / "own").mkdir(parents=True)
    one = copies(place, Elsewhere())
    one.have(place / "own")
    one.have(place / "1")
    (place / "1").rename(place / "renamed")
    (place / "1").mkdir()  # somebody has put others there
    (place / "1" / "theirs").touch()
    one.keep([])
    assert left(place) == ["1", "own", "renamed"]
    assert left(place / "1") == ["theirs"]


def test_many_who_want_it_at_once_make_one_copy(place: Path) -> None:
    elsewhere, failed = Elsewhere(), list[BaseException]()

    def have() -> None:
        try:
            copies(place, elsewhere).have(place / "1")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=have) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert elsewhere.asked == 1
    assert read(place / "1") == FILES


def test_who_breaks_off_is_asked_again_and_in_the_end_nothing_is_left(place: Path) -> None:
    copies(place, Elsewhere(breaks=2)).have(place / "1")
    assert read(place / "1") == FILES
    with pytest.raises(ModelError, match=r"node 10\.0\.0\.9 is gone"):
        copies(place, Elsewhere(breaks=3)).have(place / "2")
    assert left(place) == ["1", f"1{MARK}"]


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (
            {**dict.fromkeys(FILES, 1), "config.json": 2, "model-1.safetensors": 7},
            r"model-1.safetensors of node .* has 10240 bytes, and had 7",
        ),
        ({"../outside": 2}, r"a file '../outside', which is not in"),
        ({"/etc/passwd": 2}, "a file '/etc/passwd', which is not in"),
        ({"config.json": 1 << 60}, "and has .* TiB, but here are .* free"),
    ],
)
def test_what_cannot_be_copied_says_why_and_leaves_nothing(place: Path, sizes: dict[str, int], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        copies(place, Elsewhere(sizes_=sizes)).have(place / "1")
    assert left(place.parent) in ([], ["steps"])
    assert left(place) == []


def test_what_nobody_has_is_an_error(place: Path) -> None:
    with pytest.raises(ModelError, match="is at no node: it must be at one"):
        DirectoryCopies([place], lambda directory: None).have(place / "1")
    assert left(place) == []


def test_a_place_where_nothing_can_be_written_is_an_error(place: Path) -> None:
    place.parent.mkdir(exist_ok=True)
    place.touch()
    with pytest.raises(ModelError, match="is not at this node, and cannot be copied to it"):
        copies(place, Elsewhere()).have(place / "1")


def test_one_that_takes_too_long_is_not_waited_for(place: Path) -> None:
    is_asked, goes_on = threading.Event(), threading.Event()

    def find(directory: Path) -> Elsewhere:
        is_asked.set()
        assert goes_on.wait(60)
        return Elsewhere()

    slow = threading.Thread(target=DirectoryCopies([place], find).have, args=(place / "1",))
    slow.start()
    assert is_asked.wait(60)
    with pytest.raises(ModelError, match="is being copied by another process, which takes too long"):
        DirectoryCopies([place], find, 0.0).have(place / "1")
    goes_on.set()
    slow.join()
    assert read(place / "1") == FILES


_HOLDS = """
import sys, time
from pathlib import Path
from headwise.runtime.loader.directory_copies import DirectoryCopies
place = Path(sys.argv[1])
DirectoryCopies([place], None).have(place / "1")
(place / ".2.dead.headwise-partial").mkdir()
(place / ".v1.5.dead.headwise-partial").mkdir()
print("holds", flush=True)
time.sleep(600)
"""


def test_what_a_process_holds_is_let_go_of_when_it_is_killed(place: Path) -> None:
    one = copies(place, Elsewhere())
    one.have(place / "1")
    holder = subprocess.Popen([sys.executable, "-c", _HOLDS, str(place)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        one.keep([])
        assert read(place / "1") == FILES
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    one.have(place / "2")
    one.keep([])
    assert left(place) == [], "nor what it had not finished"


def test_a_full_disk_is_an_error_that_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(ModelError, match="but here are 100 B free"):
        copies(place, Elsewhere()).have(place / "1")
    assert left(place) == []
