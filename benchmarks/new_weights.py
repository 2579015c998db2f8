"""How long requests pause when a model's weights are changed under them, and how long a new start would take.

Requests decode behind long prompts when new weights come, as from a training step: a checkpoint that nobody has read
yet. Either what was computed of them is kept, or they are computed anew. `update`: until the new weights are had,
reading them included, while tokens still come; `pause`: from the last token by the old weights until all requests have
one by the new ones. `start`: an engine that is made with these weights, of a process that has imported all it needs,
until it has said a token.

    python benchmarks/new_weights.py [--quick] [--rounds 3] [--requests 8] [--prompt 2000]

The last line is JSON, medians over the rounds in seconds: `kept` and `anew`, each with `update_s` and `pause_s`, and
`start_s`; `start_over_kept` and `anew_over_kept`: how many times as long as the pause of kept requests these take.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from headwise import EngineConfig, LocalEngine, SamplingParams
from headwise.runtime.config.new_weights import with_weights
from headwise.runtime.engine.operations import NewWeights
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.protocol.weights import Weights

MODEL = "smollm2-135m"
CHANGED_BYTES = 1 << 20
"""Of a checkpoint's last ones, which differ between steps."""


class Steps:
    """Checkpoints of a training, each written once, into a directory of its own."""

    def __init__(self, base: Path, directory: Path) -> None:
        self._base, self._directory, self._count = base, directory, 0

    def next(self) -> str:
        """The next one; the one before is deleted, but for the last."""
        self._count += 1
        target = self._directory / f"step-{self._count}"
        shutil.copytree(self._base, target, ignore=shutil.ignore_patterns("*.headwise*", ".headwise*"))
        weights = np.memmap(target / "model.safetensors", np.uint8, "r+")
        weights[-CHANGED_BYTES::4] ^= np.uint8(self._count)
        weights.flush()
        shutil.rmtree(self._directory / f"step-{self._count - 2}", ignore_errors=True)
        return str(target)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of each")
    parser.add_argument("--quick", action="store_true", help="short prompts, one round: seconds")
    args = parser.parse_args(arguments)
    rounds, requests, prompt = (1, 2, 200) if args.quick else (args.rounds, args.requests, args.prompt)
    base = EngineConfig(model=MODEL, dtype="bfloat16", kv_cache="1GiB", packed_cache=False)
    prompts = np.random.default_rng(0).integers(1000, 30000, (requests, prompt)).tolist()
    found: defaultdict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="headwise-steps-") as scratch:
        steps = Steps(resolve_model(MODEL, base.cache_path), Path(scratch))
        with LocalEngine(base, worker_process=False) as engine:
            for _ in range(rounds):
                for how in ("kept", "anew"):
                    update_s, pause_s = changed(engine, prompts, steps.next(), keeps=how == "kept")
                    found[f"{how} update"].append(update_s)
                    found[f"{how} pause"].append(pause_s)
        for _ in range(rounds):
            found["start"].append(started(replace(base, model=steps.next()), prompts[0][:16]))
    show(found, requests, prompt)
    of = {name: statistics.median(values) for name, values in found.items()}
    result = {how: {"update_s": of[f"{how} update"], "pause_s": of[f"{how} pause"]} for how in ("kept", "anew")}
    told = {"model": MODEL, "rounds": rounds, "requests": requests, "prompt": prompt, "start_s": of["start"]}
    kept = of["kept pause"]
    ratios = {"start_over_kept": of["start"] / kept, "anew_over_kept": of["anew pause"] / kept}
    print(json.dumps({**result, **told, **ratios}))


def changed(engine: LocalEngine, prompts: list[list[int]], weights: str, *, keeps: bool) -> tuple[float, float]:
    """Change weights once all requests decode; seconds until they are had, and of the pause."""
    core = engine.core
    sampling = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
    said = {begun(engine, prompt, sampling): 0 for prompt in prompts}
    while min(said.values()) < 3:
        for delta in core.step(None):
            said[delta.request_id] += len(delta.token_ids)
    start = last = time.perf_counter()
    with ThreadPoolExecutor(1) as reader:  # as an engine of a deployment does, while it serves on
        reading = reader.submit(with_weights, core.card, engine.config, weights)
        while not reading.done():
            core.step(None)
            last = time.perf_counter()
    operation = core.change_weights(NewWeights(Weights(Path(weights).name, weights), reading.result(), keeps))
    waiting, update_s = set(said), 0.0
    while waiting:
        deltas, now = core.step(None), time.perf_counter()
        told = {delta.request_id for delta in deltas if delta.weights}
        last = now if deltas and not told and len(waiting) == len(said) else last
        waiting -= told
        update_s = update_s or (now - start if operation.is_done else 0.0)
    end = time.perf_counter()
    for request_id in said:
        core.abort(request_id)
    while core.has_work():
        core.step(None)
    return update_s, end - last


def begun(engine: LocalEngine, prompt: list[int], sampling: SamplingParams) -> str:
    request = engine.preprocessor.prepare(prompt=prompt, sampling=sampling)
    engine.core.add(request)
    return request.request_id


def started(config: EngineConfig, prompt: list[int]) -> float:
    """Seconds until a new engine says its first token."""
    start = time.perf_counter()
    with LocalEngine(config, worker_process=False) as engine:
        engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))
        return time.perf_counter() - start


def show(found: dict[str, list[float]], requests: int, prompt: int) -> None:
    print(f"{MODEL}, {requests} requests behind {prompt} tokens each; seconds, median [least, most]")
    for name, values in found.items():
        print(f"{name:>12}  {statistics.median(values):7.3f}  [{min(values):.3f}, {max(values):.3f}]")


if __name__ == "__main__":
    main()
