"""Cards of published models' configurations, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard, read_model_card

PUBLISHED = Path(__file__).parent / "published"


def published_card(directory: Path, name: str, **options: Any) -> tuple[EngineConfig, ModelCard]:
    """Of the model whose configuration is ``published/NAME.json``, as it would be in ``directory``: on eight ranks with
    40 GiB each in bfloat16, but for the options."""
    (directory / "config.json").write_bytes((PUBLISHED / f"{name}.json").read_bytes())
    config = EngineConfig(
        **{"model": str(directory), "dtype": "bfloat16", "kv_cache": "40GiB", "tp_size": 8, **options}
    )
    return config, read_model_card(config, directory, identify=False)
