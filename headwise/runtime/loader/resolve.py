"""From the model's name, as the user gives it, to a directory that can be loaded."""

from __future__ import annotations

import re
from pathlib import Path

from headwise.errors import ModelError, first_line
from headwise.runtime.loader.aliases import ALIASES, fetch_alias
from headwise.runtime.loader.checkpoint import INDEX, SINGLE, has_weights, read_config
from headwise.runtime.loader.gguf_cache import converted_directory
from headwise.runtime.loader.progress import Progress, SilentProgress
from headwise.runtime.loader.quantisation import without_scheme
from headwise.runtime.loader.tiktoken_file import RANKS
from headwise.runtime.models.registry import model_config

_HUB_PREFIX = "hf:"
_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"
_HUB_TEXTS, _HUB_WEIGHTS = ["*.json", "*.jinja", RANKS], ["*.safetensors"]
_ALLOWED = (
    f"a demo model ({', '.join(ALIASES)}), a GGUF file, a Hugging Face directory "
    "(config.json, safetensors, tokenizer.json), or hf:organisation/name"
)


def resolve_model(name: str, cache_dir: Path, progress: Progress | None = None, *, weights: bool = True) -> Path:
    """The directory of a model, as Hugging Face has it: ``config.json``, safetensors and ``tokenizer.json``.

    Several processes may call this at once. The config is checked first, then the tokenizer, and the weights last, so
    that a model that cannot be served is refused before its weights are fetched.

    name:      a demo model of `ALIASES`, a GGUF file, a directory, or ``hf:organisation/name[@revision]``
    cache_dir: where demo models and converted files are kept; what ``hf:`` fetches is in the hub's own cache
    weights:   False if only the config is needed: a directory may lack the rest, and ``hf:`` does not fetch it

    Raises:
        ModelError: there is no such model, it cannot be fetched or converted, or its architecture is not supported.
        ConfigError: the conversion of a GGUF file needs a package that is not installed.
    """
    progress = progress or SilentProgress()
    cache_dir = cache_dir.expanduser().absolute()
    if name in ALIASES:
        return converted_directory(fetch_alias(ALIASES[name], cache_dir, progress), cache_dir, progress)
    if name.startswith(_HUB_PREFIX):
        return _from_hub(name, weights, progress)
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        _check_config(path, name)
        if weights:
            _check_tokenizer(path, name)
            _check_weights(path, name)
        return path
    if path.is_file() and path.suffix == ".gguf":
        return converted_directory(path, cache_dir, progress)
    what = "is a file of an unknown kind" if path.is_file() else "is no known model, file or directory"
    raise ModelError(f"{name!r} {what}; a model is {_ALLOWED}")


def resolve_weights(name: str, cache_dir: Path, progress: Progress | None = None) -> Path:
    """The directory of weights for a model that is served already: as `resolve_model`, but that it needs no tokenizer.

    Raises `ModelError` and `ConfigError` likewise.
    """
    path = Path(name).expanduser().absolute()
    if name in ALIASES or not path.is_dir():
        return resolve_model(name, cache_dir, progress)
    _check_config(path, name)
    _check_weights(path, name)
    return path


def resolve_draft_model(name: str, cache_dir: Path, progress: Progress | None = None, *, weights: bool = True) -> Path:
    """The directory of a head that drafts beside a model: ``config.json`` and safetensors. As `resolve_model`.

    name: a directory, or ``hf:organisation/name[@revision]``

    Raises:
        ModelError: there is no such directory, or it cannot be fetched.
    """
    progress = progress or SilentProgress()
    if name.startswith(_HUB_PREFIX):
        repository, revision = _hub_name(name)
        progress.stage(f"fetching {name.removeprefix(_HUB_PREFIX)} from the Hugging Face hub")
        path = _fetch(repository, revision, [_CONFIG, *(_HUB_WEIGHTS if weights else [])])
    else:
        path = Path(name).expanduser().absolute()
    if not (path / _CONFIG).is_file():
        raise ModelError(f"{name!r} has no {_CONFIG}: give a head's directory, or hf:organisation/name")
    if weights and not has_weights(path):
        raise ModelError(
            f"{name!r} has neither {SINGLE} nor {INDEX}: save the head's weights as safetensors; pytorch_model.bin is "
            "not read"
        )
    return path


def _check_config(path: Path, name: str) -> None:
    if not (path / _CONFIG).is_file():
        found = sorted(path.glob("*.gguf"))
        hint = f"give the GGUF file in it: {found[0]}" if found else f"a model is {_ALLOWED}"
        raise ModelError(f"{name!r} has no {_CONFIG}; {hint}")
    model_config(without_scheme(read_config(path)))  # raises on an architecture that is not served


def _check_tokenizer(path: Path, name: str) -> None:
    if not (path / _TOKENIZER).is_file() and not (path / RANKS).is_file():
        raise ModelError(
            f"{name!r} has no {_TOKENIZER}; save the model's fast tokenizer into it "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )


def _check_weights(path: Path, name: str) -> None:
    if not (path / SINGLE).is_file() and not (path / INDEX).is_file():
        raise ModelError(
            f"{name!r} has neither {SINGLE} nor {INDEX}; only safetensors weights and GGUF files can be read"
        )


def _from_hub(name: str, weights: bool, progress: Progress) -> Path:
    repository, branch = _hub_name(name)
    progress.stage(f"fetching {name.removeprefix(_HUB_PREFIX)} from the Hugging Face hub")
    path = _fetch(repository, branch, [_CONFIG])
    _check_config(path, name)
    if not weights:
        return path
    # A snapshot's directory is named after its commit. The rest is fetched from there, even if the branch has moved.
    revision = path.name if re.fullmatch(r"[0-9a-f]{40}", path.name) else branch
    path = _fetch(repository, revision, _HUB_TEXTS)
    _check_tokenizer(path, name)
    path = _fetch(repository, revision, _HUB_WEIGHTS)
    _check_weights(path, name)
    return path


def _hub_name(name: str) -> tuple[str, str | None]:
    """The repository, and the revision if one is given."""
    repository = name.removeprefix(_HUB_PREFIX)
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", repository)
    if match is None:
        raise ModelError(
            f"{repository!r} is no Hugging Face repository; write hf:organisation/name or hf:.../name@revision"
        )
    return match[1], match[2]


def _fetch(repository: str, revision: str | None, patterns: list[str]) -> Path:
    """The directory of a repository's snapshot, once the files that match one of the patterns are in it."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelError(
            f"hf:{repository} needs the huggingface_hub package; install it by `pip install 'headwise[hub]'`"
        ) from None
    try:
        # In the hub's own cache, so that a model that another program has fetched is not fetched again.
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except Exception as error:  # of the hub's kinds, and of the HTTP library's below it
        raise ModelError(
            f"cannot fetch hf:{repository}: {first_line(error)}. Check the name, the network and, for a gated model, "
            "`huggingface-cli login`"
        ) from error
