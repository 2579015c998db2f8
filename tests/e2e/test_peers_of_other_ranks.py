"""Engines of different ranks that fetch each other's blocks say the tokens of one engine, whatever a layer keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from support.engine.loaded_model import BASE, GREEDY
from support.engine.ranks import Ranks, RanksExecutor
from support.reference import Answer, answers, assert_same
from support.tiny_checkpoints import checkpoint, reference, write_checkpoint

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.peer_blocks import check_exchanges
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.protocol.request import GenerationResult, PeerHint
from headwise.transfer.connectors.select import PeerAccess

TOKENS = 12
SIZES: dict[str, Any] = {
    "host_cache": "24MiB",
    "kv_cache": "24MiB",
    "max_batched_tokens": 128,
    "cpu_threads": 1,
    "write_policy": "write_through",
}


class Wire:
    """Loses a fifth of what is said, and doubles another; without a seed it does neither."""

    def __init__(self, seed: int | None) -> None:
        self._random, self._is_whole, self.lost = Random(seed), seed is None, 0

    def copies(self) -> int:
        copies = 1 if self._is_whole else self._random.choice([0, 1, 1, 1, 2])
        self.lost += not copies
        return copies


class Node:
    """An engine of real ranks in this process, and its `Peers`: the other one.

    pretended: tensor-parallel ranks that the other one is said to have; 0: as many as it has
    """

    def __init__(self, name: str, config: EngineConfig) -> None:
        directory = Path(config.model)
        self.name, self.ranks, self.inbox = name, Ranks(config, directory, PeerAccess()), list[Any]()
        self.executor, preprocessor = RanksExecutor(self.ranks), Preprocessor.open(config)
        check_exchanges(config, preprocessor.card)
        self.preprocessor, self.num_ranks = preprocessor, config.tp_size
        self.core = EngineCore(config, preprocessor.card, preprocessor.tokenizer, self.executor, peers=self)
        self.other: Node | None = None
        self.wire = Wire(None)
        self.pretended = 0

    def knows(self, engine: str, epoch: int) -> bool:
        return self.other is not None and engine == self.other.name

    def tp_size(self, engine: str) -> int:
        assert self.other is not None
        return self.pretended or self.other.num_ranks

    def send(self, engine: str, message: Any) -> None:
        assert self.other is not None
        for _ in range(self.wire.copies()):
            self.other.core.asked(self.name.encode(), message)

    def answer(self, reader: bytes, message: Any) -> None:
        assert self.other is not None
        self.other.inbox += [message] * self.wire.copies()

    def receive(self) -> list[Any]:
        inbox, self.inbox = self.inbox, []
        return inbox

    def turn(self, results: dict[str, GenerationResult]) -> None:
        self.core.serve_peers()
        for delta in self.core.step(0.01) if self.core.has_work() else ():
            assert delta.error is None, delta.error
            results[delta.request_id].add(delta)

    def close(self) -> None:
        self.executor.close()
        self.ranks.close()


@contextmanager
def two_engines(config: EngineConfig, prefill: int, decode: int) -> Iterator[tuple[Node, Node]]:
    config = replace(config, tp_size=prefill, decode_tp_size=decode, max_replicas=2, **SIZES)
    nodes = Node("p", config.of_ranks(prefill)), Node("d", config.of_ranks(decode))
    nodes[0].other, nodes[1].other = nodes[1], nodes[0]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.close()


def serve(node: Node, answer: Answer, salt: str, hint: PeerHint | None = None) -> GenerationResult:
    assert node.other is not None
    sampling = replace(GREEDY, max_tokens=TOKENS)
    request = node.preprocessor.prepare(prompt=answer.prompt_ids, sampling=sampling, cache_salt=salt)
    result = GenerationResult(request.request_id)
    node.core.add(replace(request, peer=hint))
    while result.finish_reason is None or node.other.core.has_work():
        node.turn({result.request_id: result})
        node.other.turn({})
    return result


def long_answer(name: str) -> Answer:
    """To a prompt longer than windows and chunks of tiny models, and than a step."""
    return max(
        (answer for answer in answers(name) if len(answer.prompt_ids) <= 300), key=lambda answer: len(answer.prompt_ids)
    )


def fetched(node: Node) -> int:
    """Tokens that it could serve because of what came. It may rather compute them, if it knows how fast that is."""
    return int(node.core.stats()["peers"]["hit_tokens"])


def full_blocks(answer: Answer, block_size: int) -> int:
    return (len(answer.prompt_ids) - 1) // block_size * block_size


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        ("deepseek-v3.2", 1, 2),  # latents and an indexer's keys, on every rank
        ("glm5-shared", 2, 1),  # keys of some layers, behind the latents of all
        ("deepseek-v4", 2, 1),  # windows and entries of several tokens
        ("qwen3-next", 2, 1),  # states beside attention
        ("kimi-linear", 1, 2),  # states, which are dealt, beside latents, which are not
        ("gemma4", 1, 4),  # two full heads that ranks share beside four windowed ones that they do not
        ("deepseek-v3", 1, 1),  # latents
        ("gpt-oss", 1, 2),  # windows, and sinks that are learned
        ("gemma4-shared", 2, 1),  # heads of two sizes, in layers some of which share theirs
        ("llama4", 1, 1),  # chunks
        pytest.param("gpt-oss", 4, 2, marks=pytest.mark.soak),
        pytest.param("qwen3", 4, 1, marks=pytest.mark.soak),
        pytest.param("qwen3", 3, 2, marks=pytest.mark.soak),  # of three ranks two keep the first head
        pytest.param("gemma4-shared", 2, 4, marks=pytest.mark.soak),
        pytest.param("deepseek-v3.2", 1, 1, marks=pytest.mark.soak),
        pytest.param("qwen3-next", 1, 1, marks=pytest.mark.soak),
        pytest.param("qwen3-next", 1, 2, marks=pytest.mark.soak),
        pytest.param("gemma4-shared", 1, 1, marks=pytest.mark.soak),
        pytest.param("deepseek-v3", 4, 2, marks=pytest.mark.soak),
        pytest.param("llama4", 2, 1, marks=pytest.mark.soak),
    ],
)
def test_a_prompt_that_another_engine_computes_or_has_goes_on_with_the_reference_tokens(
    name: str, prefill: int, decode: int
) -> None:
    assert_goes_on(name, prefill, decode)


@pytest.mark.parametrize(("name", "ranks"), [("deepseek-v3", 2), ("qwen3", 4)])
def test_so_it_does_where_ranks_keep_tokens_together(name: str, ranks: int) -> None:
    """Each rank fetches its own part of each block."""
    assert_goes_on(name, ranks, ranks, tp_size=ranks, context_parallel_size=2)


@pytest.mark.parametrize(
    ("name", "stages", "prefill", "decode"),
    [
        ("qwen3", 2, 1, 2),  # two layers and one: blocks of the second stage are half empty
        ("gemma2", 2, 2, 1),
        ("kimi-linear", 3, 1, 2),  # states, which are dealt, beside latents, which are not
        ("gpt-oss", 3, 1, 1),  # each stage of the same one
        pytest.param("qwen3-next", 2, 2, 1, marks=pytest.mark.soak),
        pytest.param("deepseek-v3.2", 2, 1, 2, marks=pytest.mark.soak),
        pytest.param("glm5-shared", 2, 1, 2, marks=pytest.mark.soak),
        pytest.param("gemma4", 2, 1, 4, marks=pytest.mark.soak),
        pytest.param("llama4", 4, 1, 1, marks=pytest.mark.soak),
        pytest.param("nemotron-h", 6, 1, 2, marks=pytest.mark.soak),
    ],
)
def test_so_it_does_where_both_engines_are_pipelines(name: str, stages: int, prefill: int, decode: int) -> None:
    """Each rank fetches of the ranks of its own stage."""
    assert_goes_on(name, prefill, decode, pipeline_parallel_size=stages)


@pytest.mark.parametrize(("ours", "theirs"), [((2, 1), (1, 2)), ((1, 1), (2, 1)), ((2, 1), (1, 1))])
def test_blocks_of_engines_with_other_stages_are_refused_and_computed_here(
    ours: tuple[int, int], theirs: tuple[int, int]
) -> None:
    """Engines of a deployment have equally many. What another one says it has is never taken for what it is not."""
    config = replace(BASE, model=str(checkpoint("gemma2")), block_size=16, load_timeout_s=1.0)
    answer = long_answer("gemma2")
    nodes = []
    for name, (stages, tp_size) in (("p", theirs), ("d", ours)):
        engine = replace(config, **SIZES, tp_size=tp_size, pipeline_parallel_size=stages, max_replicas=2)
        nodes.append(Node(name, engine))
    p, d = nodes
    p.other, d.other, d.pretended = d, p, ours[1]
    try:
        assert_same(answer.first(TOKENS), serve(p, answer, "of p").token_ids)
        result = serve(d, answer, "of p", PeerHint("p", 1, full_blocks(answer, 16)))
        assert_same(answer.first(TOKENS), result.token_ids)
        assert fetched(d) == 0
    finally:
        for node in nodes:
            node.close()


def assert_goes_on(name: str, prefill: int, decode: int, **options: Any) -> None:
    config = replace(BASE, model=str(checkpoint(name)), block_size=16, **options)
    answer = long_answer(name)
    depth = full_blocks(answer, 16)
    with two_engines(config, prefill, decode) as (p, d):
        for there, here in ((p, d), (d, p)):
            hint = PeerHint(there.name, 1, depth)
            assert_same(answer.first(TOKENS), serve(there, answer, f"of {there.name}").token_ids)
            result = serve(here, answer, f"of {there.name}", hint)
            assert_same(answer.first(TOKENS), result.token_ids)
            assert result.usage.cached_tokens == depth
            result = serve(here, answer, f"computed by {there.name}", replace(hint, prefills=True))
            assert_same(answer.first(TOKENS), result.token_ids)
            assert fetched(here) == 2 * depth


@pytest.mark.parametrize(
    ("name", "kv_dtype", "prefill", "decode", "block_size"),
    [
        ("qwen3", "int8", 1, 2, 16),
        ("qwen3", "float8_e4m3fn", 1, 1, 16),
        ("qwen3", "int4", 2, 1, 16),
        ("deepseek-v3", "int8", 1, 2, 16),  # latents, whose rotated part has two bytes
        pytest.param("three heads", "float32", 1, 3, 16, marks=pytest.mark.soak),
        ("three heads", "int8", 3, 1, 16),
        ("qwen3-next", "int8", 1, 2, 128),  # chosen by the model
        ("gpt-oss", "int8", 2, 1, 64),  # likewise
    ],
)
def test_blocks_of_another_engine_are_those_that_were_computed_here(
    name: str, kv_dtype: Any, prefill: int, decode: int, block_size: int, tmp_path: Path
) -> None:
    """Quantised ones, and those of three ranks: with the tokens of one engine of one rank, which asks nobody."""
    model = three_heads(tmp_path) if name == "three heads" else checkpoint(name)
    config = replace(BASE, model=str(model), block_size="auto" if block_size > 16 else 16, kv_dtype=kv_dtype)
    answer = long_answer("qwen3" if name == "three heads" else name)
    depth = full_blocks(answer, block_size)
    with two_engines(config, prefill, decode) as (p, d):
        assert [node.core.cache.block_size for node in (p, d)] == [block_size] * 2
        alone = serve(p if prefill == 1 else d, answer, "alone").token_ids
        for there, here in ((p, d), (d, p)):
            hint = PeerHint(there.name, 1, depth)
            assert serve(there, answer, f"of {there.name}").token_ids == alone
            result = serve(here, answer, f"of {there.name}", hint)
            assert (result.token_ids, result.usage.cached_tokens) == (alone, depth)
            assert serve(here, answer, f"by {there.name}", replace(hint, prefills=True)).token_ids == alone
            assert fetched(here) == 2 * depth


def three_heads(directory: Path) -> Path:
    """A tiny Qwen 3 with three KV heads, of two query heads each."""
    known = reference("qwen3")
    shapes = {weight: list(shape) for weight, shape in known["shapes"].items()}
    for weight, shape in shapes.items():
        heads = {"q_proj": 6, "k_proj": 3, "v_proj": 3}.get(weight.split(".")[-2])
        if heads:
            shape[0] = heads * 64
        elif weight.endswith("o_proj.weight"):
            shape[1] = 6 * 64
    config = {**known["config"], "num_attention_heads": 6, "num_key_value_heads": 3}
    return write_checkpoint(directory / "three", config, shapes)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("gemma4-shared", 0),
        *(
            pytest.param(name, seed, marks=pytest.mark.soak)
            for name in ("deepseek-v3.2", "qwen3-next", "gemma4-shared")
            for seed in range(1, 9)
        ),
    ],
)
def test_messages_that_are_lost_and_doubled_change_no_token_whatever_a_layer_keeps(name: str, seed: int) -> None:
    config = replace(BASE, model=str(checkpoint(name)), block_size=16, load_timeout_s=0.5)
    answer = long_answer(name)
    with two_engines(config, 1, 2) as (p, d):
        p.wire = d.wire = Wire(seed)
        for there, here in ((p, d), (d, p)):
            hint = PeerHint(there.name, 1, full_blocks(answer, 16))
            assert_same(answer.first(TOKENS), serve(there, answer, f"of {there.name}").token_ids)
            for prefills in (False, True):
                salt = f"computed by {there.name}" if prefills else f"of {there.name}"
                result = serve(here, answer, salt, replace(hint, prefills=prefills))
                assert_same(answer.first(TOKENS), result.token_ids)
        assert p.wire.lost


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (1, 4), pytest.param(4, 2, marks=pytest.mark.soak)])
def test_a_head_pattern_is_kept_alike_by_engines_of_all_ranks(tmp_path: Path, prefill: int, decode: int) -> None:
    """Dealt to two ranks, streaming heads ride in full groups that do not on one; of four ranks two keep each head."""
    scores = np.array([[0.9, 0.1], [0.8, 0.7], [0.2, 0.1]])
    pattern = tmp_path / "scores.tsv"
    pattern.write_text("\n".join("\t".join(map(str, row)) for row in scores))
    model = {"head_pattern": str(pattern), "sink": 16, "window": 32}
    config = replace(BASE, model=str(checkpoint("qwen3")), block_size=16, **model)
    answer = long_answer("qwen3")
    with two_engines(config, prefill, decode) as (p, d):
        plans = [node.preprocessor.card.plan for node in (p, d)]
        kinds = {frozenset(plan.policies) for plan in plans}
        assert [len(policies) for policies in kinds] == [2], "full groups and streaming ones, as on the other engine"
        alone = serve(p, answer, "alone").token_ids
        for there, here in ((p, d), (d, p)):
            hint = PeerHint(there.name, 1, full_blocks(answer, 16), prefills=True)
            assert serve(here, answer, f"computed by {there.name}", hint).token_ids == alone
            assert fetched(here) == hint.tokens
