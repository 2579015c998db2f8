"""The host half of decodes that read a prefix together: see `joint_jit`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter

from headwise.kernels.base import AttentionBatch
from headwise.kernels.cuda.launch import (
    OVERLAPS,
    OVERLAPS_FROM,
    Array,
    Grid,
    Kernel,
    TritonLauncher,
    Variant,
    address_of,
)
from headwise.kernels.cuda.parameters import Argument
from headwise.kernels.cuda.tiles import Tile, joint_tile
from headwise.kernels.cuda.workspace import BESIDE, MOST_KV_HEADS, NUMBER_BYTES, PartsWorkspace
from headwise.kernels.joint import JOINT_ROWS, MOST_TOGETHER

PROGRAMS = 2
"""For each multiprocessor: what a prefix is read by, whatever its length."""

LEAST_SPLIT_TOKENS = 256

OF_JOINT = {"joint": "*i32", "seen": "*fp32"}
"""The last parameters of a decode of sequences some of which have read tokens together."""

SIGNATURE = (
    "query", "seen", "counters", "partial", "partial_lse", "key", "value", "key_scale", "value_scale", "cu_seqlens_q",
    "seq_lens", "block_tables", "joint", "head_group", "head_slot", "head_window", "batch", "kv_heads", "groups",
    "max_blocks", "block_bytes", "slot_bytes", "query_stride", "score_scale", "cap", "units", "fewest_units",
)  # fmt: skip
_in_order: Callable[[dict[str, Argument]], tuple[Argument, ...]] = itemgetter(*SIGNATURE)
_CONSTANTS = (
    "SHARE", "HEAD_DIM", "BLOCK_D", "VALUE_DIM", "BLOCK_V", "BLOCK_SIZE", "SOFTCAP", "QUANTISED", "PACKED",
)  # fmt: skip
_NO_BOUND = 1 << 20


@dataclass(frozen=True)
class JointVariants:
    """together: what a group sees of its prefix; apart: what each of its sequences sees besides"""

    together: Variant
    apart: Variant


def joint_variants(
    prompt: Variant, decode: Variant, q_dtype: str, kv_dtype: str, sm: int, tile: Tile | None = None
) -> JointVariants | None:
    """Those beside a shape's own variants; None where it has too many heads over one, or there is no tile for them.

    prompt: of which types and constants are those that tiles are read by
    tile:   None: that of the card
    """
    of_prompt, of_decode = dict(prompt.constants), dict(decode.constants)
    of_card = joint_tile(of_decode["HEAD_DIM"], q_dtype, kv_dtype, sm)
    if of_card is None or 2 * of_decode["SHARE"] > JOINT_ROWS:
        return None
    tile = tile or of_card
    constants = {name: of_decode[name] for name in _CONSTANTS} | {
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "MIN_SPLIT_TILES": max(1, LEAST_SPLIT_TOKENS // tile.keys),
        "SPLIT_TILES": _NO_BOUND,
        "KV_BYTES": of_prompt["KV_BYTES"],
        OVERLAPS: sm >= OVERLAPS_FROM,
    }
    types = dict(prompt.signature) | OF_JOINT
    signature = tuple((name, types[name]) for name in SIGNATURE)
    multiples = tuple(name for name in prompt.multiples if name in SIGNATURE)
    together = Variant(
        "attend_joint", signature, tuple(constants.items()), multiples, tile.warps, tile.stages, module="joint_jit"
    )
    own = tuple((name, True if name == "JOINT" else value) for name, value in decode.constants if name not in OF_JOINT)
    return JointVariants(together, replace(decode, signature=(*decode.signature, *OF_JOINT.items()), constants=own))


@dataclass(frozen=True)
class _Ready:
    together: Kernel
    apart: Kernel
    value_dim: int


class JointDecodes:
    """Launches both kernels of shapes that have them. What the first gives the second is of one layer at a time.

    allocate: as of `TritonAttention`
    """

    def __init__(self, launcher: TritonLauncher, allocate: Callable[[int], Array], workspace: PartsWorkspace) -> None:
        self._launcher, self._allocate, self._workspace = launcher, allocate, workspace
        self._ready: dict[JointVariants, _Ready] = {}
        self._seen: list[Array] = []  # the last one is the largest; graphs may have the address of any

    def prepare(self, variants: JointVariants, q_heads: int) -> None:
        """Have both loaded, and room for results of so many query heads."""
        if variants not in self._ready:
            prepare, value_dim = self._launcher.prepare, dict(variants.together.constants)["VALUE_DIM"]
            self._ready[variants] = _Ready(prepare(variants.together), prepare(variants.apart), value_dim)
            self._workspace.reserve(self._parts, value_dim)
        needed = MOST_TOGETHER * q_heads * (self._ready[variants].value_dim + BESIDE) * NUMBER_BYTES
        if not self._seen or self._seen[-1].nbytes < needed:
            self._seen.append(self._allocate(needed))

    def attend(
        self,
        variants: JointVariants,
        batch: AttentionBatch,
        arguments: dict[str, Argument],
        own: tuple[Argument, ...],
        grid: Grid,
    ) -> None:
        """A decode of sequences some of which read tokens together: first these, then the rest. Prepared before.

        arguments: by name, of any kernel of attention
        own, grid: a decode's, in order
        """
        ready, (_, kv_heads, _), sequences = self._ready[variants], grid, batch.cu_seqlens_q.shape[0] - 1
        seen, joint = address_of(self._seen[-1]), address_of(batch.joint)
        units = max(1, PROGRAMS * self._launcher.sms // kv_heads)
        told = arguments | self._workspace.arguments(self._parts, ready.value_dim)
        told |= {"seen": seen, "joint": joint, "units": units, "fewest_units": units}
        ready.together((units + sequences, kv_heads, 1), _in_order(told))
        ready.apart(grid, (*own, joint, seen))

    @property
    def _parts(self) -> int:
        """Partial results, at most: as many as the rows of two for each program."""
        return 2 * max(PROGRAMS * self._launcher.sms, MOST_KV_HEADS) * JOINT_ROWS
