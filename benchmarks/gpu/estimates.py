"""What steps should take on a GPU, computed from bytes, launches and counted instructions: models, not measurements.

    python benchmarks/gpu/estimates.py        # the tables of docs/gpu.md, which a test compares

Instructions of attention are those that `machine_code.py` counts, which a test looks after, too. What is not computed
is assumed, and said to be.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.sizes import FULL, Heads

from headwise.cache_controller.dtypes import packed_bytes
from headwise.kernels.cuda.attention import Tuning
from headwise.kernels.cuda.tiles import decode_tile
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

ISSUED = 0.6
"""Assumed: the share of its slots in which an SM issues, where four warps a tile multiply and wait for memory."""

LATENCY_S = (1 * US, 1.5 * US)
"""Assumed: to memory and back."""

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


# ---- decode of unlike lengths ----

MOST_SPLITS = 128
"""As `walk_jit.MAX_SPLITS`."""
PLACES_PER_SM = 3
"""Programs of decode at head size 128 that an SM's shared memory has room for."""
PLANNED_S, MERGED_S = 3 * US, 2 * US
"""Assumed: what planning is not hidden behind other programs, and what merging takes at the end."""


def skewed_decode(card: Card, heads: Heads, batch: int, contexts: tuple[int, int], block_size: int) -> Table:
    """One long sequence among short ones: how it is cut, and what is not read at full speed."""
    short, long = contexts
    tuning, tile = Tuning(), decode_tile(heads.head_dim, heads.dtype, heads.dtype, card.sm, block_size)
    size = ((batch - 1) * short + long) * heads.kv_heads * 2 * heads.head_dim * BYTES_BF16
    read = size / card.bandwidth
    of_short, of_long = ceil(short / tile.keys), ceil(long / tile.keys)
    tiles = of_long + (batch - 1) * of_short
    units = max(1, card.sms * tuning.split_programs // heads.kv_heads)
    split = max(ceil(tiles / units), tuning.min_split_tokens // tile.keys)
    programs = (ceil(of_long / split) + (batch - 1) * ceil(of_short / split)) * heads.kv_heads
    places = card.sms * PLACES_PER_SM
    each = tiles * heads.kv_heads / places
    idle = of_short / 2 / each
    whole = read * (1 + idle) + PLANNED_S + MERGED_S
    alone = [of_long / tile.stages * latency for latency in LATENCY_S]
    return Table(["", "one program a sequence and head", "splits by real lengths"], [
        ["read", f"{size / 1e9:.2f} GB: {read / US:.0f} us", "the same"],
        ["tiles of a head", f"{tiles:,}", "the same"],
        ["longest program", f"{of_long:,} tiles", f"{split} tiles"],
        ["programs", f"{batch * heads.kv_heads:,}", f"{programs:,}, in {places} places: {each:.0f} tiles each"],
        ["alone at the end", f"{heads.kv_heads} programs, with {tile.stages} tiles in flight each",
         f"half a short sequence: {idle:.1%}"],
        ["a step", f"{alone[0] / MS:.1f} to {alone[1] / MS:.1f} ms, {read / alone[1]:.2f} to {read / alone[0]:.2f} of "
         "bandwidth", f"{whole / US:.0f} us, {read / whole:.2f} of bandwidth"],
    ])  # fmt: skip


SINGLE_S = {"planning": 1.5 * US, "first tile": 1.5 * US}
"""Assumed: of a step of one sequence, where nothing hides it; once more where programs wait for others' places."""
COUNT_S, MERGE_S = 1 * US, 0.75 * US
"""Assumed: until a part is stored and counted; and to read the parts of a group."""
MERGED = 16
"""As `merge_jit.GROUP`."""


def merged(parts: int) -> float:
    """Seconds until the parts of a head are its result: groups of them, then, if there are several, those."""
    return COUNT_S + MERGE_S + (merged(ceil(parts / MERGED)) if parts > MERGED else 0)


def single_decode(card: Card, heads: Heads, contexts: Sequence[int], block_size: int) -> Table:
    """One sequence: what its first and last microseconds leave of the card's bandwidth; cut as batches are, and as few
    sequences are."""
    tuning, tile = Tuning(), decode_tile(heads.head_dim, heads.dtype, heads.dtype, card.sm, block_size)
    rows = []
    for each in (tuning.split_programs, tuning.few_programs):
        units = max(1, card.sms * each // heads.kv_heads)
        for context in contexts:
            size, tiles = context * heads.kv_heads * 2 * heads.head_dim * BYTES_BF16, ceil(context / tile.keys)
            split = max(ceil(tiles / min(units, MOST_SPLITS)), tuning.min_split_tokens // tile.keys)
            parts = ceil(tiles / split)
            waves = 1 if parts * heads.kv_heads <= card.sms * PLACES_PER_SM else 2
            read = size / card.bandwidth
            whole = waves * sum(SINGLE_S.values()) + read + merged(parts)
            rows.append([f"{each}", f"{context:,} tokens", f"{read / US:.1f} us", f"{parts}, {split} tiles each",
                         f"{waves * sum(SINGLE_S.values()) / US:.1f} us", f"{merged(parts) / US:.2f} us",
                         f"{whole / US:.1f} us", f"{read / whole:.2f}"])  # fmt: skip
    head = ["programs an SM, about", "", "read in", "parts of a head", "until tiles come", "merged in", "a step"]
    return Table([*head, "of bandwidth"], rows)


# ---- caches of fewer bits ----

COUNTED = {"bfloat16": 387, "int8": 592, "float8_e4m3fn": 491, "int4": 521}
"""A warp's instructions for a decode's tile of 64 keys and values of 128 numbers on sm_90."""


def quantised_decode(card: Card, heads: Heads, block_size: int) -> Table:
    """Bytes a second that instructions allow, for a batch that fills the card."""
    rows = []
    for kv_dtype, instructions in COUNTED.items():
        tile = decode_tile(heads.head_dim, heads.dtype, kv_dtype, card.sm, block_size)
        scales = {"int8": 8, "float8_e4m3fn": 8, "int4": 2 * 4 * heads.head_dim // 32}.get(kv_dtype, 0)
        size = packed_bytes(kv_dtype, tile.keys * 2 * heads.head_dim) + tile.keys * scales
        issued = card.sms * card.clock_hz * 4 / tile.warps / instructions * size  # four schedulers an SM
        needed = 0.8 * card.bandwidth / issued
        rows.append([
            f"`{kv_dtype}`", f"{size / 1024:g} KiB", str(instructions), f"{ISSUED * issued / 1e12:.1f} TB/s",
            f"{min(1.0, ISSUED * issued / card.bandwidth):.2f}", f"{needed:.2f}",
        ])  # fmt: skip
    head = ["cache", "a tile", "instructions", f"at {ISSUED} of the issue slots", "of what is copied"]
    return Table([*head, "slots that 0.8 needs"], rows)


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


# ---- sampling ----

SAMPLED_ISSUED = 0.7
"""Assumed, as `ISSUED`: there are no products here."""
EDGE_S, TAIL_S = 4 * US, 5 * US
"""Assumed: a launch's begin and end, where all its blocks run at once; and what a row's last part does on its own."""
INSTRUCTIONS = {"likeliest": 8, "survey": 9, "count_keys": 20, "few": 6, "draw": 7, "draw all": 20}
"""For a token, by the lanes of a warp together, counted in NVRTC's code for sm_90."""
BEFORE = {"greedy": (1, 10), "no threshold": (2, 41), "top-k 50": (5, 87), "top-p 0.9": (5, 100), "both": (7, 114)}
"""Launches and microseconds, measured on an H200, when bins were of several keys."""


@dataclass(frozen=True)
class Sampling:
    """Rows of bfloat16 scores on a card."""

    card: Card
    rows: int
    vocabulary: int

    def _issued(self, instructions: float) -> float:
        warps = self.rows * self.vocabulary / 32
        return warps * instructions / (self.card.sms * 4 * self.card.clock_hz * SAMPLED_ISSUED)

    def first(self, kernel: str) -> float:
        """Seconds of the pass that reads from memory; later ones find scores in L2."""
        return max(self.rows * self.vocabulary * BYTES_BF16 / self.card.bandwidth, self._issued(INSTRUCTIONS[kernel]))

    def later(self, kernel: str) -> float:
        """Seconds of another launch."""
        return EDGE_S + TAIL_S + self._issued(INSTRUCTIONS[kernel])

    def ways(self) -> dict[str, tuple[int, float]]:
        """By name: launches, seconds."""
        survey, greedy = (EDGE_S + self.first(kernel) for kernel in ("survey", "likeliest"))
        some = self.later("draw")
        return {
            "greedy": (1, greedy),
            "no threshold": (2, survey + self.later("draw all")),
            "top-k 50": (3, survey + self.later("few") + some),
            "top-p 0.9": (3, survey + self.later("count_keys") + some),
            "both": (3, survey + self.later("few") + some),
        }


def sampling(card: Card, rows: int, vocabulary: int) -> Table:
    """A step's tokens, after its scores."""
    return Table(["", "launches", "us", "before: launches", "us, measured"], [
        [name, str(launches), f"{seconds / US:.0f}", *map(str, BEFORE[name])]
        for name, (launches, seconds) in Sampling(card, rows, vocabulary).ways().items()
    ])  # fmt: skip


def tables() -> Iterator[Table]:
    """Those of docs/gpu.md, in its order."""
    sizes = FULL
    yield launched_prompts((1024, 2048, 8192))
    yield skewed_decode(H200, sizes.attention, sizes.skewed[0], sizes.skewed[1:], sizes.block_size)
    yield single_decode(H200, sizes.attention, (8192, 32768), sizes.block_size)
    yield moe_step(H200, sizes.moe | {"num_hidden_layers": ERNIE_LAYERS}, sizes.decode_batches, sizes.decode_context)
    yield sampling(H200, 64, 128_256)
    yield quantised_decode(H200, sizes.attention, sizes.block_size)


if __name__ == "__main__":
    print(*tables(), sep="\n\n")
