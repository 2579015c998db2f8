"""The attention kernels of a GPU in Triton's interpreter, which notes what is launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headwise.kernels.cuda.attention import TritonAttention, Tuning
from headwise.kernels.cuda.interpreter import InterpreterLauncher
from headwise.kernels.cuda.launch import Grid, Variant
from headwise.kernels.cuda.parameters import Argument
from headwise.kernels.cuda.tiles import Tile

SMALL = Tuning(
    prefill=Tile(16, 16, 4, 2), decode=Tile(16, 16, 4, 2), joint=Tile(64, 16, 4, 2), few_programs=8, split_bytes=0,
    min_split_tokens=32,
)  # fmt: skip
"""Tiles that short sequences fill several of."""
SMALL_TMA = replace(SMALL, prefill=Tile(16, 16, 4, 2, tma=True))


class RecordingLauncher(InterpreterLauncher):
    """Also keeps what was launched."""

    def __init__(self, sms: int = 4) -> None:
        super().__init__(sms=sms)
        self.launched: list[tuple[str, Grid]] = []

    def launch(self, variant: Variant, grid: Grid, arguments: Sequence[Argument]) -> None:
        self.launched.append((variant.kernel, grid))
        super().launch(variant, grid, arguments)


def triton_attention(tuning: Tuning = SMALL, sms: int = 4) -> TritonAttention:
    return TritonAttention(RecordingLauncher(sms), lambda nbytes: np.full(nbytes, 0xFF, np.uint8), tuning)
