"""What it brings to keep documents in the cache that are asked about now and then, while others come and go.

Between two questions about a document come as many tokens of visitors, and of other documents, as the cache holds: by
recency alone each document is gone when it is asked for. Visitors come in groups; each asks once, and once more behind
its first prompt when the others of its group have. Two engines get the same prompts, one after the other, and take
turns; one is asked to keep the documents (`retain_s`).

    python benchmarks/retention.py [--quick] [--rounds 5]

The last line is JSON: `ttft_ratio`, time to the first token of an answer about a document where they are kept, over
that where they are not (medians over all questions); `time_ratio`, likewise for all that is asked in a round (median
of the rounds' ratios); `cached`, by engine, what share of the tokens of documents, and of visitors' first prompts when
they ask again, came from the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from smoke import lightly

from headwise import EngineConfig, LocalEngine, SamplingParams
from headwise.runtime.frontend.preprocessor import Preprocessor

MODEL = "smollm2-135m"
RETAIN_S = 3600.0


@dataclass(frozen=True)
class Load:
    """Numbers of tokens, of a cache that holds ``cache``.

    visitors: in a group; one group comes before each question
    """

    documents: int = 3
    document: int = 1536
    question: int = 32
    visitors: int = 3
    first: int = 896
    second: int = 128
    cache: int = 9600

    def config(self, base: EngineConfig) -> EngineConfig:
        card = Preprocessor.open(base).card
        blocks = self.cache // card.layout.block_size * len(card.plan.groups)
        return replace(base, kv_cache=str(blocks * card.layout.block_bytes))


FULL = Load()
QUICK = Load(documents=2, document=192, visitors=2, first=128, second=64, cache=832)


@dataclass
class Asked:
    """What came of an engine's requests. cached: by kind of request, (tokens from the cache, of those asked before)"""

    engine: LocalEngine
    retain_s: float
    ttft_s: list[float] = field(default_factory=list)
    cached: defaultdict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    def ask(self, prompt: np.ndarray, kind: str = "", known: int = 0) -> None:
        is_kept = kind == "documents" and self.retain_s > 0
        retained = {"retain_s": self.retain_s, "retain_tokens": known} if is_kept else {}
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        (result,) = self.engine.generate([prompt.tolist()], sampling, **retained)
        if kind == "documents":
            self.ttft_s.append(result.timings.ttft_s)
        self.cached[kind].append((result.usage.cached_tokens, known))

    def share(self, kind: str) -> float:
        served, known = np.sum(self.cached[kind], axis=0).tolist()
        return float(served / known)


def round_of(asked: Asked, load: Load, documents: np.ndarray, rng: np.random.Generator) -> float:
    """Ask about each document once, after visitors; the seconds that all of it took."""
    started = time.perf_counter()
    for document in documents:
        visitors = rng.integers(1000, 30000, (load.visitors, load.first + load.second))
        for prompt in visitors:
            asked.ask(prompt[: load.first])
        for prompt in visitors:
            asked.ask(prompt, "visitors", load.first)
        asked.ask(np.append(document, rng.integers(1000, 30000, load.question)), "documents", load.document)
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="short documents, one round: seconds")
    args = parser.parse_args(arguments)
    load, rounds = (QUICK, 1) if args.quick else (FULL, args.rounds)
    base = EngineConfig(model=MODEL, dtype="bfloat16")
    config = load.config(lightly(base) if args.quick else base)
    documents = np.random.default_rng(0).integers(1000, 30000, (load.documents, load.document))
    with LocalEngine(config, worker_process=False) as first, LocalEngine(config, worker_process=False) as second:
        engines = {"kept": Asked(first, RETAIN_S), "by recency": Asked(second, 0.0)}
        ratios = []
        print(f"{'round':>6} {'all, kept, s':>13} {'by recency, s':>14} {'ratio':>7}")
        for number in range(-1, rounds):  # nothing is cached before the first one, which does not count
            took = {
                name: round_of(asked, load, documents, np.random.default_rng(number + 2))
                for name, asked in engines.items()
            }
            if number < 0:
                for asked in engines.values():
                    asked.ttft_s.clear()
                    asked.cached.clear()
                continue
            ratios.append(took["kept"] / took["by recency"])
            print(f"{number:>6} {took['kept']:>13.2f} {took['by recency']:>14.2f} {ratios[-1]:>7.3f}")
    ttft = {name: statistics.median(asked.ttft_s) for name, asked in engines.items()}
    print(f"{'':>12} {'TTFT, ms':>9} {'documents cached':>17} {'visitors cached':>16}")
    for name, asked in engines.items():
        documents_share, visitors_share = asked.share("documents"), asked.share("visitors")
        print(f"{name:>12} {1000 * ttft[name]:>9.1f} {documents_share:>17.0%} {visitors_share:>16.0%}")
    result = {
        "ttft_ratio": ttft["kept"] / ttft["by recency"],
        "ttft_s": ttft,
        "time_ratio": statistics.median(ratios),
        "cached": {
            name: {kind: asked.share(kind) for kind in ("documents", "visitors")} for name, asked in engines.items()
        },
        "documents": load.documents,
        "document_tokens": load.document,
        "cache_tokens": load.cache,
        "between_tokens": load.documents * (load.visitors * (load.first + load.second) + load.question)
        + (load.documents - 1) * load.document,
        "rounds": rounds,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
