"""What the assembler makes of attention and experts, counted without a GPU: instructions of a tile, registers, spills.

    python benchmarks/gpu/machine_code.py [--sm 90] [--head-dim 64,96,128,256,512] [--kv-dtype bfloat16]
    python benchmarks/gpu/machine_code.py --served [--sm 90]                  # `make machine-code`
    python benchmarks/gpu/machine_code.py --latents 16,64 [--sm 90] [--kv-dtype int8]
    python benchmarks/gpu/machine_code.py --experts 2048,768 [--sm 90] [--weight-bits 4 --weight-group 128]

A loop is what lies between an instruction and a branch back to it; those that multiply matrices walk tiles of keys, or
of the depth of experts. The exit status is 1 where such a loop spills, or where ptxas says that it serialises wgmma.

`--served` looks at all head sizes, dtypes of caches and cards that are served, and at the experts and states of
`served_kernels.py`, in as many processes as there are cores. There the exit status is 1 where ptxas serialises wgmma,
or anything spills more than `known_spills.py` has of it; what spills less is told, too, so that the list stays true.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.known_spills import KNOWN_SPILLS, NOTHING
from gpu.served_kernels import CARDS, Served, served

from headwise.kernels.cuda.attention import AttentionShape, variants_of
from headwise.kernels.cuda.cubins import Compiled, Target, compile_variant
from headwise.kernels.cuda.dsa import IndexShape
from headwise.kernels.cuda.experts import ExpertShape
from headwise.kernels.cuda.experts import variants_of as expert_variants
from headwise.kernels.cuda.launch import Variant
from headwise.kernels.cuda.mla import LatentShape
from headwise.kernels.cuda.precompile import LatentModel, add_weight_options, codes_of
from headwise.kernels.dsa import index_dtype
from headwise.kernels.experts import Routing

LATENT_KERNELS = ("prefill", "decode", "gathered", "expanded", "scores", "chosen")
"""Names of `LatentModel.variants`."""

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
_MULTIPLIES = re.compile(r"\b(HGMMA|HMMA|UTCHMMA|UTCQMMA|IMMA|QGMMA)\b")


@dataclass(frozen=True)
class Loop:
    """A loop over tiles.

    instructions: of a warp
    wide:         loads and asynchronous copies of 16 bytes
    spills:       stores and loads of what has no register
    """

    instructions: int
    multiplications: int
    wide: int
    spills: int


def loops_of(sass: str) -> Iterator[Loop]:
    """Innermost loops that multiply matrices, as ``cuobjdump -sass`` shows a kernel."""
    code = [(int(match[1], 16), match[2]) for match in _INSTRUCTION.finditer(sass)]
    spans = []
    for end, (address, text) in enumerate(code):
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) <= address:
            begin = next(at for at, (other, _) in enumerate(code) if other >= int(target[1], 16))
            spans.append((begin, end + 1))
    for begin, end in spans:
        if any(begin <= first and last <= end and (first, last) != (begin, end) for first, last in spans):
            continue
        body = [text for _, text in code[begin:end]]
        count = sum(bool(_MULTIPLIES.search(text)) for text in body)
        if count:
            wide, spills = (
                sum(bool(re.search(kind, text)) for text in body) for kind in (r"\.128\b", r"\b(STL|LDL)\b")
            )
            yield Loop(len(body), count, wide, spills)


def sass_of(compiled: Compiled) -> str:
    """The machine code in words, by the cuobjdump that Triton brings."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.cubin)
        file.flush()
        return subprocess.run([str(tool), "-sass", file.name], capture_output=True, text=True, check=True).stdout


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.served:
        return look_at_served(CARDS if options.sm is None else (options.sm,))
    options.sm = options.sm or 90
    failed = 0
    print("Of a tile: instructions (products, accesses of 16 bytes, spills)")
    print()
    counted = "rows" if options.experts else "query heads" if options.latents else "head size"
    print(f"| {counted} | kernel | registers | spilled | serialised | of a tile |")
    print("| --- | --- | --- | --- | --- | --- |")
    for size, name, variant in _kernels(options):
        compiled = compile_variant(variant, Target(options.sm, 12))
        loops = list(loops_of(sass_of(compiled)))
        failed |= compiled.is_serialised or any(loop.spills for loop in loops)
        said = "yes" if compiled.is_serialised else "no"
        shown = ", ".join(f"{one.instructions} ({one.multiplications}, {one.wide}, {one.spills})" for one in loops)
        facts = (size, name, compiled.registers, compiled.spilled_bytes, said, shown)
        print("|", " | ".join(map(str, facts)), "|", flush=True)
    return int(failed)


# ---- all that are served ----


@dataclass(frozen=True)
class Seen:
    """What became of one. spilled: bytes, of all of it; looped: instructions within loops over tiles"""

    registers: int
    spilled: int
    looped: int
    is_serialised: bool


def look_at(kernel: Served) -> Seen:
    """Compile one."""
    compiled = compile_variant(kernel.variant, Target(kernel.sm, 12))
    looped = sum(loop.spills for loop in loops_of(sass_of(compiled)))
    return Seen(compiled.registers, compiled.spilled_bytes, looped, compiled.is_serialised)


def verdict(seen: Seen, known: tuple[int, int]) -> str:
    """What is wrong with a kernel of which (bytes, instructions within loops) are known to spill; empty: nothing."""
    if seen.is_serialised:
        return "serialised"
    more = seen.spilled > known[0] or seen.looped > known[1]
    return f"spills more than the {known[0]} bytes ({known[1]} in loops) that are known" if more else ""


def look_at_served(cards: Sequence[int]) -> int:
    """Print a table of all; the exit status."""
    kernels, failed = served(cards), 0
    print("| card | head size | cache, weights | kernel | registers | bytes spilled | of them in loops | |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for kernel, seen in zip(kernels, pool.map(look_at, kernels), strict=True):
            spills = KNOWN_SPILLS.get(astuple(kernel), NOTHING)
            wrong = verdict(seen, (spills.bytes, spills.in_loops))
            failed |= bool(wrong)
            less = (seen.spilled, seen.looped) != (spills.bytes, spills.in_loops) and not wrong
            said = f"**{wrong}**" if wrong else "less than is known: shorten known_spills.py" if less else spills.why
            facts = (f"sm_{kernel.sm}", kernel.size, kernel.numbers, kernel.kernel, seen.registers)
            print("|", " | ".join(map(str, (*facts, seen.spilled, seen.looped, said))), "|", flush=True)
    return int(failed)


def _kernels(options: argparse.Namespace) -> Iterator[tuple[int, str, Variant]]:
    """(head size, or query heads of latents, or rows of experts; name; kernel) of all that is counted."""
    if options.experts:
        yield from _experts(options)
        return
    for heads in options.latents:
        latents = LatentShape(heads, 512, 64, options.block_size, "bfloat16", options.kv_dtype)
        index = IndexShape(64, 128, options.block_size, "bfloat16", index_dtype(options.kv_dtype))
        named = zip(LATENT_KERNELS, LatentModel(latents, index=index).variants(options.sm), strict=False)
        yield from ((heads, name, variant) for name, variant in named)
    for head_dim in () if options.latents else options.head_dim:
        shape = AttentionShape(options.share, head_dim, options.block_size, "bfloat16", options.kv_dtype)
        for name, variant in zip(("prefill", "decode"), variants_of(shape, options.sm), strict=False):
            yield head_dim, name, variant


def _experts(options: argparse.Namespace) -> Iterator[tuple[int, str, Variant]]:
    hidden, inner = options.experts
    codes = codes_of(options, hidden), codes_of(options, inner)
    shape = ExpertShape(
        Routing(128, 8, None), 0, hidden, inner, "silu", options.dtype, up_codes=codes[0], down_codes=codes[1]
    )
    for variant in expert_variants(shape, options.sm):
        sizes = dict(variant.constants)
        yield sizes["BLOCK_M"], f"{'gate, up' if sizes['ACTIVATION'] else 'down'}: {sizes['BLOCK_N']} columns", variant


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sm", type=int, help="compute capability (default: 90; with --served all)")
    parser.add_argument("--served", action="store_true", help="look at all that `make machine-code` does")
    parser.add_argument("--head-dim", type=_numbers, default=[64, 96, 128, 256, 512], help="(default: all but 32)")
    parser.add_argument(
        "--latents", type=_numbers, default=[], help="count latent attention of so many query heads instead, e.g. 16,64"
    )
    parser.add_argument(
        "--experts",
        type=_numbers,
        default=[],
        help="count a mixture's products instead: hidden size, size of an expert",
    )
    parser.add_argument("--dtype", default="bfloat16", help="of tokens (default: bfloat16)")
    add_weight_options(parser)
    parser.add_argument("--kv-dtype", default="bfloat16", help="of cached keys and values (default: bfloat16)")
    parser.add_argument("--share", type=int, default=4, help="query heads of a KV head (default: 4)")
    parser.add_argument("--block-size", type=int, default=64, help="tokens per block (default: 64)")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
