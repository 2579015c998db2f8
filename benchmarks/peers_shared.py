"""Questions about one document beside vLLM on this CPU: SmolLM2 in bfloat16, the same token ids, in turns.

    python benchmarks/peers_shared.py [--quick] [--rounds 3] [--engine KEY=VALUE]

All questions come at once. `decode`: of a document that is cached, the rate while all are answered. `questions`: of a
new document each round, the rate of all output from when they come until the last token. Both runtimes cache prefixes;
vLLM comes with `make peers`, and is left out where it is missing.

The last line is JSON: `rates`, tokens a second of each runtime, medians over the rounds, and `over_vllm`, medians of
ratios, of both scenarios.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from peers import PEERS_PYTHON, THREADS, measure, show
from peers import peers as specs_of_peers
from peers_drafts import over
from runtimes.model_files import find_model
from runtimes.ours import add_engine_options, engine_fields, headwise_spec
from runtimes.scenarios import Scenario, decode_rate, output_rate

from headwise.runtime.cli.terminal import progress

MODEL = "smollm2-135m"
OURS, VLLM = "headwise", "vllm_bf16"
MAX_TOKENS = 8192
"""What the model was trained for."""


def scenarios(requests: int, document: int, question: int, answer: int) -> list[Scenario]:
    sizes = requests, document + question, answer
    return [
        Scenario("decode", f"{requests} answers about {document:,} tokens", *sizes, decode_rate, True, document),
        Scenario("questions", "the same of a new document: output", *sizes, output_rate, False, document),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--document", type=int, default=7500, help="tokens of it")
    add_engine_options(parser)
    parser.add_argument("--peers-python", type=Path, default=PEERS_PYTHON, help="of the environment with vLLM")
    parser.add_argument("--quick", action="store_true", help="a short document, one round, headwise alone: seconds")
    args = parser.parse_args(arguments)
    rounds, requests, document, answer, cache = args.rounds, args.requests, args.document, 64, "1GiB"
    if args.quick:
        rounds, requests, document, answer, cache = 1, 3, 600, 8, "256MiB"
    base = {"model": MODEL, "dtype": "bfloat16", "max_model_len": MAX_TOKENS, "kv_cache": cache}
    with progress() as bar:
        files = find_model(MODEL, bar)
    specs = {OURS: headwise_spec(**{**base, **engine_fields(args)})}
    specs |= specs_of_peers(args.peers_python, () if args.quick else (VLLM,), files, MAX_TOKENS, slots=requests)
    todo = scenarios(requests, document, 32, answer)
    found = measure(specs, todo, rounds)
    show(MODEL, todo, found)
    result = {
        "rates": {name: measured.medians for name, measured in found.items()},
        "over_vllm": {scenario.key: over(found, OURS, VLLM, scenario.key) for scenario in todo},
        "about": {name: measured.about for name, measured in found.items()},
        "requests": requests,
        "document": document,
        "answer": answer,
        "rounds": rounds,
        "cores": THREADS,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
