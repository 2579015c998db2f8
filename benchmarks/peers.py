"""headwise beside vLLM and llama.cpp on this machine's CPU: the same weights, the same token ids, in turns.

    python benchmarks/peers.py [--quick] [--model gemma3-270m] [--rounds 3] [--engine KEY=VALUE]

Every runtime has a process of its own, which loads once; then they take turns, scenario by scenario and round by round,
and only the one whose turn it is runs. All sample greedily, a fixed number of tokens. `decode1` and `long_decode` are
the rate while all requests decode, `prefill` is that of the prompt until its first token, `batch16` that of all output
until the last token. vLLM is run in bfloat16 and in float32, from the directory that headwise converts the GGUF file
into; llama.cpp computes from the file's own blocks, and is compared with `headwise_gguf`, which does the same, where
headwise can. Peers come with `make peers`; those that are missing are left out.

Last, a context of 12,000 tokens, where headwise also serves with half of the heads limited to a window, as no peer can.
SmolLM2 was trained for 8,192 tokens: this is about speed alone, and not part of `--quick`.

The last line is JSON: ratios of headwise over each peer (medians over the rounds) of the first model, and of all in
`models`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtimes.control import Process, Spec, tell, warm_up
from runtimes.model_files import RANDOM, ModelFiles, find_model, stretched
from runtimes.ours import add_engine_options, engine_fields, headwise_spec
from runtimes.scenarios import Scenario, long_scenarios, scenarios

from headwise.cache_controller.head_pattern import parse_pattern
from headwise.runtime.cli.terminal import progress

ROOT = Path(__file__).resolve().parents[1]
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
PATTERN = ROOT / "benchmarks" / "data" / "smollm2-135m-heads.json"
MODELS = ("smollm2-135m", "gemma3-270m")
PEERS = ("vllm_bf16", "vllm_fp32", "llamacpp")
QUICK_PEERS = ("vllm_bf16", "llamacpp")
THREADS = len(os.sched_getaffinity(0))
MAX_TOKENS, SLOTS = 2048, 16
"""Of a sequence, and sequences at once, in what all runtimes serve."""
LONG_TOKENS, LONG_OUTPUT = 12_000, 32
CHUNK = 1024
"""Tokens of a step: vLLM takes 2,048 by default; larger ones than this leave the caches of this size of model."""
HALF = {"sparsity": 0.5, "sink": 64, "window": 256}
"""Of the long context's head pattern."""


# ---- runtimes ----


def ours(model: str, max_tokens: int, engine: Mapping[str, Any]) -> dict[str, Spec]:
    """headwise, and where it computes from GGUF blocks, that, too."""
    base = {"model": model, "max_model_len": max_tokens, "kv_cache": "2GiB", "max_batched_tokens": CHUNK, **engine}
    return {"headwise": headwise_spec(**base), "headwise_gguf": headwise_spec(**{**base, "weights_dtype": "gguf"})}


def peers(python: Path, only: Sequence[str], files: ModelFiles, max_tokens: int, slots: int) -> dict[str, Spec]:
    """Those that are asked for, on all cores; none, and a line that says so, where their environment is missing."""
    if not only:
        return {}
    if not python.exists():
        print(f"{python} is missing: vLLM and llama.cpp are left out; `make peers` installs them", flush=True)
        return {}
    shared = {"PYTHONPATH": None, "OMP_NUM_THREADS": str(THREADS)}
    for_vllm = {
        **shared,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_USE_AOT_COMPILE": "0",  # what it saves cannot be loaded on a CPU (0.32), so each start would compile anew
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    vllm = {"directory": str(files.directory), "max_model_len": max_tokens}
    llama = {"file": str(files.gguf), "threads": THREADS, "slots": slots, "slot_tokens": max_tokens}
    known = {
        "vllm_bf16": Spec("vllm_cpu", python, {**vllm, "dtype": "bfloat16"}, for_vllm),
        "vllm_fp32": Spec("vllm_cpu", python, {**vllm, "dtype": "float32"}, for_vllm),
        "llamacpp": Spec("llama_cpp", python, llama, shared),
    }
    return {name: known[name] for name in only}


@contextmanager
def started(specs: Mapping[str, Spec]) -> Iterator[dict[str, Process]]:
    with ExitStack() as stack:
        running = {}
        for name, spec in specs.items():
            tell(f"loading {name}")
            running[name] = stack.enter_context(Process(name, spec))
            tell(f"loaded {name} in {running[name].load_s:.0f} s: {running[name].about}")
        yield running


# ---- measuring ----


@dataclass
class Measured:
    """Of one runtime.

    rates:  by scenario, tokens a second, a round each
    firsts: by scenario, all rounds' first tokens
    """

    about: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)
    firsts: dict[str, list[int]] = field(default_factory=dict)

    def add(self, key: str, rate: float, firsts: Sequence[int]) -> None:
        self.rates.setdefault(key, []).append(rate)
        self.firsts.setdefault(key, []).extend(firsts)

    @property
    def medians(self) -> dict[str, float]:
        return {key: round(statistics.median(rates), 1) for key, rates in self.rates.items()}


def measure(specs: Mapping[str, Spec], todo: Sequence[Scenario], rounds: int) -> dict[str, Measured]:
    """All scenarios on all runtimes, which take turns; another one begins each round."""
    with started(specs) as running:
        found = {name: Measured(process.about) for name, process in running.items()}
        for name, process in running.items():
            tell(f"warming up {name}")
            warm_up(process, todo)
        names = list(running)
        for round_ in range(rounds):
            first = round_ % len(names)
            for scenario in todo:
                for name in names[first:] + names[:first]:
                    rate, firsts = running[name].measure(scenario, round_)
                    found[name].add(scenario.key, rate, firsts)
                    tell(f"round {round_ + 1} of {rounds}: {scenario.what}: {name} {rate:.1f} tok/s")
    return found


def ratios(mine: Measured, theirs: Measured) -> dict[str, float]:
    """Ours over theirs, the median over the rounds."""
    return {
        key: round(statistics.median(a / b for a, b in zip(mine.rates[key], theirs.rates[key], strict=True)), 3)
        for key in theirs.rates
    }


def same_first(mine: Measured, theirs: Measured) -> float:
    """Share of requests that both gave the same first token: whether they compute the same model."""
    pairs = [(a, b) for key in mine.firsts for a, b in zip(mine.firsts[key], theirs.firsts[key], strict=True) if b >= 0]
    return round(sum(a == b for a, b in pairs) / max(1, len(pairs)), 3)


def compared_with(name: str, found: Mapping[str, Measured]) -> Measured:
    """Which of ours a runtime's rates are held against."""
    return found["headwise_gguf" if name == "llamacpp" and "headwise_gguf" in found else "headwise"]


def report(found: Mapping[str, Measured]) -> dict[str, Any]:
    """Ratios by peer, absolute rates of ours, what was run."""
    return {
        **{
            name: measured.medians if name.startswith("headwise") else ratios(compared_with(name, found), measured)
            for name, measured in found.items()
        },
        "rates": {name: measured.medians for name, measured in found.items()},
        "same_first": {name: same_first(found["headwise"], measured) for name, measured in found.items()},
        "about": {name: measured.about for name, measured in found.items()},
    }


def write_half_pattern(directory: Path) -> Path:
    """SmolLM2's head pattern without the name of the model that it was measured on."""
    scores = parse_pattern(PATTERN.read_text(encoding="utf-8"), str(PATTERN)).scores
    path = directory / "heads.tsv"
    path.write_text("\n".join("\t".join(map(str, row)) for row in scores) + "\n", encoding="utf-8")
    return path


def measure_long(python: Path, only: Sequence[str], engine: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """A context that the model was not trained for, in all runtimes, and with half of the heads windowed in ours."""
    todo, most = long_scenarios(LONG_TOKENS, LONG_OUTPUT), LONG_TOKENS + 384
    with progress() as bar:
        files = stretched(find_model(MODELS[0], bar), most, bar)
    with tempfile.TemporaryDirectory() as directory:
        specs = {"headwise": ours(files.name, most, engine)["headwise"]}
        half = {**specs["headwise"].options, "head_pattern": str(write_half_pattern(Path(directory))), **HALF}
        specs["headwise_half"] = headwise_spec(**half)
        found = measure({**specs, **peers(python, only, files, most, slots=1)}, todo, rounds)
    show(f"{MODELS[0]}, {LONG_TOKENS:,} tokens; headwise_half: half of the heads see {HALF['window']}", todo, found)
    over = {name: ratios(found["headwise_half"], measured) for name, measured in found.items()}
    rates = {name: measured.medians for name, measured in found.items()}
    return {"tokens": LONG_TOKENS, "rounds": rounds, "rates": rates, "half_over": over}


# ---- showing ----


def show(title: str, todo: Sequence[Scenario], found: Mapping[str, Measured]) -> None:
    """Tokens a second, medians, and headwise's over each."""
    print(f"\n{title}\n{'tokens a second':>44}" + "".join(f"{name:>15}" for name in found))
    for scenario in todo:
        cells = (f"{measured.medians[scenario.key]:15.1f}" for measured in found.values())
        print(f"{scenario.what:>44}{''.join(cells)}")
        over = (ratios(compared_with(name, found), measured)[scenario.key] for name, measured in found.items())
        print(f"{'headwise over it':>44}" + "".join(f"{ratio:15.2f}" for ratio in over))
    print(flush=True)


def of_random_model(model: str, beside: Sequence[str], arguments: Sequence[str] | None) -> None:
    """The same for one of `runtimes.model_files.RANDOM`, beside these peers where ``arguments`` name none."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    named = [] if {"--smoke", "--only"} & {*given} else [word for name in beside for word in ("--only", name)]
    main(["--model", model, "--no-long", "--engine", "dtype=bfloat16", *named, *given])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        action="append",
        help=f"a demo model, one of random numbers ({', '.join(RANDOM)}) or a GGUF file; default: {', '.join(MODELS)}",
    )
    parser.add_argument("--rounds", type=int)
    add_engine_options(parser)
    parser.add_argument("--only", action="append", choices=PEERS, help="this peer; may be repeated")
    parser.add_argument("--peers-python", type=Path, default=PEERS_PYTHON, help="of the environment with the peers")
    parser.add_argument("--no-long", action="store_true", help="leave out the long context")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="SmolLM2, one round, short outputs, without vLLM in float32: under five minutes",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny, and headwise alone but for --only: seconds")
    args = parser.parse_args(arguments)
    small = args.quick or args.smoke
    rounds = args.rounds or (1 if small else 3)
    only = args.only or (() if args.smoke else QUICK_PEERS if args.quick else PEERS)
    engine = {**({"kv_cache": "128MiB"} if args.smoke else {}), **engine_fields(args)}
    todo = scenarios(args.quick, args.smoke)
    models = {}
    for model in args.model or MODELS[: 1 if small else None]:
        with progress() as bar:
            files = find_model(model, bar, is_tiny=args.smoke)
        specs = {**ours(files.name, MAX_TOKENS, engine), **peers(args.peers_python, only, files, MAX_TOKENS, SLOTS)}
        if args.smoke and "llamacpp" not in only:
            del specs["headwise_gguf"]
        found = measure(specs, todo, rounds)
        show(model, todo, found)
        models[model] = report(found)
    result = {**next(iter(models.values())), "models": models, "rounds": rounds, "cores": THREADS}
    if not small and not args.no_long:
        result["long_context"] = measure_long(args.peers_python, only, engine, rounds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
