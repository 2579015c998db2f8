"""What the order saves in which `headwise batch` sends a file's requests: time, and prompt tokens that are computed.

    python benchmarks/batch.py [--quick]

A file of questions about documents, in no order, as such files are; the device's cache holds a third of the documents,
and there is no other tier. One deployment of an engine, then one of two, each on half of the cores. Both orders take
turns, each from an empty cache: `shared`, that of the command, and `file`, as the requests stand there. `time_ratio`
is the median over the rounds of the first one's time over the second's, `cached_shared` and `cached_file` the shares of
prompt tokens that the cache served, `cached_most` what it can serve at most. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from openai_http import free_port
from prompts import tokens
from smoke import deployed, lightly

from headwise import Client, EngineConfig
from headwise.actors.deployment import Deployment
from headwise.runtime.batch.answers import AnswerFile
from headwise.runtime.batch.requests import RequestFile
from headwise.runtime.batch.run import BatchOptions, BatchRun, Summary
from headwise.runtime.batch.server import Server
from headwise.runtime.loader.progress import SilentProgress

OWN_TOKENS = 32
"""Of each question, behind its document."""
ANSWER_TOKENS = 4
BLOCK = 64
BLOCK_NUMBERS = 90 * BLOCK * 2 * 64
"""Of SmolLM2's 90 KV heads of 64: keys and values."""


@dataclass(frozen=True)
class Size:
    """documents, and questions about each; length: tokens of a document; concurrency: requests at a time"""

    documents: int = 18
    questions: int = 6
    length: int = 1024
    concurrency: int = 6
    rounds: int = 3

    @property
    def cached_most(self) -> float:
        """The share of prompt tokens that the cache serves where each document is computed once."""
        return self.length * (self.questions - 1) / (self.questions * (self.length + OWN_TOKENS))

    def kv_cache(self, number_bytes: int) -> str:
        """Room for a third of the documents, each with a question and its answer."""
        return str(-(-self.documents // 3) * (self.length // BLOCK + 1) * BLOCK_NUMBERS * number_bytes)


FULL = Size()
QUICK = Size(documents=3, questions=2, length=128, concurrency=2, rounds=1)


def write_requests(path: Path, size: Size) -> None:
    rng = np.random.default_rng(0)
    prompts = [
        [*document, *tokens(rng, OWN_TOKENS)]
        for document in (tokens(rng, size.length) for _ in range(size.documents))
        for _ in range(size.questions)
    ]
    rng.shuffle(prompts)
    with path.open("w") as file:
        for number, prompt in enumerate(prompts):
            body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
            print(json.dumps({"custom_id": f"{number}", "url": "/v1/completions", "body": body}), file=file)


async def answer(requests: Path, url: str, order: str, size: Size) -> Summary:
    """Have all requests answered, in this order."""
    options = BatchOptions(size.concurrency, shares=order == "shared")
    with (
        tempfile.TemporaryDirectory() as directory,
        closing(RequestFile(requests)) as asking,
        closing(AnswerFile(Path(directory) / "answers.jsonl")) as answers,
    ):
        async with Server(url) as server:
            summary = await BatchRun(asking, asking.index(), answers, server, options, SilentProgress()).run()
        if summary.refused:
            raise SystemExit(f"{summary.refused} requests were refused: {answers.path.read_text()[:1000]}")
    return summary


def measure(requests: Path, deployment: Deployment, size: Size) -> dict[str, float]:
    times: dict[str, list[float]] = {"shared": [], "file": []}
    cached: dict[str, list[float]] = {"shared": [], "file": []}
    with Client(deployment.client_address, keys=deployment.client_keys) as client:
        for number in range(size.rounds):
            for order in sorted(times, reverse=bool(number % 2)):
                client.reset_cache()
                summary = asyncio.run(answer(requests, deployment.http_address, order, size))
                times[order].append(summary.seconds)
                cached[order].append(summary.cached_tokens / summary.prompt_tokens)
                print(
                    f"{number + 1:>5} {order:>7} {times[order][-1]:>8.1f} {100 * cached[order][-1]:>8.1f}", flush=True
                )
    return {
        "time_ratio": statistics.median(s / f for s, f in zip(times["shared"], times["file"], strict=True)),
        **{f"cached_{order}": statistics.median(shares) for order, shares in cached.items()},
    }


def main(arguments: Sequence[str] | None = None, running: Deployment | None = None) -> None:
    """running: a deployment to measure, in place of this script's own"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; says little")
    parser.add_argument("--ray", metavar="HOST:PORT", help="the Ray cluster to deploy to; default: one of its own")
    args = parser.parse_args(arguments)
    size = QUICK if args.quick else FULL
    kv_cache = size.kv_cache(4 if args.quick else 2)
    config = EngineConfig(
        model="smollm2-135m", port=0, http=free_port(), standby=False, kv_cache=kv_cache, host_cache="0"
    )
    config = lightly(config) if args.quick else config
    cores = len(os.sched_getaffinity(0))
    found: dict[str, Any] = {"cached_most": size.cached_most, "documents": size.documents, "questions": size.questions}
    with tempfile.TemporaryDirectory() as directory:
        requests = Path(directory) / "requests.jsonl"
        write_requests(requests, size)
        for name, engines in (("one_engine", 1), ("two_engines", 2)):
            print(f"{name}\n{'round':>5} {'order':>7} {'seconds':>8} {'cached %':>8}", flush=True)
            of_engines = replace(config, replicas=engines, cpu_threads=max(1, cores // engines))
            with deployed(of_engines, args.ray, running) as deployment:
                found[name] = measure(requests, deployment, size)
            if running is not None:
                break
    print(json.dumps(found, default=float))


if __name__ == "__main__":
    main()
