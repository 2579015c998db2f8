"""What ranks may keep together, what comes of it for published models, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.published_models import published_card
from support.tiny_checkpoints import checkpoint

from headwise.errors import ConfigError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.info import describe, requests_that_fit
from headwise.runtime.config.model_card import read_model_card


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"context_parallel_size": 0}, "context_parallel_size must be from 1 to 64, got 0"),
        ({"context_parallel_size": 2}, "context_parallel_size 2 does not divide tp_size 1$"),
        ({"context_parallel_size": 3, "tp_size": 4}, "context_parallel_size 3 does not divide tp_size 4$"),
        (
            {"context_parallel_size": 4, "tp_size": 4, "block_size": 18},
            "block_size 18 is no multiple of context_parallel_size 4: .*; choose 20, or auto$",
        ),
        (
            {"context_parallel_size": 2, "tp_size": 2, "decode_tp_size": 4, "replicas": 2},
            r"context_parallel_size 2 needs engines of equally many ranks, got \(2, 4\): leave out prefill_tp_size",
        ),
    ],
)
def test_a_number_that_fits_nothing_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("name", "tp_size", "parts", "remedy"),
    [
        ("qwen3", 2, 2, "leave it out"),  # a KV head each
        ("qwen3", 4, 4, "choose 2"),  # two KV heads
        ("llama4", 4, 2, "leave it out"),  # chunks
        ("deepseek-v3", 3, 3, "leave it out"),  # four query heads
    ],
)
def test_ranks_that_would_have_no_copies_are_told_what_else_to_choose(
    name: str, tp_size: int, parts: int, remedy: str
) -> None:
    directory = checkpoint(name)
    config = EngineConfig(model=str(directory), tp_size=tp_size, context_parallel_size=parts)
    with pytest.raises(
        ConfigError, match=rf"context_parallel_size {parts}: of no layer .* {parts} of {tp_size}.*{remedy}$"
    ):
        read_model_card(config, directory, identify=False)


def test_gpus_take_powers_of_two_where_blocks_are_brought_together(tmp_path: Path) -> None:
    options = {"tp_size": 24, "context_parallel_size": 3, "block_size": 48}
    assert published_card(tmp_path, "glm-4.5", device="cpu", **options)[1].token_parts == 3
    with pytest.raises(ConfigError, match=r"context_parallel_size 3 .* on a GPU: choose a power of two"):
        published_card(tmp_path, "glm-4.5", device="cuda", **options)


@pytest.mark.parametrize(
    ("name", "parts", "times"),
    [
        ("deepseek-v3", 8, 9),
        ("kimi-k2", 4, 4),
        ("kimi-linear-48b-a3b", 8, 7),
        ("qwen3-next-80b-a3b", 4, 3.9),
        ("qwen3.5-397b-a17b", 4, 3.5),
        ("gemma-4-26b-a4b", 4, 3),
        ("qwen3-30b-a3b", 2, 2),
    ],
)
def test_on_eight_ranks_about_as_many_times_the_long_requests_fit(
    tmp_path: Path, name: str, parts: int, times: float
) -> None:
    tokens = 131_072
    fit = [
        requests_that_fit(*published_card(tmp_path, name, context_parallel_size=each), tokens)[0] for each in (1, parts)
    ]
    assert fit[1] >= times * fit[0]


def test_layers_with_windows_keep_their_heads_whole(tmp_path: Path) -> None:
    _, card = published_card(tmp_path, "gemma-4-31b", context_parallel_size=2)
    for layout, row in zip(card.layouts, card.config.policies, strict=True):
        assert layout.parts == (2 if row[0].is_full else 1)
    assert card.token_parts == 2


def test_states_are_dealt_out_and_stay_whole(tmp_path: Path) -> None:
    _, card = published_card(tmp_path, "kimi-linear-48b-a3b", context_parallel_size=8)
    for layout, row in zip(card.layouts, card.config.policies, strict=True):
        assert layout.parts == (1 if row[0].is_state else 8)


@pytest.mark.parametrize(
    ("name", "options", "tokens"),
    [
        ("deepseek-v3", {"context_parallel_size": 2}, 64),
        ("deepseek-v3", {"context_parallel_size": 8}, 128),  # 16 on a rank
        ("deepseek-v3", {"context_parallel_size": 16, "tp_size": 16}, 256),
        ("deepseek-v3", {"context_parallel_size": 8, "block_size": 64}, 64),
        ("qwen3.5-27b", {"context_parallel_size": 2}, 128),  # padded less
    ],
)
def test_blocks_are_long_enough_for_what_a_rank_has_of_them(
    tmp_path: Path, name: str, options: dict[str, Any], tokens: int
) -> None:
    config, card = published_card(tmp_path, name, **options)
    assert {layout.block_size for layout in card.layouts} == {tokens}
    assert config.fewest_block_tokens <= tokens


@pytest.mark.parametrize(
    ("name", "parts", "together", "copies"),
    [
        ("deepseek-v3", 1, None, "each member by 8 of 8; a token takes 8 times"),
        ("deepseek-v3", 2, "of all layers", "each member by 4 of 8; a token takes 4 times"),
        ("deepseek-v3", 8, "of all layers", None),
        ("gemma-4-26b-a4b", 2, "of 5 of 30 layers", "each member by 1 or 2 of 8; a token takes 1.09 times"),
        ("qwen3-next-80b-a3b", 4, "of 12 of 48 layers", None),
    ],
)
def test_info_says_what_is_kept_together(
    tmp_path: Path, name: str, parts: int, together: str | None, copies: str | None
) -> None:
    config, card = published_card(tmp_path, name, context_parallel_size=parts)
    rows = dict(describe(config, card, tmp_path, [8192]))
    told = rows.get("context parallel")
    assert (
        (told is None)
        if together is None
        else told == f"{together}, a token of a member is on one of {parts} ranks, in turn"
    )
    kept = rows.get("kept by several ranks")
    assert kept is None or kept.endswith(f", and less with context_parallel_size {4 if 'gemma' in name else 8}")
    assert (kept is None) if copies is None else (kept or "").startswith(copies)


def test_what_a_group_keeps_of_a_token_is_told_of_all_ranks(tmp_path: Path) -> None:
    texts = set()
    for parts in (1, 2, 8):
        config, card = published_card(tmp_path, "deepseek-v3", context_parallel_size=parts)
        texts.add(dict(describe(config, card, tmp_path, [8192]))["  group 0"])
        assert card.bytes_per_token == 61 * 576 * 2 * 8 / parts
    assert texts == {"full attention, 61 layers' latents, 68.62 KiB a token"}


def documented() -> list[list[str]]:
    """Rows of the table in docs/models.md."""
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text().split("## Context parallelism")[1]
    rows = [line.strip("| ").split(" | ") for line in text.split("\n## ")[0].splitlines() if line.startswith("| ")]
    return rows[2:]


@pytest.mark.parametrize("row", documented(), ids=lambda row: row[0])
def test_the_docs_say_what_fits(tmp_path: Path, row: list[str]) -> None:
    model, parts, *numbers = row
    name = model.lower().replace(" ", "-")
    found: list[str] = []
    for each in (1, int(parts)):
        config, card = published_card(tmp_path, name, context_parallel_size=each)
        copies = card.plan.copies_beside([layout.parts for layout in card.layouts])
        found += [f"{copies:.3g}", str(requests_that_fit(config, card, 131_072)[0])]
    assert numbers == [found[0], found[2], found[1], found[3]]
