"""What ``headwise info`` and the docs say of a pipeline's stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.published_models import published_card

from headwise.runtime.config.info import describe, requests_that_fit


def documented() -> list[list[str]]:
    """Rows of the table in docs/models.md."""
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text().split("## Pipeline parallelism")[1]
    rows = [line.strip("| ").split(" | ") for line in text.split("\n## ")[0].splitlines() if line.startswith("| ")]
    return rows[2:]


@pytest.mark.parametrize("row", documented(), ids=lambda row: row[0])
def test_the_docs_say_what_fits_on_stages(tmp_path: Path, row: list[str]) -> None:
    (model, _, kv_dtype), numbers = row[0].partition(", "), row[1:]
    found = []
    for stages in (1, 2, 4, 8):
        options: dict[str, Any] = {"tp_size": 8 // stages, "pipeline_parallel_size": stages}
        options |= {"kv_dtype": kv_dtype} if kv_dtype else {}
        config, card = published_card(tmp_path, model.lower().replace(" ", "-"), **options)
        found.append(str(requests_that_fit(config, card, 131_072)[0]))
    assert numbers == found


@pytest.mark.parametrize(
    ("options", "stages", "replicas"),
    [
        ({"tp_size": 4}, None, "1 x 4"),
        (
            {"tp_size": 1, "pipeline_parallel_size": 2},
            "2 of 1 rank each: layers 0 to 23, 24 to 47",
            "1 x 2 (2 stages of 1)",
        ),
        (
            {"tp_size": 4, "pipeline_parallel_size": 2},
            "2 of 4 ranks each: layers 0 to 23, 24 to 47",
            "1 x 8 (2 stages of 4)",
        ),
        (
            {"tp_size": 2, "pipeline_parallel_size": 2, "replicas": 3, "prefill_replicas": 1, "prefill_tp_size": 4},
            "2 of 2 ranks each: layers 0 to 23, 24 to 47",
            "1 x 8 (2 stages of 4) for prompts, 2 x 4 (2 stages of 2) for whole requests",
        ),
    ],
)
def test_info_says_which_layers_each_stage_has(
    tmp_path: Path, options: dict[str, Any], stages: str | None, replicas: str
) -> None:
    config, card = published_card(tmp_path, "qwen3-30b-a3b", **options)
    rows = dict(describe(config, card, tmp_path, [8192]))
    assert rows.get("stages") == stages
    assert rows["replicas x ranks"] == replicas


def test_a_token_s_bytes_on_each_rank_are_those_of_its_stage(tmp_path: Path) -> None:
    config, card = published_card(tmp_path, "qwen3-30b-a3b", tp_size=4, pipeline_parallel_size=2)
    rows = dict(describe(config, card, tmp_path, [8192]))
    assert card.bytes_per_token == 48 * 4 * 2 * 128 * 2
    assert rows["cache of 1,000 tokens"] == "93.75 MiB over all ranks, 11.72 MiB each"
