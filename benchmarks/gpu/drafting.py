"""What a layer that drafts costs of a decode step: the section mtp of `gpu_checks.py`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from gpu.bench import Bench
from gpu.checkpoint import LLAMA, Shape, decoder_tensors, kv_token_bytes, random_models, write_checkpoint
from gpu.engine import Serving, engine_config, random_prompts, serving, tokens_until_all_decode
from numpy.typing import NDArray

from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.engine.speculation.speculator import Speculator
from headwise.runtime.protocol.batch import NO_DRAFTS

MTP = "mtp"
"""The directory of the random model."""

BATCHED_TOKENS = 8192
MOST_FILLED = 1.1
"""Of a step that only writes what the layer keeps, over one of a model without it."""

WAYS: Mapping[str, tuple[int, int]] = {"filled": (0, 0), "proposed": (1, 0), "drafted": (1, 1)}
"""Steps that write what the layer keeps, that draft a token of each sequence, too, and that also check one. By how many
are proposed, and how many checked."""


def mtp(bench: Bench) -> None:
    """Decode steps of Llama-3.2-1B's geometry in MiMo's architecture, over those without the layer. Weights are random,
    so nearly all drafts are wrong: what right ones bring is known without a card."""
    sizes, rig = bench.sizes, bench.rig
    config = {
        **random_models(sizes, bench.options.layers)[LLAMA],
        "architectures": ["MiMoForCausalLM"],
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
    }
    directory = write_checkpoint(rig.work / MTP, config, tensors=list(_tensors(config)))
    batches = sizes.decode_batches[0], sizes.decode_batches[-1]
    waiting = tokens_until_all_decode(max(batches), sizes.decode_context, BATCHED_TOKENS)
    longest = sizes.decode_context + waiting + 2 * (sizes.warm_steps + sizes.decode_steps) + sizes.block_size
    shared = {
        "block_size": sizes.block_size,
        "max_num_seqs": max(batches),
        "max_batched_tokens": BATCHED_TOKENS,
        "max_model_len": longest,
        "kv_cache": str(2 * max(batches) * (longest + 2 * sizes.block_size) * kv_token_bytes(config)),
    }
    plain: dict[int, float] = {}
    for name, speculation in (("plain", 0), ("drafting", 1)):
        with serving(rig, engine_config(rig, directory, **shared, speculation=speculation)) as opened:
            for batch in batches:
                with bench.rows.case(f"{name}_b{batch}") as begin:
                    begin()
                    if speculation:
                        _drafting(bench, opened, batch, config["vocab_size"], plain.get(batch))
                    else:
                        plain[batch] = _seconds(bench, opened, batch, config["vocab_size"])
            bench.rows.check(f"{name}_recorded", opened.captured_graphs > 0, f"{opened.captured_graphs} graphs")


def _drafting(bench: Bench, opened: Serving, batch: int, vocabulary: int, plain: float | None) -> None:
    for way, (proposed, drafted) in WAYS.items():
        opened.core.resources.speculator = _Fixed(proposed, drafted)
        seconds = _seconds(bench, opened, batch, vocabulary)
        if plain is not None:
            most = MOST_FILLED if bench.sizes.long and way == "filled" else None
            note = f"{seconds * 1e3:.2f} ms a step, {plain * 1e3:.2f} without the layer"
            bench.rows.add(f"{way}_b{batch}_over_plain", seconds / plain, most=most, note=note)


def _seconds(bench: Bench, opened: Serving, batch: int, vocabulary: int) -> float:
    """Of a decode step of so many sequences."""
    sizes = bench.sizes
    count = sizes.warm_steps + sizes.decode_steps
    prompts = random_prompts(batch, sizes.decode_context, vocabulary, seed=batch)
    output = tokens_until_all_decode(batch, sizes.decode_context, BATCHED_TOKENS) + 2 * count  # each draft may be right
    opened.until_first_tokens(opened.submit(prompts, output))
    for _ in range(sizes.warm_steps):
        opened.step()
    began = time.perf_counter()
    for _ in range(sizes.decode_steps):
        opened.step()
    seconds = (time.perf_counter() - began) / sizes.decode_steps
    opened.finish()
    return seconds


class _Fixed(Speculator):
    """Has the model propose, and steps check, so many drafts of each sequence, 1 or none, whatever they cost."""

    def __init__(self, count: int, checked: int) -> None:
        super().__init__(most=1, most_of_step=1 << 30, by_model=True)
        self._count, self._checked = count, checked
        self._latest: WeakKeyDictionary[Sequence, tuple[int, NDArray[np.int32]]] = WeakKeyDictionary()

    def proposals(self, sampled: SequenceOf[Sequence]) -> NDArray[np.int64]:
        return np.full(len(sampled), self._count, np.int64)

    def proposed(self, sequence: Sequence, tokens: NDArray[np.int32]) -> None:
        self._latest[sequence] = sequence.num_tokens, tokens

    def chosen(
        self, decoding: SequenceOf[Sequence], known: SequenceOf[bool] | None = None
    ) -> tuple[NDArray[np.int64], bool]:
        return np.array([self._checked * self._has_draft(each) for each in decoding], np.int64), self._checked > 0

    def _has_draft(self, sequence: Sequence) -> bool:
        length, tokens = self._latest.get(sequence, (0, NO_DRAFTS))
        return length == sequence.num_tokens and len(tokens) > 0 and sequence.max_length - length > 1

    def guesses(self, sequence: Sequence, count: int) -> NDArray[np.int32]:
        return self._latest[sequence][1][:count]


def _tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the decoder with biases, and of a layer that drafts."""
    hidden, layer, more = config["hidden_size"], "model.layers.0.", "model.mtp_layers.0."
    for name, shape in decoder_tensors(config):
        drafting = name.replace(layer, more) if name.startswith(layer) else None
        for each in (name, *([drafting] if drafting else [])):
            yield each, shape
            if each.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                yield each.removesuffix("weight") + "bias", shape[:1]
    yield f"{more}input_proj.weight", (hidden, 2 * hidden)
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        yield f"{more}{norm}.weight", (hidden,)
