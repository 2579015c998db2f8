"""GGUF files of random numbers, for models of which there is none that is small and comes in a package.

What such a model says means nothing; it takes as long to compute as one that was trained. Matrices are Q4_0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

_BLOCK = np.dtype([("scale", "<f2"), ("codes", "u1", (16,))])
"""Of 32 numbers in Q4_0: ``scale * (code - 8)``."""
_DEVIATION = 4.6
"""Of codes that are drawn evenly from 16."""

Floats = NDArray[np.float32]


class RandomFile:
    """A GGUF file that is being written, with the tokenizer of another one."""

    def __init__(self, target: Path, architecture: str, name: str, vocabulary_of: Path) -> None:
        from gguf import GGUFReader, GGUFWriter

        source = GGUFReader(vocabulary_of)
        self.writer: Any = GGUFWriter(target, architecture)
        self.writer.add_name(name)
        for key, field in source.fields.items():
            if key.startswith("tokenizer.") and "chat_template" not in key:
                kinds = field.types[0], field.types[-1] if field.types[1:] else None
                self.writer.add_key_value(key, field.contents(), *kinds)
        self.vocabulary = len(source.fields["tokenizer.ggml.tokens"].data)
        self._draw = np.random.default_rng(0)

    def matrix(self, name: str, *shape: int) -> None:
        """Numbers whose products with normed rows are about 1."""
        from gguf import GGMLQuantizationType

        blocks = np.empty((*shape[:-1], shape[-1] // 32), _BLOCK)
        blocks["scale"] = 1 / (_DEVIATION * np.sqrt(shape[-1]))
        blocks["codes"] = self._draw.integers(0, 256, blocks["codes"].shape, np.uint8)
        self.writer.add_tensor(name, blocks.view(np.uint8), raw_dtype=GGMLQuantizationType.Q4_0)

    def floats(self, name: str, values: Floats) -> None:
        self.writer.add_tensor(name, np.ascontiguousarray(values, np.float32))

    def normal(self, *shape: int) -> Floats:
        return self._draw.standard_normal(shape, np.float32)

    def norms(self, size: int, *names: str) -> None:
        for name in names:
            self.floats(f"{name}.weight", np.ones(size, np.float32))

    def close(self) -> None:
        """Write it."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


class RandomModel(Protocol):
    """Sizes of a model."""

    @property
    def name(self) -> str: ...

    def write(self, target: Path, vocabulary_of: Path) -> None:
        """Write it to a file, with the tokenizer of another one."""
