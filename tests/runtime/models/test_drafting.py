"""Layers that draft make what torch does, on all operations, on one rank or more."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drafting_checkpoints import DRAFTING, drafting_checkpoint, drafting_weights
from support.engine.dense_oracle import DictWeights, dense_rank, on_ranks
from support.reference import CLOSE, answers
from support.tiny_checkpoints import TINY_CONFIGS

from headwise.cache_controller.planner import plan_head_groups
from headwise.errors import ModelError
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.registry import build_model, drafting_config, model_config
from headwise.runtime.models.rope import served_up_to
from headwise.runtime.models.shard import Shard
from headwise.runtime.ops.comm import Communicator, SingleRank
from headwise.runtime.ops.select import make_ops

Drafts = list[tuple[int, float]]


@cache
def references() -> dict[str, Any]:
    text = (Path(__file__).parents[2] / "references" / "drafts.json").read_text()
    models: dict[str, Any] = json.loads(text)["models"]
    return models


def parsed(name: str, weights: Any) -> ModelConfig:
    config = model_config(TINY_CONFIGS[name])
    return drafting_config(served_up_to(config, config.max_position), weights.names)


def drafted(name: str, comm: Communicator, ops_name: str = "numpy") -> tuple[list[int], dict[int, int]] | None:
    """As `make_draft_references` has them, without by how much; None on other ranks than the first."""
    weights, ops = Checkpoint(drafting_checkpoint(name)), make_ops(ops_name)
    model, attention = dense_rank(parsed(name, weights), weights, comm, ops)
    answer = next(answer for answer in answers(name) if answer.name == "more")
    ids, begin = np.array(answer.prompt_ids + answer.output_ids, np.int32), len(answer.prompt_ids)
    positions = np.arange(len(ids), dtype=np.int32)
    hidden = np.array(ops.numpy(model.for_drafts(model.forward(ids[:-1], positions[:-1], attention))))
    made = np.array(ops.numpy(model.draft(ids[1:], positions[:-1], ops.tensor(hidden), attention)))
    best = model.drafted(ops.tensor(made[begin - 1 :]))
    first = None if best is None else ops.host(best[0]).tolist()
    second = {}
    for index, (token, _) in (
        (int(key), references()[name]["first"][int(key)]) for key in references()[name]["second"]
    ):
        end = begin + index
        again = ops.tensor(np.concatenate([hidden[:end], made[end - 1 : end]]))
        following = np.append(ids[1 : end + 1], np.int32(token))
        again = ops.numpy(model.draft(following, positions[: end + 1], again, attention))
        best = model.drafted(ops.tensor(again[-1:]))
        second[index] = -1 if best is None else int(ops.host(best[0])[0])
    return None if first is None else (first, second)


def assert_right(name: str, found: tuple[list[int], dict[int, int]] | None) -> None:
    assert found is not None
    expected: Drafts = references()[name]["first"]
    first, second = found
    sure = [index for index, (_, gap) in enumerate(expected) if gap > CLOSE]
    assert [first[index] for index in sure] == [expected[index][0] for index in sure]
    assert len(sure) > 0.9 * len(expected)
    for index, (token, gap) in references()[name]["second"].items():
        assert second[int(index)] == token or gap < CLOSE


@pytest.mark.parametrize("ops_name", ["numpy", "numba", "paddle"])
@pytest.mark.parametrize("name", DRAFTING)
def test_drafts_are_those_of_torch(name: str, ops_name: str) -> None:
    if ops_name == "paddle":
        pytest.importorskip("headwise.runtime.ops.paddle_import")
    assert_right(name, drafted(name, SingleRank(), ops_name))


@pytest.mark.parametrize("name", DRAFTING)
def test_two_ranks_together_draft_the_same(name: str) -> None:
    found = on_ranks(2, lambda comm: drafted(name, comm))
    assert_right(name, found[0])
    assert found[1] is None


def test_a_checkpoint_without_such_a_layer_has_none() -> None:
    config = model_config(TINY_CONFIGS["deepseek-v3"])
    every = DictWeights(drafting_weights("deepseek-v3"))
    assert drafting_config(config, every.names).draft_layers == 1
    without = [name for name in every.names if not name.startswith("model.layers.3.")]
    assert drafting_config(config, without) == config
    assert drafting_config(model_config(TINY_CONFIGS["qwen3"]), ["model.layers.3.eh_proj.weight"]).draft_layers == 0


def test_where_layers_share_an_indexer_one_that_drafts_must_have_its_own() -> None:
    config, every = model_config(TINY_CONFIGS["glm5-shared"]), drafting_weights("glm5-shared")
    drafting = drafting_config(config, [*every])
    assert (drafting.draft_layers, drafting.sides_of(4), config.sides_of(2)) == (1, (7,), (5,))
    assert drafting_config(config, [name for name in every if "layers.4.self_attn.indexer." not in name]) == config


def test_a_projection_of_another_shape_is_refused_by_name() -> None:
    every = drafting_weights("glm4-moe")
    for shape in ((64, 64), (32, 128)):
        weights = DictWeights({**every, "model.layers.3.eh_proj.weight": np.zeros(shape, np.float32)})
        with pytest.raises(ModelError, match=r"model\.layers\.3\.eh_proj\.weight\[:, \d+:\d+\] has the shape"):
            dense_rank(parsed("glm4-moe", weights), weights, SingleRank(), make_ops("numpy"))


class NoJoins(DictWeights):
    """The projection into the layer may not be read."""

    def tensor(self, name: str) -> np.ndarray:
        assert not name.endswith((".eh_proj.weight", ".input_proj.weight", "mtp.fc.weight"))
        return super().tensor(name)

    def columns(self, name: str, start: int, stop: int) -> np.ndarray:
        return self.tensor(name)[:, start:stop]


@pytest.mark.parametrize("name", ["glm4-moe", "mimo", "qwen3.5"])
def test_where_it_was_packed_before_the_projection_into_the_layer_is_not_read(name: str) -> None:
    kept, ops = dict[str, Any](), make_ops("numba")

    def prepare(made_of: str, make: Callable[[], Any]) -> Any:
        return kept[made_of] if made_of in kept else kept.setdefault(made_of, make())

    for weights in (DictWeights(drafting_weights(name)), NoJoins(drafting_weights(name))):
        config = parsed(name, weights)
        shard = Shard.of(config, plan_head_groups(config.policies, 1), 0)
        build_model(config, weights, ops, SingleRank(), shard, prepare)
