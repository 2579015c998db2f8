"""What OpenAI's API over HTTP costs beside our own client: throughput of many streams, and the time to a first token.

    python benchmarks/openai_http.py [--quick]

One deployment, one process that asks: by `Client.astream` over ZeroMQ, and by HTTP over connections that stay open, of
which every event is parsed. Both ask for the same prompts, which the cache has, and take turns.

1. 64 streams at once, as many as the engine runs, each of 64 tokens: `throughput_over_zmq` is HTTP's rate of tokens
   over ZeroMQ's (median of the rounds' ratios), `server_us_per_token` the time of a core that the server takes.
2. One request at a time: `ttft_extra_ms` is the median time to the first token by HTTP less that by ZeroMQ.
3. Structured output, in this process: `mask_us_per_token` is the median time in which the mask of a next token is made,
   along random answers to a schema of objects, lists, numbers and texts. A step of the model hides it.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from prompts import tokens
from smoke import deployed, lightly

from headwise import Client, EngineConfig, SamplingParams
from headwise.actors.deployment import Deployment
from headwise.runtime.loader.grammar import Vocabulary
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.loader.tokenizer import Tokenizer


@dataclass(frozen=True)
class Size:
    """streams: at once; length: tokens of each; asked: requests one after the other, by each way; forms: answers that
    have a form
    """

    streams: int = 64
    length: int = 64
    rounds: int = 7
    asked: int = 60
    forms: int = 30


FULL = Size()
QUICK = Size(streams=4, length=8, rounds=1, asked=3, forms=2)
PROMPT_TOKENS = 32
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "home": {"type": "object", "properties": {"street": {"type": "string"}, "number": {"type": "number"}}},
    },
    "required": ["name", "age", "tags", "home"],
}
LONGEST_FORM = 200
"""Tokens of an answer that has a form; random texts do not end soon."""


class Way(Protocol):
    """One of the two ways to the deployment."""

    async def ttft_s(self, place: int, prompt: list[int], length: int) -> float:
        """Ask, read all, and tell when the first token was there. ``place``: of what asks at the same time."""


class OverZmq:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def ttft_s(self, place: int, prompt: list[int], length: int) -> float:
        began, first = time.perf_counter(), 0.0
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length)
        async for delta in self._client.astream(prompt, sampling):
            first = first or (time.perf_counter() if delta.token_ids else 0.0)
        return first - began


class OverHttp:
    def __init__(self, port: int) -> None:
        self._port = port
        self._connections: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def ttft_s(self, place: int, prompt: list[int], length: int) -> float:
        if place not in self._connections:
            self._connections[place] = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._connections[place]
        asked = {"prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True, "stream": True}
        body = json.dumps(asked).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}"
        )
        began, first = time.perf_counter(), 0.0
        writer.write(head.encode() + b"\r\n\r\n" + body)
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                break
            if line.startswith(b"data: "):
                first = first or time.perf_counter()
                json.loads(line[6:])["choices"]
        await reader.readuntil(b"0\r\n\r\n")
        return first - began


async def rate(way: Way, prompts: Sequence[list[int]], size: Size) -> float:
    """Tokens per second of all streams together."""
    began = time.perf_counter()
    await asyncio.gather(*(way.ttft_s(place, prompt, size.length) for place, prompt in enumerate(prompts)))
    return size.streams * size.length / (time.perf_counter() - began)


def cpu_s(pid: int) -> float:
    """Seconds of a core that a process has taken."""
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


async def measure(ways: dict[str, Way], size: Size, server: int) -> dict[str, Any]:
    """server: process id of the HTTP server"""
    draw = np.random.default_rng(0)
    prompts = [tokens(draw, PROMPT_TOKENS) for _ in range(size.streams)]
    for way in ways.values():
        await rate(way, prompts, size)  # fills the cache
    rates: dict[str, list[float]] = {name: [] for name in ways}
    used_s = 0.0
    for number in range(size.rounds):
        for name in sorted(ways, reverse=bool(number % 2)):
            before_s = cpu_s(server)
            rates[name].append(await rate(ways[name], prompts, size))
            used_s += cpu_s(server) - before_s if name == "http" else 0.0
        shown = ", ".join(f"{name} {rates[name][-1]:.0f} tokens/s" for name in ways)
        print(f"round {number + 1}, {size.streams} streams: {shown}", flush=True)
    ttft: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(size.asked):
        for name in sorted(ways, reverse=bool(number % 2)):
            ttft[name].append(await ways[name].ttft_s(0, prompts[number % size.streams], 2))
    p50_ms = {name: 1e3 * statistics.median(ttft[name]) for name in ways}
    medians = {name: statistics.median(rates[name]) for name in ways}
    print(f"{'':6}{'tokens/s':>10}{'p50 TTFT of one, ms':>22}")
    for name in ways:
        print(f"{name:6}{medians[name]:>10.0f}{p50_ms[name]:>22.1f}")
    return {
        "throughput_over_zmq": statistics.median(h / z for h, z in zip(rates["http"], rates["zmq"], strict=True)),
        "ttft_extra_ms": p50_ms["http"] - p50_ms["zmq"],
        "server_us_per_token": 1e6 * used_s / (size.rounds * size.streams * size.length),
        "tokens_per_s": medians,
        "ttft_p50_ms": p50_ms,
        "streams": size.streams,
    }


def mask_us(model: Path, answers: int) -> float:
    """Of one token of one answer."""
    tokenizer = Tokenizer.from_directory(model)
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size)
    draw, taken_us = np.random.default_rng(0), []
    for _ in range(answers):
        matcher = vocabulary.matcher("json_schema", json.dumps(SCHEMA))
        mask = matcher.mask()
        for _ in range(LONGEST_FORM):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(draw.choice(allowed))
            if token in tokenizer.eos_token_ids:
                break
            began = time.perf_counter()
            matcher.take([token])
            mask = matcher.mask()
            taken_us.append(1e6 * (time.perf_counter() - began))
    return statistics.median(taken_us)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def main(arguments: Sequence[str] | None = None, running: Deployment | None = None) -> None:
    """running: a deployment to measure, in place of one of this script's own"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; says little")
    parser.add_argument("--ray", metavar="HOST:PORT", help="the Ray cluster to deploy to; default: one of its own")
    options = parser.parse_args(arguments)
    size = QUICK if options.quick else FULL
    config = EngineConfig(
        model="smollm2-135m",
        port=0,
        http=free_port(),
        standby=False,
        max_num_seqs=size.streams,
        max_model_len=512,
        block_size=16,
    )
    config = lightly(config) if options.quick else config
    with deployed(config, options.ray, running) as deployment, Client(deployment.client_address) as client:
        ways: dict[str, Way] = {"zmq": OverZmq(client), "http": OverHttp(deployment.config.http)}
        found = asyncio.run(measure(ways, size, deployment.actor_pids()["http-0"]))
    found["mask_us_per_token"] = mask_us(resolve_model(config.model, config.cache_path), size.forms)
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}))


if __name__ == "__main__":
    main()
