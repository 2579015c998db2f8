"""What steps should take on a GPU, computed from bytes, launches and counted instructions: models, not measurements.

    python benchmarks/gpu/estimates.py        # the tables of docs/gpu.md, which a test compares

What is not computed is assumed, and said to be. What was measured since is in `results/`, and no longer here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.sizes import FULL, Heads

from headwise.runtime.worker.prefill_graphs import worthwhile_tokens

US, MS = 1e-6, 1e-3
BYTES_BF16 = 2


@dataclass(frozen=True)
class Card:
    """bandwidth: bytes a second, read and written, of a copy, or of one read alone"""

    name: str
    sm: int
    sms: int
    clock_hz: float
    bandwidth: float


H200 = Card("H200", 90, 132, 1.75e9, 4.2e12)

LAUNCH_S = (2 * US, 4 * US)
"""Assumed: from a kernel's last full wave to the next one's first, within a graph."""


@dataclass(frozen=True)
class Table:
    """head: of its columns"""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("|  |", "| |")


# ---- a step of a mixture of experts ----

ERNIE_LAYERS = 28
"""Of ERNIE-4.5-21B-A3B; what is timed has a few of them."""

LAUNCHES = {"norms and sums": 2, "projections": 2, "KV write": 1, "attention": 1, "experts": 6}
"""Of a layer, in a graph."""


def asked_experts(experts: int, per_token: int, tokens: int) -> float:
    """Experts that ``tokens`` ask for on average, where each chooses without regard to the others."""
    return experts * (1 - (1 - per_token / experts) ** tokens)


def moe_bytes(config: Mapping[str, Any], batch: int, context: int) -> float:
    """Bytes that a decode step reads in bfloat16."""
    hidden, inner, layers = config["hidden_size"], config["moe_intermediate_size"], config["num_hidden_layers"]
    dense = config["moe_layer_start_index"]
    head_dim, kv_heads = config["head_dim"], config["num_key_value_heads"]
    attention = 2 * hidden * head_dim * (config["num_attention_heads"] + kv_heads)
    asked = asked_experts(config["moe_num_experts"], config["moe_k"], batch) + config["moe_num_shared_experts"]
    of_experts = 3 * hidden * inner * asked + hidden * config["moe_num_experts"]
    numbers = layers * attention + (layers - dense) * of_experts + dense * 3 * hidden * config["intermediate_size"]
    cached = batch * context * 2 * kv_heads * head_dim * layers
    return float(BYTES_BF16 * (numbers + hidden * config["vocab_size"] + cached))


def moe_step(card: Card, config: Mapping[str, Any], batches: Sequence[int], context: int) -> Table:
    """Of ERNIE-4.5-21B-A3B: weights and caches read once, and the launches between which little is read."""
    launches = config["num_hidden_layers"] * sum(LAUNCHES.values())
    rows = []
    for batch in batches:
        size = moe_bytes(config, batch, context)
        read = size / card.bandwidth
        least, most = (read + launches * each for each in LAUNCH_S)
        asked = asked_experts(config["moe_num_experts"], config["moe_k"], batch)
        rows.append([
            str(batch), f"{asked:.0f} of {config['moe_num_experts']}", f"{size / 1e9:.1f} GB", f"{read / MS:.1f} ms",
            f"{launches}", f"{least / MS:.1f} to {most / MS:.1f} ms", f"{read / most:.2f} to {read / least:.2f}",
        ])  # fmt: skip
    return Table(["batch", "experts of a layer", "read", "that takes", "launches", "a step", "of bandwidth"], rows)


# ---- prompts, launch by launch ----

HOST_S, CALLS, CALL_S = 165 * US, 10, 8 * US
"""Of a layer: our Python by `step_launches.py` on an AMD EPYC, addresses of NumPy's arrays among it, which take a third
of it and a tenth as long in CuPy; calls into CuPy and the driver, and what each is assumed to take."""
PRODUCTS, AT_BEST = 989e12, 0.6
"""Of bfloat16 a second, and the assumed share of it."""
PROMPTED = {
    "Qwen3-0.6B": (1024, 3072, Heads(16, 8, 128)), "Llama-3.2-1B": (2048, 8192, Heads(32, 8, 64)),
    "Llama-3.1-8B": (4096, 14336, Heads(32, 8, 128)),
}  # fmt: skip


def launched_prompts(tokens: Sequence[int]) -> Table:
    """A layer's products, without attention, beside what the host takes to enqueue it; and what is chosen by that."""
    host, rows = HOST_S + CALLS * CALL_S, []
    for name, (hidden, inner, heads) in PROMPTED.items():
        numbers = hidden * (heads.head_dim * 2 * (heads.q_heads + heads.kv_heads) + 3 * inner)
        seconds = [2 * numbers * count / (PRODUCTS * AT_BEST) for count in tokens]
        most = worthwhile_tokens(numbers, 1, PRODUCTS / 2)
        rows.append([name, *(f"{each / US:,.0f} us" for each in seconds), f"{host / US:.0f} us", f"{most:,}"])
    head = ["products of a layer, tokens", *(f"{count:,}" for count in tokens), "enqueued in", "graphs of up to"]
    return Table(head, rows)


def tables() -> Iterator[Table]:
    """Those of docs/gpu.md, in its order."""
    sizes = FULL
    yield launched_prompts((1024, 2048, 8192))
    yield moe_step(H200, sizes.moe | {"num_hidden_layers": ERNIE_LAYERS}, sizes.decode_batches, sizes.decode_context)


if __name__ == "__main__":
    print(*tables(), sep="\n\n")
