"""Converts a GGUF file into a Hugging Face model directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ConfigError, HeadwiseError, ModelError
from headwise.runtime.loader.block_file import BLOCKS, EXPERTS, write_blocks
from headwise.runtime.loader.checkpoint import SINGLE
from headwise.runtime.loader.gguf_config import architecture_of, build_config, parts_of
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_part import Part
from headwise.runtime.loader.gguf_tokenizer import build_tokenizer, build_tokenizer_config
from headwise.runtime.loader.progress import Progress
from headwise.runtime.loader.safetensors_file import TensorForm, write_safetensors
from headwise.runtime.models.registry import model_config


def convert_gguf(source: Path, directory: Path, progress: Progress) -> None:
    """Write a GGUF file's model into an empty ``directory``.

    It gets the weights as float32, the quantised matrices without loss (see `BlockFile`), which of experts is all that
    it gets, config and tokenizer.

    Raises:
        ModelError: the file cannot be read, is truncated, corrupt or of a kind that cannot be converted or served.
        ConfigError: a package that the conversion needs is not installed.
        OSError: ``directory`` cannot be written.
    """
    try:
        _convert(source, directory, progress)
    except (HeadwiseError, OSError):
        raise
    except ImportError as error:
        raise ConfigError(f"{source} needs a package that cannot be imported ({error}): `pip install gguf`") from error
    # A well-formed header can still contradict itself, and that may show in any line of the conversion. The tokenizers
    # library raises nothing narrower than Exception.
    except Exception as error:
        raise ModelError(
            f"{source} is corrupt: its parts contradict each other ({type(error).__name__}: {error}); download it again"
        ) from error


def _convert(source: Path, directory: Path, progress: Progress) -> None:
    progress.stage(f"reading {source.name}")
    file = GgufFile(source)
    architecture_of(file)
    config = build_config(file)
    try:
        model = model_config(config)
    except ModelError as error:  # before minutes are spent on the weights
        raise ModelError(f"{source} cannot be served: {error}") from None
    parts = parts_of(file, config, model)
    progress.stage(f"converting the tokenizer of {source.name}")
    build_tokenizer(file).save(str(directory / "tokenizer.json"), pretty=False)
    _write_json(directory / "tokenizer_config.json", build_tokenizer_config(file))
    progress.stage(f"dequantising {source.name}")
    floats = [part for part in parts if not part.is_sole]
    forms = {part.name: TensorForm(part.dtype, part.shape) for part in floats}
    write_safetensors(directory / SINGLE, forms, map(_stored, _shown(floats, progress)))
    progress.stage(f"keeping the blocks of {source.name}")
    matrices = [part for part in parts if part.kind is not None]
    _write_blocks(directory / BLOCKS, [part for part in matrices if not part.is_sole], progress)
    if experts := [part for part in matrices if part.is_sole]:
        _write_blocks(directory / EXPERTS, experts, progress)
    _write_json(directory / "config.json", config)


def _write_blocks(path: Path, matrices: list[Part], progress: Progress) -> None:
    kinds = {part.name: str(part.kind) for part in matrices}
    shapes = {part.name: (part.shape[0], part.shape[1]) for part in matrices}
    kept = [part for part in matrices if part.blocks is not None]
    write_blocks(path, kinds, shapes, (part.blocks() for part in _shown(kept, progress) if part.blocks))


def _shown(parts: list[Part], progress: Progress) -> Iterator[Part]:
    """The parts, one after the other, by which progress is measured."""
    total, done = sum(prod(part.shape) for part in parts), 0
    for part in parts:
        yield part
        done += prod(part.shape)
        progress.update(done, total)


def _stored(part: Part) -> NDArray[Any]:
    """A part's numbers in the dtype that they are stored in, which loses none of them."""
    values = part.values()
    if part.dtype == "BF16":
        return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
    return values


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
