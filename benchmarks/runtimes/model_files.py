"""The same weights for every runtime: a GGUF file, and the directory that it is converted into."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.loader.aliases import ALIASES, fetch_alias
from headwise.runtime.loader.files import building
from headwise.runtime.loader.progress import Progress
from headwise.runtime.loader.resolve import resolve_model
from runtimes import random_drafting, random_hybrid, random_mixture, random_state_space
from runtimes.random_weights import RandomModel

MIXTURE, HYBRID, STATE_SPACE = "mixture", "hybrid", "state-space"
RANDOM: Mapping[str, tuple[RandomModel, RandomModel]] = {
    MIXTURE: (random_mixture.FULL, random_mixture.TINY),
    HYBRID: (random_hybrid.FULL, random_hybrid.TINY),
    STATE_SPACE: (random_state_space.FULL, random_state_space.TINY),
}
"""Of random numbers: sizes that are measured, and those for which nothing takes long."""


@dataclass(frozen=True)
class ModelFiles:
    """name: as headwise is asked for it"""

    name: str
    gguf: Path
    directory: Path


def find_model(name: str, progress: Progress, is_tiny: bool = False) -> ModelFiles:
    """A demo model, one of `RANDOM` or a GGUF file, made, downloaded and converted if need be.

    is_tiny: whether one of `RANDOM` is one for which nothing takes long

    Raises SystemExit, `ModelError`.
    """
    cache = EngineConfig().cache_path
    if name in RANDOM:
        return _random(RANDOM[name][is_tiny], cache, progress)
    if name not in ALIASES and not name.endswith(".gguf"):
        raise SystemExit(
            f"--model {name}: give a GGUF file, which all runtimes read, or one of {', '.join((*ALIASES, *RANDOM))}"
        )
    gguf = fetch_alias(ALIASES[name], cache, progress) if name in ALIASES else Path(name).expanduser().absolute()
    return ModelFiles(name, gguf, resolve_model(name, cache, progress))


def _random(model: RandomModel, cache: Path, progress: Progress) -> ModelFiles:
    target = cache / "benchmarks" / model.name
    path = target / f"{model.name}.gguf"
    if not target.is_dir():
        vocabulary = fetch_alias(ALIASES["smollm2-135m"], cache, progress)
        with building(target, progress) as directory:
            if directory is not None:
                model.write(directory / path.name, vocabulary)
    return ModelFiles(str(path), path, resolve_model(str(path), cache, progress))


def find_drafting(right: float, progress: Progress, is_tiny: bool = False) -> Path:
    """A model of random numbers whose own drafts are right so often, made if need be."""
    cache, sizes = EngineConfig().cache_path, random_drafting.TINY if is_tiny else random_drafting.FULL
    target = cache / "benchmarks" / f"{sizes.name}-right-{right:g}"
    if not target.is_dir():
        tokenizer_of = resolve_model("smollm2-135m", cache, progress)
        with building(target, progress) as directory:
            if directory is not None:
                random_drafting.write(sizes, right, directory, tokenizer_of)
    return target


def stretched(files: ModelFiles, tokens: int, progress: Progress) -> ModelFiles:
    """The same model in a file that says it takes ``tokens`` tokens, so that no runtime refuses them.

    What such a model says beyond the length that it was trained for is worth nothing, but it takes as long to compute.
    """
    cache = EngineConfig().cache_path
    target = cache / "benchmarks" / f"{files.gguf.stem}-{tokens}"
    path = target / f"{files.gguf.stem}-{tokens}.gguf"
    if not target.is_dir():
        with building(target, progress) as directory:
            if directory is not None:
                _write_stretched(files.gguf, directory / path.name, tokens)
    return ModelFiles(str(path), path, resolve_model(str(path), cache, progress))


def _write_stretched(source: Path, target: Path, tokens: int) -> None:
    from gguf import GGUFReader

    shutil.copyfile(source, target)
    reader = GGUFReader(target, "r+")  # maps the file: what is assigned is written
    architecture = reader.fields["general.architecture"].contents()
    length = reader.fields[f"{architecture}.context_length"]
    length.parts[length.data[0]][0] = tokens
    reader.data.flush()
