"""Fills a kernel cache on a machine without a GPU: `python -m headwise.kernels.cuda.precompile --help`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.errors import ConfigError
from headwise.kernels.cuda import block_copy, block_tables, elementwise, kv_write, logit_edits, sampling
from headwise.kernels.cuda.attention import AttentionShape, check_supported, variants_of
from headwise.kernels.cuda.cubins import CubinCache, Target
from headwise.kernels.cuda.programs import Defines, cubin_path
from headwise.kernels.gqa import gqa_layout


def precompile(shapes: Sequence[AttentionShape], targets: Sequence[Target], directory: Path) -> Iterator[Path]:
    """Compile what models of ``shapes`` need on ``targets`` into ``directory``; yields each file once it is there.

    Raises:
        ConfigError: a shape is not supported on a target, or Triton or NVRTC is not installed.
    """
    for target in targets:
        cubins = CubinCache(directory, target)
        for shape in shapes:
            check_supported(shape.head_dim, shape.q_dtype, shape.kv_dtype, target.sm, shape.block_size)
            for variant in variants_of(shape, target.sm):
                yield cubins.get(variant).path
            for source, defines in _programs(shape):
                yield cubin_path(directory, source, defines, target.sm, target.cuda)


def _programs(shape: AttentionShape) -> Iterator[tuple[str, Defines]]:
    """The CUDA C++ files that a model of ``shape`` needs, with their macros."""
    layout, dtype = gqa_layout(shape.block_size, 1, shape.head_dim, shape.kv_dtype), numpy_dtype(shape.q_dtype)
    yield kv_write.SOURCE, kv_write.variant_of(layout, dtype)
    yield elementwise.SOURCE, elementwise.variant_of(dtype)
    yield sampling.SOURCE, elementwise.variant_of(dtype)
    yield logit_edits.SOURCE, elementwise.variant_of(dtype)
    if dtype != np.float32:  # of edited logits
        yield sampling.SOURCE, elementwise.variant_of(np.dtype(np.float32))
    yield block_tables.SOURCE, {}
    yield block_copy.SOURCE, {}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = _parser().parse_args(arguments)
    shape = AttentionShape(
        share=options.q_heads // options.kv_heads,
        head_dim=options.head_dim,
        block_size=options.block_size,
        q_dtype=options.dtype,
        kv_dtype=options.kv_dtype or options.dtype,
        softcap=options.softcap,
        sink_logits=options.sink_logits,
    )
    targets = [Target(sm, cuda) for sm in options.sm for cuda in options.cuda]
    try:
        for path in precompile([shape], targets, options.directory):
            print(path, flush=True)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m headwise.kernels.cuda.precompile",
        description="Compile the kernels of one model shape, so that engines start without a compiler.",
    )
    parser.add_argument("directory", type=Path, help="the kernel cache to fill: 'kernels' under an engine's cache path")
    parser.add_argument("--sm", type=_numbers, default=[80, 90, 100], help="compute capabilities (default: 80,90,100)")
    parser.add_argument("--cuda", type=_numbers, default=[12, 13], help="CUDA versions of drivers (default: 12,13)")
    parser.add_argument("--q-heads", type=int, required=True, help="query heads of the model")
    parser.add_argument("--kv-heads", type=int, required=True, help="KV heads of the model")
    parser.add_argument("--head-dim", type=int, required=True)
    parser.add_argument("--block-size", type=int, default=64, help="tokens per block (default: 64)")
    parser.add_argument("--dtype", default="bfloat16", help="of queries (default: bfloat16)")
    parser.add_argument("--kv-dtype", default=None, help="of cached keys and values (default: that of queries)")
    parser.add_argument("--softcap", action="store_true", help="the model caps its attention scores")
    parser.add_argument("--sink-logits", action="store_true", help="the model has learned a sink for each query head")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
