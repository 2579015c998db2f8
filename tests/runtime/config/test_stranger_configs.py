"""A model's ``config.json`` comes from a stranger: whatever it says is served, or told in one line, at once."""

from __future__ import annotations

import copy
import json
import random
import re
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwise.errors import HeadwiseError, ModelError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.models import registry
from headwise.runtime.models.registry import model_config

PUBLISHED = sorted((Path(__file__).parents[2] / "support" / "published").glob("*.json"))
MISSING = object()
ODD: list[Any] = [
    MISSING, None, True, False, "", "four", "4", "\ud800", "x" * 10_000, 0, 1, -1, 3, 4096, 4097, 2**31 - 1, 2**31,
    10**18, 10**400, 0.0, 2.5, -1.5, 1e300, 1e-320, float("nan"), float("inf"), [], [1], [None], [[]], [{}], ["a"],
    ["full_attention"], {}, {"a": 1}, {"rope_type": "yarn"}, {"rope_type": "longrope", "factor": 1e300},
    {"full_attention": 5}, {"0": {"head_dim": 10**9}},
]  # fmt: skip
EACH = 12
MOST_SECONDS = 3.0
MOST_BYTES = 128 << 20
"""Room of 64 MiB is made to read the file."""
MOST_CHARACTERS = 1000


def known_fields() -> list[str]:
    """Every name in quotes in the modules of models: what they read, published configs have or leave out."""
    sources = Path(registry.__file__).parent.glob("*.py")
    return sorted({name for source in sources for name in re.findall(r'"([a-z][a-z_0-9]+)"', source.read_text())})


FIELDS = known_fields()


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a config has values: the keys, and places in lists, that lead there."""
    for key, inner in value.items() if isinstance(value, dict) else list(enumerate(value))[:2]:
        yield (*at, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*at, key))


def changed(config: dict[str, Any], at: tuple[Any, ...], value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    holder = config
    for key in at[:-1]:
        holder = holder[key]
    if value is MISSING:
        del holder[at[-1]]
    else:
        holder[at[-1]] = value
    return config


def check_told(error: HeadwiseError, what: Any) -> None:
    """That an error is one short line that any terminal takes."""
    message = str(error)
    assert message, what
    assert message.isprintable(), what
    assert len(message) <= MOST_CHARACTERS, what


def read(config: dict[str, Any], directory: Path, what: Any, **settings: Any) -> None:
    """Plan for a config as a deployment does before it reads weights."""
    (directory / "config.json").write_text(json.dumps(config))
    served = EngineConfig(model="m", kv_cache="64GiB", dtype="bfloat16", **settings)
    start = time.process_time()
    try:
        read_model_card(served, directory, identify=False)
    except HeadwiseError as error:
        check_told(error, what)
    except Exception as error:
        raise AssertionError(f"{what} raises {error!r}") from error
    assert time.process_time() - start < MOST_SECONDS, what


def error_of(config: dict[str, Any]) -> ModelError | None:
    try:
        model_config(config)
    except ModelError as error:
        return error
    return None


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_a_config_with_odd_values_is_served_or_told_in_one_line(path: Path, tmp_path: Path) -> None:
    """A part of all mutations, another one for each model: values of one field, or of two."""
    config, draw = json.loads(path.read_text()), random.Random(path.stem)
    own, sizes = list(places(config)), draw.choices([1, 1, 2, 8], k=EACH)
    for count, tp_size in enumerate(sizes):
        mutated, what = config, []
        for _ in range(1 + count % 2):
            at = draw.choice(own) if draw.random() < 0.6 else (draw.choice(FIELDS),)
            value = draw.choice(ODD)
            if value is MISSING and at not in own:
                continue
            try:
                mutated = changed(mutated, at, value)
            except (KeyError, IndexError, TypeError):  # the first mutation has removed the place of the second
                continue
            what.append((at, value))
        read(mutated, tmp_path, (path.stem, what, tp_size), tp_size=tp_size)


@pytest.mark.parametrize("value", ["four", [4], {"a": 1}, -1, 10**18], ids=repr)
@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_a_wrong_number_is_told_by_its_field(path: Path, value: Any) -> None:
    config = json.loads(path.read_text())
    for at in places(config):
        holder: Any = config
        for key in at:
            holder = holder[key]
        if type(holder) not in (int, float) or not isinstance(at[-1], str):
            continue
        error = error_of(changed(config, at, value))
        if error is not None:
            check_told(error, at)
            assert at[-1] in str(error), at


@pytest.mark.parametrize(
    "field",
    [
        "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "vocab_size",
        "intermediate_size", "max_position_embeddings", "num_experts", "num_local_experts", "n_routed_experts",
        "moe_num_experts", "linear_num_value_heads", "linear_num_key_heads", "kv_lora_rank", "index_n_heads",
        "global_head_dim", "sliding_window", "first_k_dense_replace", "num_kv_shared_layers",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "value", [pytest.param(2**31 - 1, id="31 bits"), pytest.param(10**18, id="1e18", marks=pytest.mark.soak)]
)
def test_what_a_huge_size_costs_is_small(field: str, value: int, tmp_path: Path) -> None:
    for path in PUBLISHED:
        config = json.loads(path.read_text())
        at = ("text_config", field) if field in config.get("text_config", {}) else (field,)
        if field not in json.dumps(config):
            continue
        tracemalloc.start()
        try:
            read(changed(config, at, value), tmp_path, (path.stem, at, value), tp_size=3)
            assert tracemalloc.get_traced_memory()[1] < MOST_BYTES, (path.stem, at)
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("llama-4-scout", {"moe_layers": [{}]}, "'moe_layers' must be a list of the 48 layers, got [{}]"),
        ("llama-4-scout", {"attn_temperature_tuning": "no"}, "'attn_temperature_tuning' must be true or false"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [True]}, "'mlp_only_layers' must be a list of the 48 layers, got [True]"),
        ("qwen3-8b", {"tie_word_embeddings": "false"}, "'tie_word_embeddings' must be true or false, got 'false'"),
        ("qwen3-8b", {"hidden_act": 0}, "is served with the activation 'silu' only, got 0"),
        ("qwen3-8b", {"eos_token_id": True}, "token ids must be integers from 0 on, got True"),
        ("qwen3-8b", {"rope_scaling": []}, "'rope_scaling' must be an object, got []"),
        ("qwen3-8b", {"rope_theta": 1e300}, "'rope_theta' must be from 1e-30 to 1e+12, got 1e+300"),
        ("qwen3-8b", {"num_attention_heads": 10**6}, "'num_attention_heads' must be at most 4096, got 1000000"),
        ("qwen3-8b", {"max_position_embeddings": 2**30}, "'max_position_embeddings' must be at most 134217728"),
        ("qwen3-30b-a3b", {"num_experts": 10**9}, "'num_experts' must be at most 65536, got 1000000000"),
        ("qwen3-next-80b-a3b", {"num_hidden_layers": 3}, "none of 3 layers has attention"),
        ("deepseek-v3", {"rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1e300}}, "'mscale_all_dim'"),
        ("deepseek-v3", {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 1e-320}}, "number 'beta_fast' in"),
        ("deepseek-v3", {"rope_scaling": {"type": "yarn", "factor": 4, "truncate": "no"}}, "'truncate' must be true"),
    ],
)
def test_what_is_wrong_is_told(name: str, changes: dict[str, Any], told: str) -> None:
    config = json.loads(next(path for path in PUBLISHED if path.stem == name).read_text())
    nested = {"text_config": {**config["text_config"], **changes}} if "text_config" in config else changes
    with pytest.raises(ModelError, match=re.escape(told)):
        model_config({**config, **nested})


def test_sizes_that_fit_are_not_told_without_end(tmp_path: Path) -> None:
    config = json.loads(next(path for path in PUBLISHED if path.stem == "gemma-2-27b").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4096}))
    served = EngineConfig(model="m", kv_cache="64GiB", dtype="bfloat16", tp_size=3)
    with pytest.raises(HeadwiseError, match=r"sizes that fit: \[1, 2, 4, 8, 16, 17.*43\] and 4053 more up to 4096$"):
        read_model_card(served, tmp_path, identify=False)
