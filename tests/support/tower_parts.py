"""What towers of tiny models are built of, and the comparison of what they make with what transformers made."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwise.runtime.loader.checkpoint import read_json
from headwise.runtime.loader.quantised_checkpoint import open_weights
from headwise.runtime.loader.tokenizer import Tokenizer
from headwise.runtime.models.towers.base import TowerParts
from headwise.runtime.ops.base import TensorOps
from headwise.runtime.ops.select import make_ops

MANY = 1 << 30
"""Numbers of an image: more than any has."""


def parts(directory: Path, ops: TensorOps | None = None, most: int = MANY) -> TowerParts:
    tokenizer = Tokenizer.from_directory(directory)
    videos = directory / "video_preprocessor_config.json"
    return TowerParts(
        read_json(directory / "config.json"),
        read_json(directory / "preprocessor_config.json"),
        open_weights(directory),
        ops or make_ops("numpy", 1, "float32", "float32"),
        tokenizer.control_token,
        most,
        read_json(videos) if videos.is_file() else {},
        partial(tokenizer.encode, add_special_tokens=False),
    )


def assert_spread(found: np.ndarray, expected: dict[str, Any], tolerance: float) -> None:
    assert list(found.shape) == expected["shape"]
    np.testing.assert_allclose(found.reshape(-1)[expected["at"]], expected["values"], atol=tolerance)
    assert float(np.abs(found.astype(np.float64)).sum()) == pytest.approx(expected["sum"], rel=10 * tolerance)
