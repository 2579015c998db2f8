"""From the name a user gives to a directory that can be loaded."""

from __future__ import annotations

import re
from pathlib import Path

from headwise.errors import ModelError, first_line
from headwise.runtime.loader.aliases import ALIASES, fetch_alias
from headwise.runtime.loader.checkpoint import INDEX, SINGLE
from headwise.runtime.loader.gguf_convert import converted_directory
from headwise.runtime.loader.progress import Progress, SilentProgress

_HUB_PREFIX = "hf:"
_HUB_PATTERNS = ["*.json", "*.jinja", "*.safetensors"]
_ALLOWED = (
    f"a demo model ({', '.join(ALIASES)}), a GGUF file, a Hugging Face directory "
    "(config.json, safetensors, tokenizer.json), or hf:organisation/name"
)


def resolve_model(name: str, cache_dir: Path, progress: Progress | None = None) -> Path:
    """The Hugging Face style directory of a model: ``config.json``, safetensors and ``tokenizer.json``.

    What has to be downloaded or converted for it is kept under ``cache_dir``; several processes may ask at once.
    Raises `ModelError` if there is no such model, or it cannot be fetched or converted.
    """
    progress = progress or SilentProgress()
    cache_dir = cache_dir.expanduser().absolute()
    if name in ALIASES:
        return converted_directory(fetch_alias(ALIASES[name], cache_dir, progress), cache_dir, progress)
    if name.startswith(_HUB_PREFIX):
        return _check_directory(_from_hub(name.removeprefix(_HUB_PREFIX), progress), name)
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        return _check_directory(path, name)
    if path.is_file() and path.suffix == ".gguf":
        return converted_directory(path, cache_dir, progress)
    what = "is a file of an unknown kind" if path.is_file() else "is no known model, file or directory"
    raise ModelError(f"{name!r} {what}; a model is {_ALLOWED}")


def _check_directory(path: Path, name: str) -> Path:
    if not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
        hint = f"give the GGUF file in it: {found[0]}" if found else f"a model is {_ALLOWED}"
        raise ModelError(f"{name!r} has no config.json; {hint}")
    if not (path / SINGLE).is_file() and not (path / INDEX).is_file():
        raise ModelError(
            f"{name!r} has neither {SINGLE} nor {INDEX}; only safetensors weights and GGUF files can be read"
        )
    if not (path / "tokenizer.json").is_file():
        raise ModelError(
            f"{name!r} has no tokenizer.json; save the model's fast tokenizer into it "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    return path


def _from_hub(repository: str, progress: Progress) -> Path:
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", repository)
    if match is None:
        raise ModelError(
            f"{repository!r} is no Hugging Face repository; write hf:organisation/name or hf:.../name@revision"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelError(
            f"hf:{repository} needs the huggingface_hub package; install it by `pip install 'headwise[hub]'`"
        ) from None
    progress.stage(f"fetching {repository} from the Hugging Face hub")
    try:
        # The hub's own cache, so that a model other programs have fetched is not fetched again.
        return Path(snapshot_download(match[1], revision=match[2], allow_patterns=_HUB_PATTERNS))
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"cannot fetch hf:{repository}: {first_line(error)}. Check the name, the network and, for a gated model, "
            "`huggingface-cli login`"
        ) from error
