from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from headwise.errors import ModelError
from headwise.runtime.loader import digest
from headwise.runtime.loader.block_file import BLOCKS
from headwise.runtime.loader.checkpoint import INDEX, SINGLE
from headwise.runtime.loader.digest import RECORDS, digest_weights
from headwise.runtime.loader.files import LockedFile
from headwise.runtime.loader.progress import SilentProgress

LATER_NS = 1 << 62
"""When no file is young any more."""


class Reads(SilentProgress):
    """Counts what is read, and acts on it."""

    def __init__(self, on_update=lambda: None) -> None:
        self.stages: list[str] = []
        self.done: list[tuple[int, int]] = []
        self._on_update = on_update

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def update(self, done: int, total: int) -> None:
        self.done.append((done, total))
        self._on_update()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CHUNK_BYTES", 64)
    monkeypatch.setattr(digest, "READ_BYTES", 24)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / SINGLE).write_bytes(bytes(range(250)))
    return directory


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def digest_of(directory: Path, cache: Path, progress: Reads | None = None, now_ns: int = LATER_NS) -> str:
    return digest_weights(directory, cache, progress, lambda: now_ns)


def test_blocks_count_where_they_are_read_and_are_hashed_once_beside_the_weights(model: Path, cache: Path) -> None:
    (model / BLOCKS).write_bytes(bytes(100))
    plain, reads = digest_of(model, cache), Reads()
    with_blocks = digest_weights(model, cache, reads, lambda: LATER_NS, blocks=True)
    assert reads.done[-1] == (100, 100), "the weights were known"
    again = Reads()
    assert digest_weights(model, cache, again, lambda: LATER_NS, blocks=True) == with_blocks != plain
    assert digest_of(model, cache, again) == plain
    assert again.stages == []
    overwrite(model / BLOCKS, 50)
    assert digest_weights(model, cache, None, lambda: LATER_NS, blocks=True) != with_blocks
    assert digest_of(model, cache) == plain


def overwrite(path: Path, at: int) -> None:
    """Change one byte in place, and set the time back, as `rsync --inplace --times` may."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_every_byte_counts(model: Path, cache: Path) -> None:
    weights = (model / SINGLE).read_bytes()
    seen = {digest_of(model, cache)}
    for at in (0, 23, 24, 63, 64, 128, 249):
        (model / SINGLE).write_bytes(weights[:at] + b"\xff" + weights[at + 1 :])
        seen.add(digest_of(model, cache, now_ns=0))
    (model / SINGLE).write_bytes(weights[:-1])
    seen.add(digest_of(model, cache, now_ns=0))
    assert len(seen) == 9


def test_chunks_that_change_places_count(model: Path, cache: Path) -> None:
    first, second = digest_of(model, cache), (model / SINGLE).read_bytes()
    (model / SINGLE).write_bytes(second[64:128] + second[:64] + second[128:])
    assert digest_of(model, cache, now_ns=0) != first


def test_where_the_files_lie_does_not_count(model: Path, cache: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    assert digest_of(other, tmp_path / "other cache") == digest_of(model, cache)


def test_files_are_read_once_while_they_do_not_change(model: Path, cache: Path) -> None:
    first, again = Reads(), Reads()
    assert digest_of(model, cache, first) == digest_of(model, cache, again)
    assert (first.done[-1], again.done) == ((250, 250), [])


def test_a_file_that_was_overwritten_in_place_with_its_time_set_back_is_read_again(model: Path, cache: Path) -> None:
    before = digest_of(model, cache)
    overwrite(model / SINGLE, 100)
    assert digest_of(model, cache) != before


def test_a_file_so_young_that_another_change_would_not_show_is_read_again(model: Path, cache: Path) -> None:
    status = (model / SINGLE).stat()
    now_ns = max(status.st_mtime_ns, status.st_ctime_ns) + 1
    digest_of(model, cache, now_ns=now_ns)
    again = Reads()
    digest_of(model, cache, again, now_ns)
    assert again.done


def test_records_that_came_with_a_model_are_not_believed(model: Path, cache: Path, tmp_path: Path) -> None:
    digest_of(model, cache)
    other = shutil.copytree(model, tmp_path / "other")
    (other / SINGLE).write_bytes(bytes(250))
    assert (other / RECORDS).exists()
    assert digest_of(other, cache) != digest_of(model, cache)


@pytest.mark.parametrize("garbage", [b"", b"[]", b'{"model.safetensors": 7}', b"[" * 100_000, b"\xff"])
def test_a_broken_record_is_written_anew(model: Path, cache: Path, garbage: bytes) -> None:
    expected = digest_of(model, cache)
    (model / RECORDS).write_bytes(garbage)
    assert digest_of(model, cache) == expected
    again = Reads()
    assert digest_of(model, cache, again) == expected
    assert not again.done


def test_a_directory_that_cannot_be_written_has_its_record_in_the_cache_directory(model: Path, cache: Path) -> None:
    (model / RECORDS).mkdir()  # for root may write to any other
    again = Reads()
    assert digest_of(model, cache) == digest_of(model, cache, again)
    assert not again.done
    assert not list(model.glob("*.partial"))


def test_where_nothing_can_be_written_the_weights_are_read_each_time(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model / RECORDS).mkdir()
    cache.write_text("no directory")
    assert digest_of(model, cache) == digest_of(model, cache)
    assert "can be written" in caplog.text


def test_a_file_that_changes_while_it_is_read_is_refused(model: Path, cache: Path) -> None:
    def grow() -> None:
        with (model / SINGLE).open("ab") as file:
            file.write(b"more")

    with pytest.raises(ModelError, match=r"model\.safetensors changed while it was read"):
        digest_of(model, cache, Reads(grow))
    assert not (model / RECORDS).exists()


def test_of_two_that_ask_at_once_one_reads_and_the_other_shows_how_far_it_is(model: Path, cache: Path) -> None:
    told, shown = threading.Event(), threading.Event()

    class Slow(Reads):
        """Has told others of its first chunk when it comes to the second, and lets them look."""

        def update(self, done: int, total: int) -> None:
            super().update(done, total)
            if len(self.done) == 2:
                told.set()
                shown.wait()

    first, second = Slow(), Reads(shown.set)
    got: list[str] = []
    thread = threading.Thread(target=lambda: got.append(digest_of(model, cache, first)))
    thread.start()
    told.wait()
    got.append(digest_of(model, cache, second))
    thread.join()
    assert got[0] == got[1]
    assert second.done[0] == first.done[0]
    assert second.stages == ["waiting for another process to read the weights"]


def test_a_process_that_stands_still_is_not_waited_for(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "STALLED_S", 0.0)
    expected = digest_of(model, cache / "other")
    (model / RECORDS).unlink()
    lock = LockedFile(cache / "digests" / f"{digest._key(model)}.lock")
    assert lock.acquire()
    assert digest_of(model, cache) == expected
    lock.close()


def test_of_shards_those_count_that_the_index_names_and_where_it_places_tensors(model: Path, cache: Path) -> None:
    (model / SINGLE).unlink()
    for name in ("a", "b"):
        (model / f"{name}.safetensors").write_bytes(name.encode() * 100)

    def with_index(**weight_map: str) -> str:
        (model / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        return digest_of(model, cache, now_ns=0)

    seen = [with_index(x="a.safetensors", y="b.safetensors"), with_index(x="b.safetensors", y="a.safetensors")]
    (model / "consolidated.safetensors").write_bytes(b"the same once more")
    assert with_index(x="b.safetensors", y="a.safetensors") == seen[1] != seen[0]
    (model / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks the shard 'b\.safetensors'"):
        digest_of(model, cache)
