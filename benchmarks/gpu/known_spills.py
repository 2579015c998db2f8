"""What kernels are known to spill by Triton 3.9.0, and why it is left so: see `machine_code.py --served`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spills:
    """Of one kernel: bytes in all, instructions within loops over tiles, and the reason."""

    bytes: int
    in_loops: int
    why: str


NOTHING = Spills(0, 0, "")

_ONCE = "between loops, once a program; "
FOUR_WARPS = _ONCE + "with 8 warps none, and 1.5 times the instructions for a product"
CONVERTED = _ONCE + "what is converted, and its scales, are in registers beside the sums"
HALVED = CONVERTED + "; 64 rows, not 128, take nearly twice the instructions for a product"
WIDE = _ONCE + "128 rows of 256 numbers pass through registers"
HALVES = _ONCE + "two programs share the results of 512 already"
TRIANGLE = "products in two parts, sums of both in registers, without wgmma to keep operands in shared memory"
SCALED = "one instruction a tile; with own blocks of 64 tokens none"
IN_LOOPS = "2 to 10 instructions a tile; 64 rows of 512 converted numbers, the least rows that wgmma takes"

KNOWN_SPILLS: dict[tuple[object, ...], Spills] = {
    (80, 96, "bfloat16", "prefill"): Spills(44, 0, FOUR_WARPS),
    (80, 128, "bfloat16", "prefill"): Spills(64, 0, FOUR_WARPS),
    (80, 128, "int4", "prefill"): Spills(184, 0, HALVED),
    (80, 128, "int8", "prefill"): Spills(216, 0, HALVED),
    (90, 192, "float8_e4m3fn", "prefill"): Spills(8, 0, CONVERTED),
    (90, 192, "int8", "prefill"): Spills(16, 0, CONVERTED),
    (90, 256, "bfloat16", "prefill"): Spills(88, 0, WIDE),
    (90, 256, "float8_e4m3fn", "prefill"): Spills(160, 0, CONVERTED),
    (90, 256, "int8", "prefill"): Spills(168, 0, CONVERTED),
    (90, 512, "bfloat16", "prefill"): Spills(328, 0, HALVES),
    (90, 512, "float8_e4m3fn", "prefill"): Spills(88, 4, IN_LOOPS),
    (90, 512, "int4", "prefill"): Spills(60, 10, IN_LOOPS),
    (90, 512, "int8", "prefill"): Spills(80, 2, IN_LOOPS),
    (100, 128, "float8_e4m3fn", "prefill"): Spills(96, 0, CONVERTED),
    (100, 128, "int8", "prefill"): Spills(96, 0, CONVERTED),
    (100, 256, "bfloat16", "prefill"): Spills(64, 0, WIDE),
    (100, 512, "bfloat16", "prefill"): Spills(308, 0, HALVES),
    (100, 512, "float8_e4m3fn", "prefill"): Spills(32, 0, CONVERTED),
    (100, 512, "int4", "prefill"): Spills(40, 0, CONVERTED),
    (100, 512, "int8", "prefill"): Spills(32, 0, CONVERTED),
    (90, 128, "bfloat16", "prefill by TMA"): Spills(64, 0, WIDE),
    (90, 256, "bfloat16", "prefill by TMA"): Spills(80, 0, WIDE),
    (100, 256, "bfloat16", "prefill by TMA"): Spills(48, 0, WIDE),
    (80, "delta-net of 32 heads", "bfloat16", "solve"): Spills(184, 0, TRIANGLE),
    (80, "delta-net of 32 heads", "bfloat16", "carry"): Spills(48, 6, TRIANGLE + "; 6 instructions a chunk"),
    (80, "state space model of 64 heads", "bfloat16", "walk"): Spills(
        8, 0, _ONCE + "a tile of the state is in registers"
    ),
    (90, "latents, 128 heads of ranks", "int8", "decode"): Spills(8, 1, SCALED),
    (100, "latents, 128 heads of ranks", "int8", "decode"): Spills(8, 1, SCALED),
}
"""By compute capability, head size or what else, dtype of the cache or of weights, kernel."""
