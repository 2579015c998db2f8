"""Hugging Face model directories of GGUF files in the cache, each converted once."""

from __future__ import annotations

import hashlib
from pathlib import Path

from headwise.errors import ModelError
from headwise.runtime.loader.files import building
from headwise.runtime.loader.gguf_file import paths_of
from headwise.runtime.loader.progress import Progress

CONVERTER_VERSION = 4
"""Goes up whenever the same file would be converted differently: older results are then converted again."""


def converted_directory(source: Path, cache_dir: Path, progress: Progress) -> Path:
    """The Hugging Face directory of a GGUF file, converted now if it is not in ``cache_dir`` yet.

    A file counts as the same while its path, size and modification time are, and those of its other parts. Several
    processes may call this at once: one of them converts.

    Raises as `convert_gguf`, and `ModelError` if ``cache_dir`` cannot be written.
    """
    identity = f"{CONVERTER_VERSION}\0{source.resolve()}"
    for path in paths_of(source):
        try:
            status = path.stat()
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from None
        identity += f"\0{status.st_size}\0{status.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    target = cache_dir / "models" / f"{source.stem}-{key}"
    if not target.is_dir():
        with building(target, progress) as directory:
            if directory is not None:
                # What knows every family's names is imported by who converts, not by each process of a deployment.
                from headwise.runtime.loader.gguf_convert import convert_gguf

                convert_gguf(source, directory, progress)
    return target
