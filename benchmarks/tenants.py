"""One tenant sends a crowd of prompts at once, and another one asks now and then: how long the second one waits.

All prompts are as long, and none is cached. A deployment of one engine, on this CPU, is told whose requests are whose
(`apart`), as an HTTP server tells it by API keys, or is not (`together`), in turns. The crowd is more than an engine
takes (`engine_queue`), so that most of it waits in the scheduler. vLLM, which knows of no tenants, gets as many prompts
of as many tokens at the same times; it comes with `make peers`, and is left out where it is missing. SmolLM2 in
bfloat16.

    python benchmarks/tenants.py [--quick] [--rounds 3]

The last line is JSON: `ttft_s`, median and 90th percentile of the seconds to a first token of those who ask now and
then, medians over the rounds; `crowd_s`, seconds until all of the crowd is answered; `over_together` and `over_vllm`,
those where tenants are told apart over the others' (`ttft`, `crowd`), medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from peers import PEERS_PYTHON, THREADS, started
from peers import peers as specs_of_peers
from prompts import tokens
from runtimes.control import Process, tell
from runtimes.model_files import find_model
from smoke import deployed, lightly

from headwise import Client, EngineConfig, SamplingParams
from headwise.actors.deployment import Deployment
from headwise.runtime.cli.terminal import progress

MODEL = "smollm2-135m"
APART, TOGETHER, VLLM = "apart", "together", "vllm_bf16"
TENANTS = {APART: ("crowd", "guest"), TOGETHER: ("", "")}
PERCENTS = (50, 90)


@dataclass(frozen=True)
class Load:
    """crowd: prompts at once; guests: prompts of the other tenant, ``every_s`` one
    length, answer: tokens of all prompts, and of their outputs
    """

    crowd: int = 220
    guests: int = 12
    every_s: float = 2.0
    length: int = 600
    answer: int = 8

    @property
    def comes(self) -> list[float]:
        """When each of the guests does, in seconds."""
        return [(1 + number) * self.every_s for number in range(self.guests)]

    def prompts(self, round_: int, which: int) -> tuple[list[list[int]], list[list[int]]]:
        """The crowd's, and the guests'."""
        rng = np.random.default_rng([11, round_, which])
        made = [tokens(rng, self.length) for _ in range(self.crowd + self.guests)]
        return made[: self.crowd], made[self.crowd :]


FULL = Load()
QUICK = Load(crowd=6, guests=2, every_s=0.1, length=96, answer=2)


@dataclass(frozen=True)
class Round:
    """Seconds to the guests' first tokens, by `PERCENTS`, and until the crowd is answered."""

    ttft: list[float]
    crowd: float

    @classmethod
    def of(cls, firsts: Sequence[float], crowd: float) -> Round:
        return cls(np.percentile(firsts, PERCENTS).tolist(), crowd)


# ---- who is asked ----


def ask_deployment(client: Client, tenants: tuple[str, str], load: Load, round_: int, which: int) -> Round:
    """tenants: the crowd's name, and the guests'"""
    crowd, guests = load.prompts(round_, which)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=load.answer)
    began, ended = time.perf_counter(), list[float]()

    def answer_all() -> None:
        client.generate(crowd, sampling, tenant=tenants[0])
        ended.append(time.perf_counter() - began)

    firsts: list[float] = [0.0] * len(guests)

    def answer(number: int) -> None:
        sent = time.perf_counter()
        client.generate(guests[number], replace(sampling, max_tokens=1), tenant=tenants[1])
        firsts[number] = time.perf_counter() - sent

    asking = [threading.Thread(target=answer_all)]
    asking[0].start()
    for number, at in enumerate(load.comes):
        time.sleep(max(0.0, began + at - time.perf_counter()))
        asking.append(threading.Thread(target=answer, args=(number,)))
        asking[-1].start()
    for each in asking:
        each.join()
    return Round.of(firsts, ended[0])


def ask_runtime(process: Process, load: Load, round_: int, which: int) -> Round:
    crowd, guests = load.prompts(round_, which)
    served = process.serve([*crowd, *guests], load.answer, [0.0] * len(crowd) + load.comes)
    return Round.of(
        [one.marks[0][0] for one in served[len(crowd) :]], max(one.marks[-1][0] for one in served[: len(crowd)])
    )


# ---- results ----


def over(found: Mapping[str, list[Round]], other: str) -> dict[str, float | list[float]]:
    """Medians of the rounds' ratios."""
    pairs = list(zip(found[APART], found[other], strict=True))
    ttft = [statistics.median(mine.ttft[at] / theirs.ttft[at] for mine, theirs in pairs) for at in range(len(PERCENTS))]
    return {"ttft": ttft, "crowd": statistics.median(mine.crowd / theirs.crowd for mine, theirs in pairs)}


def show(ttft_s: Mapping[str, list[float]], crowd_s: Mapping[str, float]) -> None:
    print(f"\n{'seconds':>12}" + "".join(f"{f'first token, p{each}':>20}" for each in PERCENTS) + f"{'crowd':>10}")
    for name, times in ttft_s.items():
        print(f"{name:>12}" + "".join(f"{each:>20.3f}" for each in times) + f"{crowd_s[name]:>10.1f}")


def main(arguments: Sequence[str] | None = None, running: Deployment | None = None) -> None:
    """running: what is asked in place of a deployment of its own"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers-python", type=Path, default=PEERS_PYTHON, help="of the environment with vLLM")
    parser.add_argument("--quick", action="store_true", help="a crowd of six, headwise alone: seconds")
    args = parser.parse_args(arguments)
    rounds, load = (1, QUICK) if args.quick else (args.rounds, FULL)
    with progress() as bar:
        files = find_model(MODEL, bar)
    specs = specs_of_peers(args.peers_python, () if args.quick else (VLLM,), files, 1024, slots=16)
    found: dict[str, list[Round]] = {name: [] for name in (*TENANTS, *specs)}
    config = EngineConfig(model=MODEL, port=0, dtype="bfloat16", max_model_len=1024, kv_cache="1GiB")
    if args.quick:
        config = replace(lightly(config), kv_cache="64MiB", engine_queue=2)
    with ExitStack() as stack:
        peers = stack.enter_context(started(specs))
        deployment = stack.enter_context(deployed(config, None, running))
        client = stack.enter_context(Client(deployment.client_address))
        for round_ in range(rounds + 1):  # the first one is not counted: kernels and memory are not there yet
            for which, name in enumerate(found):
                if name in TENANTS:
                    its = ask_deployment(client, TENANTS[name], load, round_, which)
                else:
                    its = ask_runtime(peers[name], load, round_, which)
                tell(f"round {round_} of {rounds}: {name}")
                if round_:
                    found[name].append(its)
    ttft_s = {name: np.median([its.ttft for its in all_], axis=0).tolist() for name, all_ in found.items()}
    crowd_s = {name: statistics.median(its.crowd for its in all_) for name, all_ in found.items()}
    show(ttft_s, crowd_s)
    result = {
        "ttft_s": ttft_s,
        "crowd_s": crowd_s,
        **{f"over_{name.partition('_')[0]}": over(found, name) for name in found if name != APART},
        "load": vars(load),
        "rounds": rounds,
        "cores": THREADS,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
