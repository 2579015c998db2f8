"""Two real engines: both serve whole requests, or one computes prompts and the other one decodes.

    python benchmarks/pd.py [--quick | --smoke] [--seed 0] [--ray HOST:PORT]

Chats of short prompts and long answers run without end, while long prompts arrive at a fixed rate. ``mixed`` and
``apart`` (one engine for prompts, one to decode) get the same requests at the same times, from the same two engines:
they change their roles in between, and begin with empty caches.

p99_tbt_ratio      99th percentile of the time between two tokens of a chat, of mixed over apart
throughput_ratio   output tokens a second, from the first request to the last end, of apart over mixed
bytes_ratio        what the engine that decodes fetched for a long prompt, with 3 of 4 heads limited to sink and window,
                   over that without
shm_over_memcpy    bytes a second of reads by shared memory over a plain copy, as `transports.py` has it: no engine runs
fetched_gb_per_s   bytes a second that it fetched with, while both engines took all cores
same_tokens        whether every request got the same tokens both ways

A figure is null where nothing was fetched. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from prompts import tokens
from recycle import PATTERN
from smoke import deployed, lightly
from transports import measured, over_plain

from headwise import Client, EngineConfig, SamplingParams
from headwise.actors.deployment import Deployment
from headwise.transfer.connectors.names import SHARED_MEMORY


@dataclass(frozen=True)
class Size:
    """How much is measured.

    chats:        that run at a time, each ``rounds`` times, with ``chat_tokens`` of prompt and ``answer`` of output
    long_prompts: that arrive every ``every_s``, with ``long_tokens`` each
    """

    chats: int = 4
    rounds: int = 4
    chat_tokens: int = 48
    answer: int = 96
    long_prompts: int = 12
    every_s: float = 2.5
    long_tokens: int = 1200
    long_answer: int = 8
    kv_cache: str = "400MiB"
    host_cache: str = "600MiB"


FULL = Size()
QUICK = replace(FULL, chats=2, rounds=1, answer=24, long_prompts=2, long_tokens=400, every_s=1.0)
SMOKE = replace(QUICK, chats=1, answer=8, long_prompts=1, long_tokens=200, kv_cache="48MiB", host_cache="64MiB")
CONFIG = EngineConfig(
    model="smollm2-135m",
    port=0,
    standby=False,
    cpu_threads=1,
    block_size=16,
    max_batched_tokens=512,
    decode_prompt_tokens=64,
)
SPLITS = {"mixed": (0, 0), "apart": (1, 1)}
"""Of two engines, how many compute prompts only, and how many decode only."""
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
REPORTED_S = 1.5
"""Statistics reach the scheduler within that time."""


@dataclass
class Seen:
    """What clients saw. gaps_s: seconds between two tokens of a chat; answers: by the request's name."""

    gaps_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    answers: dict[str, list[int]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.answers.values())) / self.seconds

    @property
    def tbt_p99_s(self) -> float:
        return float(np.percentile(self.gaps_s, 99))


def read(client: Client, seen: Seen, name: str, prompt: list[int], answer: int, is_chat: bool) -> None:
    asked, moments, said = time.perf_counter(), list[float](), list[int]()
    for delta in client.stream(prompt, GREEDY, max_tokens=answer):
        moments += [time.perf_counter()] * len(delta.token_ids)
        said += delta.token_ids
    seen.answers[name] = said
    if is_chat:
        seen.gaps_s += [after - before for before, after in pairwise(moments)]
    else:
        seen.ttft_s.append(moments[0] - asked)


def serve(client: Client, size: Size, seed: int) -> Seen:
    """The same requests at the same times, whatever serves them."""
    draw, seen = np.random.default_rng(seed), Seen()
    client.generate(tokens(draw, 64), GREEDY, max_tokens=2)  # the kernels' first calls
    chats = [[tokens(draw, size.chat_tokens) for _ in range(size.rounds)] for _ in range(size.chats)]
    prompts = [tokens(draw, size.long_tokens) for _ in range(size.long_prompts)]
    began = time.perf_counter()

    def chat(number: int) -> None:
        for turn, prompt in enumerate(chats[number]):
            read(client, seen, f"chat {number}.{turn}", prompt, size.answer, is_chat=True)

    def ask(number: int) -> None:
        time.sleep(max(0.0, began + (number + 0.5) * size.every_s - time.perf_counter()))
        read(client, seen, f"prompt {number}", prompts[number], size.long_answer, is_chat=False)

    threads = [threading.Thread(target=chat, args=(number,)) for number in range(size.chats)]
    threads += [threading.Thread(target=ask, args=(number,)) for number in range(size.long_prompts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen.seconds = time.perf_counter() - began
    return seen


def fetched(client: Client) -> tuple[int, float]:
    """Bytes that engines have fetched from each other, and the seconds that took."""
    time.sleep(REPORTED_S)
    transfers = [engine["transfers"].get("peer", {}) for engine in client.stats()["engines"].values()]
    return sum(each.get("bytes", 0) for each in transfers), sum(each.get("busy_s", 0.0) for each in transfers)


def begin(client: Client, split: tuple[int, int]) -> tuple[int, float]:
    """Have engines of these roles, with empty caches; what they have `fetched` until then."""
    client.scale(2, split=split)
    of_prompts, to_decode = split
    wanted = sorted(["prefill"] * of_prompts + ["decode"] * to_decode + ["mixed"] * (2 - of_prompts - to_decode))
    while sorted(engine["role"] for engine in client.stats()["engines"].values()) != wanted:
        time.sleep(0.1)
    client.reset_cache()
    return fetched(client)


def bytes_of_a_prompt(config: EngineConfig, size: Size, seed: int, ray: str | None) -> int:
    """What is fetched for one long prompt that is computed apart."""
    with (
        Deployment.start(replace(config, prefill_replicas=1, decode_replicas=1), ray) as deployment,
        Client(deployment.client_address) as client,
    ):
        fetched(client)  # by then engines have heard of each other
        client.generate(tokens(np.random.default_rng(seed), size.long_tokens), GREEDY, max_tokens=2)
        return fetched(client)[0]


def ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if part and whole else None


def compared(seen: Mapping[str, Seen]) -> dict[str, Any]:
    """What is told of what clients saw, ``mixed`` and ``apart``."""
    mixed, apart = seen["mixed"], seen["apart"]
    return {
        "p99_tbt_ratio": ratio(mixed.tbt_p99_s, apart.tbt_p99_s),
        "throughput_ratio": ratio(apart.tokens_per_s, mixed.tokens_per_s),
        "ttft_p50_s": {name: round(float(np.median(one.ttft_s)), 4) for name, one in seen.items()},
        "tbt_p99_s": {name: round(one.tbt_p99_s, 4) for name, one in seen.items()},
        "same_tokens": mixed.answers == apart.answers,
    }


def main(arguments: Sequence[str] | None = None, running: Deployment | None = None) -> None:
    """running: a deployment of two engines with host caches to measure, in place of one of this script's own"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few short requests: a minute or two")
    parser.add_argument("--smoke", action="store_true", help="fewer still, and nothing with windows: seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ray", metavar="HOST:PORT", help="the Ray cluster to deploy to; default: one of its own")
    options = parser.parse_args(arguments)
    size = SMOKE if options.smoke else QUICK if options.quick else FULL
    config = replace(lightly(CONFIG) if options.smoke else CONFIG, kv_cache=size.kv_cache, host_cache=size.host_cache)
    seen: dict[str, Seen] = {}
    moved, busy_s = 0, 0.0
    print(f"{'':8}{'TBT p50, ms':>14}{'p99, ms':>10}{'TTFT of long prompts, s':>26}{'tokens/s':>10}{'fetched, MB':>13}")
    with (
        deployed(replace(config, replicas=2), options.ray, running) as deployment,
        Client(deployment.client_address) as client,
    ):
        for name, split in SPLITS.items():
            before = begin(client, split)
            one = seen[name] = serve(client, size, options.seed)
            after = fetched(client)
            moved, busy_s = after[0] - before[0], after[1] - before[1]
            print(
                f"{name:8}{np.median(one.gaps_s) * 1e3:>14.1f}{one.tbt_p99_s * 1e3:>10.1f}"
                f"{np.median(one.ttft_s):>26.2f}{one.tokens_per_s:>10.1f}{moved / 1e6:>13.1f}",
                flush=True,
            )
    whole = windowed = 0
    if not options.smoke:
        with_windows = replace(config, head_pattern=str(PATTERN), sparsity=0.75, sink=32, window=128)
        whole = bytes_of_a_prompt(config, size, options.seed, options.ray)
        windowed = bytes_of_a_prompt(with_windows, size, options.seed, options.ray)
        print(f"for one long prompt {whole / 1e6:.1f} MB are fetched, {windowed / 1e6:.1f} MB with windows")
    rounds_and_share = (3, 8) if options.smoke else (21, 1)
    report = {
        **compared(seen),
        "bytes_ratio": ratio(windowed, whole),
        "shm_over_memcpy": over_plain(measured([SHARED_MEMORY], *rounds_and_share), SHARED_MEMORY),
        "fetched_gb_per_s": ratio(moved / busy_s / 1e9, 1.0) if busy_s else None,
        "fetched_mb": round(moved / 1e6, 2),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
