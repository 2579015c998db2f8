"""Recurrent states for the benchmarks of the layers that keep them: where they lie, and how they are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from gpu.bench import Bench
from gpu.random_bytes import random
from gpu.rig import Array, Rig, Work
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.state_layout import RECURRENT, StateSizes, state_layout

Sequences = Sequence[tuple[int, int]]
"""As (queries, context)."""


@dataclass(frozen=True)
class States:
    """Of a layer's members in one step. state_bytes: that a decode reads, and as many that it writes"""

    arena: Array
    layout: BlockLayout
    batch: AttentionBatch
    heads: HeadTable
    state_bytes: int

    @property
    def where(self) -> tuple[Array, BlockLayout, AttentionBatch, HeadTable]:
        """As kernels are told of them."""
        return self.arena, self.layout, self.batch, self.heads

    def on_host(self, rig: Rig) -> States:
        """A copy."""
        tables: dict[str, Any] = {
            name: rig.download(getattr(self.batch, name)) for name in ("cu_seqlens_q", "seq_lens", "block_tables")
        }
        batch, heads = replace(self.batch, **tables), self.heads.elsewhere(rig.download)
        return replace(self, arena=rig.download(self.arena), batch=batch, heads=heads)


class Step(Protocol):
    """What a layer computes of one step."""

    @property
    def states(self) -> States: ...

    def on(self, rig: Rig) -> Work:
        """The call that computes it."""


def random_states(rig: Rig, sizes: StateSizes, members: int, block_size: int, sequences: Sequences) -> States:
    """Each sequence has blocks where it is read from and where it ends."""
    layout = state_layout(block_size, members, sizes)
    tables = _tables(sequences, block_size, rig.seed)
    counts = np.array([count for count, _ in sequences], np.int32)
    heads = np.zeros(members, np.int32)
    return States(
        arena=random(rig, (int(tables.max() + 1) * layout.block_bytes // 4,), "float32", salt=1).view(np.uint8),
        layout=layout,
        batch=AttentionBatch(
            rig.upload(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
            rig.upload(np.array([context for _, context in sequences], np.int32)),
            rig.upload(tables),
            1,
            max_query_len=int(counts.max()),
        ),
        heads=HeadTable(*map(rig.upload, (heads, np.arange(members, dtype=np.int32), heads, heads))),
        state_bytes=len(sequences) * members * sizes.share * sizes.key_dim * sizes.value_dim * 4,
    )


def _tables(sequences: Sequences, block_size: int, seed: int) -> NDArray[np.int32]:
    columns = -(-max(context for _, context in sequences) // block_size)
    has = np.zeros((len(sequences), columns), np.bool_)
    for row, (count, context) in enumerate(sequences):
        has[row, (context - 1) // block_size] = True
        has[row, max(context - count - 1, 0) // block_size] |= context > count
    tables = np.full(has.shape, -1, np.int32)
    tables[has] = np.random.default_rng((seed, 5)).permutation(int(has.sum()))
    return tables


def mixed_sequences(block_size: int) -> Sequences:
    """Decodes, a prompt and a prompt's next chunk."""
    size = block_size
    return [(1, size + 5), (2 * size + 3, 2 * size + 3), (size + 1, 2 * size + 9), (1, 1)]


def tokens_of(sequences: Sequences) -> int:
    return sum(count for count, _ in sequences)


def state_distance(rig: Rig, states: States, expected: NDArray[np.uint8]) -> float:
    """Relative distance of what lies in an arena from what should."""
    return distance(rig.download(states.arena).view(np.float32), expected.view(np.float32))


def distance(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Relative distance; NaN if anything is NaN."""
    exact = expected.astype(np.float64)
    return float(np.linalg.norm(found.astype(np.float64) - exact) / np.linalg.norm(exact))


def measure(
    bench: Bench, step_of: Callable[[Sequences], Step], batches: Sequence[int], prompts: Sequence[int], name: str = ""
) -> None:
    """States per second that decodes read and write, over what a copy does; and the time of prompts."""
    rig, rows = bench.rig, bench.rows
    context = 10 * bench.sizes.block_size + 7  # the block that is read is written
    for batch in batches:
        with rows.case(f"{name}b{batch}_of_bandwidth") as begin:
            begin()
            step = step_of([(1, context)] * batch)
            seconds, state_bytes = bench.seconds({"ours": step.on(rig)})["ours"], step.states.state_bytes
            fills = state_bytes >= bench.sizes.fills_card // 4
            note = f"{seconds * 1e6:.1f} us, {RECURRENT} states of {state_bytes / 2**20:.0f} MiB read and written"
            share = 2 * state_bytes / seconds / bench.bandwidth
            rows.add(f"{name}b{batch}_of_bandwidth", share, least=0.75 if fills else None, note=note)
    for tokens in prompts:
        with rows.case(f"{name}t{tokens}") as begin:
            begin()
            seconds = bench.seconds({"ours": step_of([(tokens, tokens)]).on(rig)})["ours"]
            rows.add(
                f"{name}t{tokens}", seconds * 1e3, "ms", note=f"{tokens / seconds / 1e6:.1f} million tokens a second"
            )
