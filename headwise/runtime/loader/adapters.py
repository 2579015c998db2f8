"""LoRA adapters in PEFT's format: matrices of low rank that are added to a model's projections (arXiv 2106.09685)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Set
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.loader.checkpoint import read_json
from headwise.runtime.loader.safetensors_file import SafetensorsFile
from headwise.runtime.models.values import finite_number, shown

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_RANK, MOST_ALPHA = 512, 1e6

_NAME = re.compile(
    r"(?:base_model\.model\.)?(?:[a-z_]+\.)*?(?P<at>layers\.\d+\.(?:self_attn|mlp)\.[a-z_]+)"
    r"\.lora_(?P<which>[AB])(?:\.default)?\.weight"
)
_SERVED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
}
"""Fields by which an adapter is more than its matrices, or they are used otherwise."""
_USES = ("use_rslora",)
"""What an adapter may be beside the plain one. PEFT names further kinds alike, in which the matrices mean otherwise."""
_PART = 1 << 20


class AdapterFile:
    """One adapter's directory.

    name: which requests ask for it by

    Raises:
        ModelError: it is not there, corrupt, or of a kind that is not served; the text names what, and what is.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self._directory = name, directory
        missing = next((file for file in (CONFIG, WEIGHTS) if not (directory / file).is_file()), None)
        if missing is not None:
            raise self._wrong(f"it has no {missing}: give a directory that PEFT saved")
        config = read_json(directory / CONFIG)
        for key, served in _SERVED_VALUES.items():
            if config.get(key) not in served:
                raise self._wrong(f"{key!r} is {shown(config.get(key))}, which is not served")
        unknown = next((key for key, value in config.items() if key[:4] == "use_" and value and key not in _USES), None)
        if unknown is not None:
            raise self._wrong(f"{shown(unknown)} is {shown(config[unknown])}, which is not served")
        rank, alpha = config.get("r"), finite_number(config.get("lora_alpha"))
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MOST_RANK:
            raise self._wrong(f"'r' must be an integer from 1 to {MOST_RANK}, got {shown(rank)}")
        if alpha is None or abs(alpha) > MOST_ALPHA:
            raise self._wrong(f"'lora_alpha' must be a number, got {shown(config.get('lora_alpha'))}")
        self.rank = rank
        self._scale = np.float32(alpha / (rank**0.5 if config.get("use_rslora") is True else rank))
        self._file = SafetensorsFile(directory / WEIGHTS)
        self._names = self._found()

    @property
    def modules(self) -> Set[str]:
        """The projections that it changes: ``layers.0.self_attn.q_proj`` and the like."""
        return self._names.keys()

    @cached_property
    def identity(self) -> str:
        """A hash of all that it is: keys and values of another one differ."""
        digest = hashlib.sha256()
        for name in (CONFIG, WEIGHTS):
            with (self._directory / name).open("rb") as file:
                while part := file.read(_PART):
                    digest.update(part)
        return digest.hexdigest()[:32]

    def down(self, module: str) -> NDArray[np.float32]:
        """``[rank, inputs]`` of a projection. Raises `ModelError` where it has what is no number."""
        return self._finite(module, self._file.read(self._names[module]["A"]))

    def up(self, module: str) -> NDArray[np.float32]:
        """``[outputs, rank]`` of a projection, scaled. Raises `ModelError` where it has what is no number."""
        return self._finite(module, self._file.read(self._names[module]["B"]) * self._scale)

    def _finite(self, module: str, matrix: NDArray[np.float32]) -> NDArray[np.float32]:
        """Times nothing it would be something: for rows of other adapters, which are multiplied with this one's."""
        if not np.isfinite(matrix).all():
            raise self._wrong(f"{module} has infinities or what is no number")
        return matrix

    def _found(self) -> dict[str, dict[str, str]]:
        """Names of both matrices of each projection."""
        found: dict[str, dict[str, str]] = {}
        for name in self._file.names:
            match = _NAME.fullmatch(name)
            if match is None:
                raise self._wrong(
                    f"it has the tensor {shown(name)}: matrices A and B of projections of attention and of dense MLPs "
                    "are served"
                )
            found.setdefault(match["at"], {})[match["which"]] = name
        for module, both in found.items():
            shapes = {which: self._file.shape(name) for which, name in both.items()}
            if both.keys() != {"A", "B"} or any(len(shape) != 2 for shape in shapes.values()):
                raise self._wrong(f"{module} has not both matrices, A and B")
            if shapes["A"][0] != self.rank or shapes["B"][1] != self.rank:
                raise self._wrong(f"{module} has the shapes {shapes}, {CONFIG} says rank {self.rank}")
        if not found:
            raise self._wrong("it changes nothing")
        return found

    def _wrong(self, why: str) -> ModelError:
        return ModelError(f"adapter {self.name!r} at {self._directory}: {why}")
