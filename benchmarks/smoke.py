"""What a benchmark computes with where it is to end in seconds, and its figures say nothing."""

from __future__ import annotations

from dataclasses import replace

from headwise import EngineConfig


def lightly(config: EngineConfig) -> EngineConfig:
    """``config`` with weights that any CPU reads fast, and tokens that do not depend on who shares their batch.

    On one thread: several that wait for one another's cores cost more than they save where others compute, too.
    """
    return replace(config, dtype="float32", weights_dtype="gguf", cpu_threads=1)
