"""What narrower numbers cost: perplexity of a fixed text on a CPU, over that with everything in float32.

    python benchmarks/perplexity.py [--quick] [--model gemma3-270m] [--tokens 2048] [--variant int8] [--llamacpp]

The text is given to a worker as an engine gives a prompt: in chunks over the cache, the last tokens one at a time, as
they are decoded. `gguf` is compared with float32 of the same file's values. Top-1 is the share of positions whose
likeliest next token is float32's.

Where `make peers` was run, llama.cpp reads the same token ids from the same GGUF file, one at a time: its ratio over
our float32 of the file's values is what the format costs there. It rounds activations to 8 bits, and its cache is
float16.

The last line is JSON: by model, the ratio of each variant, under `error` its standard error, under `top1` its share;
and `gguf_over_llamacpp`, with its `error`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from peers import PEERS_PYTHON, peers
from runtimes.control import Process
from runtimes.model_files import find_model

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.loader.progress import SilentProgress
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.models.base import AttentionLayer, Embeds, Model
from headwise.runtime.ops.base import KernelArray, Tensor
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.protocol.batch import BatchRequest
from headwise.runtime.worker.model_loading import load_model
from headwise.runtime.worker.worker import ModelWorker
from headwise.runtime.worker.worker_parts import WorkerParts

TEXT = Path(__file__).parent / "data" / "perplexity.txt"
MODELS = ("smollm2-135m", "gemma3-270m")
VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "weights_dtype": "int8"},
    "gguf": {"dtype": "bfloat16", "weights_dtype": "gguf"},
    "kv_int8": {"dtype": "float32", "kv_dtype": "int8"},
    "kv_float8": {"dtype": "float32", "kv_dtype": "float8_e4m3fn"},
    "kv_int4": {"dtype": "float32", "kv_dtype": "int4"},
}
"""What is configured. All that is not follows `dtype`: with bfloat16, the cache too."""
LIMITS = {"bfloat16": 1.005, "int8": 1.01, "gguf": 1.01, "kv_int8": 1.01, "kv_float8": 1.02, "kv_int4": 1.1}
"""Of the ratio."""
CHUNK = 512
"""Tokens of a step."""
DECODED = 32
"""Tokens at the end that have a step each."""
ROWS = 128
"""Positions whose scores are looked at together: those of 262,144 words each take their room."""


@dataclass(frozen=True)
class Reading:
    """What a model made of a text. surprise: ``-ln p`` of each token but the first; likeliest: in the place of each"""

    surprise: NDArray[np.float64]
    likeliest: NDArray[np.int64]

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.surprise.mean()))

    def over(self, other: Reading) -> float:
        """This perplexity over another reading's of the same text."""
        return self.perplexity / other.perplexity

    def uncertainty(self, other: Reading) -> float:
        """The standard error of `over`: what another text of this length may well give besides."""
        difference = self.surprise - other.surprise
        return float(difference.std() / np.sqrt(len(difference)))

    def agreement(self, other: Reading) -> float:
        return float((self.likeliest == other.likeliest).mean())


class Reader(Model):
    """A model that notes how it reads ``text`` (token ids), whose tokens come in order."""

    def __init__(self, model: Model, text: NDArray[np.int32]) -> None:
        self.config, self._model, self._text = model.config, model, text
        self.is_reading = False
        self._surprise: list[float] = []
        self._likeliest: list[int] = []

    def forward(
        self,
        token_ids: KernelArray,
        positions: KernelArray,
        attention: AttentionLayer,
        embeds: Embeds | None = None,
        wanted: NDArray[np.int64] | None = None,
        stream: Tensor | None = None,
    ) -> Tensor:
        if not self.is_reading:
            return self._model.forward(token_ids, positions, attention, embeds, wanted, stream)
        hidden = self._model.forward(token_ids, positions, attention, embeds, None, stream)
        for first in range(0, len(token_ids), ROWS):
            self._note(hidden[first : first + ROWS], positions[first : first + ROWS] + 1)
        return hidden if wanted is None else hidden[wanted]

    def _note(self, hidden: Tensor, following: NDArray[np.int32]) -> None:
        logits = self._model.logits(hidden)
        assert logits is not None
        for row, position in zip(logits, following.tolist(), strict=True):
            if position < len(self._text):
                top = row.max()
                total = np.log(np.exp(row - top, dtype=np.float32).sum(dtype=np.float64))
                self._surprise.append(float(top) + total - float(row[self._text[position]]))
                self._likeliest.append(int(row.argmax()))

    @property
    def reading(self) -> Reading:
        return Reading(np.array(self._surprise), np.array(self._likeliest))

    def scores(self, hidden: Tensor) -> Tensor | None:
        return self._model.scores(hidden)

    def logits(self, hidden: Tensor) -> NDArray[np.float32] | None:
        return self._model.logits(hidden)


def read(config: EngineConfig, text: NDArray[np.int32]) -> Reading:
    """Read a text on a CPU with a model as it is configured."""
    readers: list[Reader] = []

    def load(*where: Any, **more: Any) -> Model:
        readers.append(Reader(load_model(*where, **more), text))
        return readers[-1]

    directory = resolve_model(config.model, config.cache_path)
    card = read_model_card(config, directory, identify=False)
    room = len(text) + 2 * card.layout.block_size  # a worker touches all of its cache at its start
    config = replace(config, kv_cache=f"{room * card.bytes_per_token:.0f}", max_model_len=len(text))
    worker = ModelWorker(config, directory, 0, SingleRank(), parts=WorkerParts(load_model=load))
    worker.initialize_cache()
    (reader,) = readers
    reader.is_reading = True
    tables, start = _tables(worker, len(text)), 0
    while start < len(text):
        in_chunks = len(text) - DECODED - start
        count = min(CHUNK, in_chunks) if in_chunks > 0 else 1
        result = worker.execute(_step(start, text[start : start + count], tables[: len(tables) if start == 0 else 0]))
        if result.error:
            raise SystemExit(result.error)
        start += count
    worker.close()
    return reader.reading


def _tables(worker: ModelWorker, tokens: int) -> NDArray[np.int32]:
    """Block table updates that give row 0 a block for each group and place of so many tokens."""
    groups, columns = len(worker.card.plan.groups), -(-tokens // worker.card.layout.block_size)
    where = np.stack(np.meshgrid(np.arange(groups), np.arange(columns), indexing="ij"), axis=-1).reshape(-1, 2)
    return np.insert(np.insert(where, 0, 0, axis=1), 3, np.arange(len(where)), axis=1).astype(np.int32)


def _step(start: int, tokens: NDArray[np.int32], tables: NDArray[np.int32]) -> BatchRequest:
    return BatchRequest(
        step_id=start,
        rows=np.zeros(1, np.int32),
        starts=np.array([start], np.int32),
        query_lens=np.array([len(tokens)], np.int32),
        token_ids=tokens,
        sample=np.zeros(1, np.bool_),
        table_updates=tables,
    )


def read_by_llamacpp(model: str, text: NDArray[np.int32]) -> Reading | None:
    """The same text in llama.cpp, from the model's GGUF file; None where it is not installed."""
    found = peers(PEERS_PYTHON, ["llamacpp"], find_model(model, SilentProgress()), len(text) + 1, slots=1)
    if not found:
        return None
    options = {**found["llamacpp"].options, "whole_cache": True, "threads": 1}  # several would spin for a token each
    spec = replace(found["llamacpp"], options=options)
    with Process("llamacpp", spec) as process:
        surprise, likeliest = process.read(text.tolist())
    return Reading(np.array(surprise), np.array(likeliest))


def compare(
    model: str,
    tokens: int,
    variants: Sequence[str] = tuple(VARIANTS),
    first: int = 0,
    with_llamacpp: bool = False,
) -> dict[str, Any]:
    """Ratios of a model's variants over ``tokens`` tokens of the text from the ``first`` on, printed as they come."""
    config = EngineConfig(model=model, device="cpu", tensor_ops="numba", dtype="float32")
    prompt = Preprocessor.open(config).prepare(prompt=TEXT.read_text(encoding="utf-8"))
    text = prompt.prompt_token_ids[first : first + tokens]
    exact = read(config, text)
    print(f"{model}, {len(text)} tokens: perplexity {exact.perplexity:.3f} in float32")
    found: dict[str, Any] = {"tokens": len(text), "perplexity": exact.perplexity, "error": {}, "top1": {}}
    readings = {}

    def add(name: str, reading: Reading) -> None:
        readings[name] = reading
        found[name], found["top1"][name] = reading.over(exact), reading.agreement(exact)
        found["error"][name] = reading.uncertainty(exact)
        limit = f"limit {LIMITS[name]:.3f}" if name in LIMITS else "no limit"
        print(
            f"    {name:<9} ratio {found[name]:.5f} +- {found['error'][name]:.5f} ({limit})   "
            f"top-1 {found['top1'][name]:7.2%}",
            flush=True,
        )

    for variant in variants:
        add(variant, read(replace(config, **VARIANTS[variant]), text))
    if with_llamacpp and (theirs := read_by_llamacpp(model, text)) is not None:
        add("llamacpp", theirs)
        if "gguf" in readings:
            found["gguf_over_llamacpp"] = readings["gguf"].over(theirs)
            found["error"]["gguf_over_llamacpp"] = readings["gguf"].uncertainty(theirs)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="this one alone")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="this one; may be repeated")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text, all that it has if it has fewer")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--llamacpp", action="store_true", help="llama.cpp, too: by itself with all variants only")
    parser.add_argument("--quick", action="store_true", help="the first 512 tokens, SmolLM2 only: seconds")
    args = parser.parse_args(arguments)
    models = (args.model,) if args.model else MODELS[:1] if args.quick else MODELS
    tokens, variants = 512 if args.quick else args.tokens, args.variant or tuple(VARIANTS)
    with_llamacpp = args.llamacpp or not (args.quick or args.variant)
    print(json.dumps({model: compare(model, tokens, variants, args.first, with_llamacpp) for model in models}))


if __name__ == "__main__":
    main()
