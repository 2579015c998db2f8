"""What LoRA adapters cost: tokens a second of decodes of which some requests have one, over those of which none has.

One engine serves the same requests in turns, greedily: without adapters, and with random ones of rank 16 of all
projections, a different one each. Time counts while all requests decode.

    python benchmarks/adapters.py [--quick] [--rounds 5] [--tokens 100]

The last line is JSON: `cases`, each with its weights, number of requests and how many of them are `adapted`, `plain_ms`
and `adapted_ms`, milliseconds of a step, and `ratio`, of tokens a second, each a median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from decodes import decode_rate

from headwise import EngineConfig, LocalEngine
from headwise.runtime.loader.adapters import CONFIG, WEIGHTS
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.loader.safetensors_file import TensorForm, write_safetensors

MODEL, RANK = "smollm2-135m", 16
ASKED = (
    "Write a story about a lighthouse keeper and a storm.",
    "Explain how a refrigerator works.",
    "Give me ten ideas for a birthday party.",
    "What is the difference between weather and climate?",
)
MOST = len(ASKED)
NAMES = [f"a{number}" for number in range(MOST)]


@dataclass(frozen=True)
class Case:
    weights: str
    requests: int
    adapted: int
    plain_ms: float
    adapted_ms: float
    ratio: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100, help="of each answer")
    parser.add_argument("--quick", action="store_true", help="a few tokens, one round: seconds")
    args = parser.parse_args(arguments)
    rounds, tokens, weights = args.rounds, args.tokens, ["bfloat16", "gguf"]
    if args.quick:
        rounds, tokens, weights = 1, 12, ["gguf"]
    print(f"{'weights':>9} {'requests':>8} {'adapted':>8} {'plain, ms':>10} {'adapted, ms':>12} {'ratio':>6}")
    with tempfile.TemporaryDirectory() as scratch:
        paths = {name: write_adapter(Path(scratch) / name, seed) for seed, name in enumerate(NAMES)}
        cases = [case for each in weights for case in measured(each, paths, rounds, tokens)]
    print(json.dumps({"rank": RANK, "rounds": rounds, "cases": [asdict(case) for case in cases]}))


def write_adapter(directory: Path, seed: int) -> Path:
    """A small one of all projections, as PEFT writes it."""
    directory.mkdir()
    source, draw = Checkpoint(resolve_model(MODEL, EngineConfig().cache_path)), np.random.default_rng(seed)
    arrays = {}
    for name in source.names:
        at = name.removesuffix(".weight")
        if at.endswith("_proj"):
            outputs, inputs = source.shape(name)
            arrays[f"base_model.model.{at}.lora_A.weight"] = draw.standard_normal((RANK, inputs), np.float32)
            arrays[f"base_model.model.{at}.lora_B.weight"] = draw.standard_normal((outputs, RANK), np.float32)
    forms = {name: TensorForm("F32", array.shape) for name, array in arrays.items()}
    write_safetensors(directory / WEIGHTS, forms, iter(arrays.values()))
    (directory / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 1e-3}))
    return directory


def measured(weights: str, paths: dict[str, Path], rounds: int, tokens: int) -> Iterator[Case]:
    """Cases of weights of one kind."""
    adapters = ",".join(f"{name}={path}" for name, path in paths.items())
    config = {"model": MODEL, "dtype": "bfloat16", "weights_dtype": weights, "prefix_caching": False}
    with LocalEngine(EngineConfig.from_dict({**config, "adapters": adapters}), worker_process=False) as engine:
        for requests, adapted in ((1, 1), (MOST, MOST), (MOST, MOST // 2)):
            asked, names = ASKED[:requests], [*NAMES[:adapted], *[""] * (requests - adapted)]
            pairs = [
                (decode_rate(engine, asked, tokens), decode_rate(engine, asked, tokens, names))
                for _ in range(rounds + 1)
            ][1:]  # the first one warms up
            plain, slower = (requests * 1e3 / statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(second / first for first, second in pairs)
            print(
                f"{weights:>9} {requests:>8} {adapted:>8} {plain:>10.2f} {slower:>12.2f} {ratio:>6.2f}",
                flush=True,
            )
            yield Case(weights, requests, adapted, plain, slower, ratio)


if __name__ == "__main__":
    main()
