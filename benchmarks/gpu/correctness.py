"""Fresh random inputs against NumPy on the host: the sections compile and correctness of `gpu_checks.py`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from gpu.attention import E4M3, QUANTISED_DTYPES
from gpu.bench import Bench
from gpu.cases import FULL_ATTENTION, Window, head_table, kernels_with, places_of
from gpu.checkpoint import MOE, random_models, write_checkpoint
from gpu.codes import KINDS, check_codes, compile_codes
from gpu.delta import check_delta, compile_delta, shape_of
from gpu.kda import check_kda, compile_kda, kda_shape
from gpu.mixtures import compile_experts, expert_shape, experts_of
from gpu.rig import Rig
from gpu.sizes import FULL, Sizes
from gpu.ssm import check_ssm, compile_ssm, ssm_shapes
from numpy.typing import NDArray

from headwise.cache_controller.block_tables import BlockTables, HostBlockTables, TableShape
from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, AttentionKernels, HeadTable
from headwise.kernels.block_copy import ReferenceBlockCopy
from headwise.kernels.cuda.attention import OLDEST_SM_E4M3, AttentionShape
from headwise.kernels.cuda.compressed_model import CompressedModel
from headwise.kernels.cuda.cubins import Target
from headwise.kernels.cuda.delta import DeltaShape
from headwise.kernels.cuda.dsa import IndexShape
from headwise.kernels.cuda.kda import KdaShape
from headwise.kernels.cuda.kv_write import CudaKvWrite
from headwise.kernels.cuda.mla import LatentShape
from headwise.kernels.cuda.precompile import LatentModel, precompile
from headwise.kernels.dsa import index_dtype
from headwise.kernels.gqa import gqa_layout
from headwise.kernels.nibbles import INT4
from headwise.kernels.reference import ReferenceKernels
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.ops.base import TensorOps
from headwise.runtime.ops.numpy_ops import NumpyOps
from headwise.runtime.protocol.request import SamplingParams
from headwise.runtime.worker.device import Device
from headwise.runtime.worker.last_sampled import only_usable
from headwise.runtime.worker.sampler import Draws, sample

TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}
"""Relative distance from float64 of results in each dtype."""

OF_STEPS = 1e-2
"""The same of four bits in float16, see `headwise.kernels.cuda.nibbles_jit`; float32 is exact."""

ROUNDED_DRAWS = 0.05
"""Share of draws that rounding may decide."""


RANKS = ((2, "bfloat16"), (4, "bfloat16"), (2, "int8"))
"""So many ranks that keep latents together, and their cache's dtype, which the section latent_ranks checks."""

MOST_RANKS = 8
"""That one is timed of."""


def _latent_models(sm: int) -> list[LatentModel]:
    """What the sections latents and latent_ranks need: with an indexer, whose model has all that one without it has, by
    cache; and of ranks."""
    sizes, block_size, dtype = FULL.latents, FULL.block_size, "bfloat16"
    kept = [each for each in (dtype, *QUANTISED_DTYPES) if each != E4M3 or sm >= OLDEST_SM_E4M3]
    together = [
        LatentModel(
            LatentShape(sizes.heads, sizes.rank, sizes.rotated, block_size // parts, dtype, kv_dtype),
            sizes.plain,
            sizes.value_dim,
            parts=parts,
        )
        for parts, kv_dtype in (*RANKS, (MOST_RANKS, dtype))
    ]
    return together + [
        LatentModel(
            LatentShape(sizes.heads, sizes.rank, sizes.rotated, block_size, dtype, kv_dtype),
            sizes.plain,
            sizes.value_dim,
            IndexShape(sizes.index_heads, sizes.index_dim, block_size, dtype, index_dtype(kv_dtype)),
        )
        for kv_dtype in kept
    ]


def _compressed_models(sm: int) -> list[CompressedModel]:
    """What the section entries needs."""
    sizes = FULL.entries
    indexer = sizes.indexed, sizes.index_heads, sizes.index_dim
    kept = ["bfloat16", "int8", *(["float8_e4m3fn"] if sm >= OLDEST_SM_E4M3 else [])]
    every = sizes.heads, sizes.size, FULL.block_size, "bfloat16"
    return [CompressedModel(*every, kv_dtype, sizes.turning, sizes.rates, *indexer) for kv_dtype in kept]


# ---- compiling ----


def compile_kernels(bench: Bench) -> None:
    """All attention kernels that the other sections need, in parallel processes, so that none of them waits.

    Beside them, the random checkpoints are written.
    """
    sizes, target, work = bench.sizes, bench.rig.target, bench.rig.work
    shapes = _shapes(sizes, target.sm, bench.options.layers)[: None if sizes.compiled is None else 1]
    began, files = time.perf_counter(), 0
    processes = min(os.cpu_count() or 1, len(shapes) + 2) if sizes.compiled is None else 1  # each imports for a second
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        models = random_models(sizes, bench.options.layers)
        written = [pool.submit(write_checkpoint, work / name, config) for name, config in models.items()]
        made: dict[Any, Future[int]] = {}
        made |= {shape: pool.submit(_compile, shape, target, work / "kernels", sizes.compiled) for shape in shapes}
        if sizes.compiled is None:
            mixture = expert_shape(models[MOE])
            made[mixture] = pool.submit(compile_experts, mixture, target, work / "kernels")
            for net in _delta_shapes(sizes):
                made[net] = pool.submit(compile_delta, net, target, work / "kernels")
            for each_kda in _kda_shapes(sizes):
                made[each_kda] = pool.submit(compile_kda, each_kda, target, work / "kernels")
            for _, each_ssm in ssm_shapes(sizes, list(TOLERANCE)):
                made[each_ssm] = pool.submit(compile_ssm, each_ssm, target, work / "kernels")
            for model in _latent_models(target.sm):
                made[model] = pool.submit(_compile_latents, model, target, work / "kernels")
            for of_entries in _compressed_models(target.sm):
                made[of_entries] = pool.submit(_compile_entries, of_entries, target, work / "kernels")
            made |= {kind: pool.submit(compile_codes, kind, target, work / "kernels") for kind in KINDS}
        for shape, each in made.items():
            with bench.rows.case(f"{shape}") as begin:
                begin()
                files += each.result()
        bench.rows.add("kernels", time.perf_counter() - began, "s", note=f"{files} kernels for sm_{target.sm}")
        for one in written:
            one.result()
    bench.rows.add("checkpoints", time.perf_counter() - began, "s", note="random weights, written meanwhile")


def _compile(shape: AttentionShape, target: Target, directory: Path, most: int | None = None) -> int:
    """Prompts in both ways, where there are two. ``most``: no more kernels than these."""
    every = (path for tma in (False, True) for path in precompile([shape], [target], directory, tma=tma))
    return len({*islice(every, most)})


def _compile_latents(model: LatentModel, target: Target, directory: Path) -> int:
    return len(list(precompile([], [target], directory, latent_models=[model])))


def _compile_entries(model: CompressedModel, target: Target, directory: Path) -> int:
    return len(list(precompile([], [target], directory, compressed=[model])))


def precompile_all(target: tuple[int, int], directory: Path, layers: int | None) -> int:
    """Compile what all sections need on a card of some (compute capability, CUDA version); the number of kernels."""
    where = Target(*target)
    files = sum(_compile(shape, where, directory) for shape in _shapes(FULL, where.sm, layers))
    files += sum(compile_delta(shape, where, directory) for shape in _delta_shapes(FULL))
    files += sum(compile_kda(shape, where, directory) for shape in _kda_shapes(FULL))
    files += sum(compile_ssm(shape, where, directory) for _, shape in ssm_shapes(FULL, list(TOLERANCE)))
    files += sum(_compile_latents(model, where, directory) for model in _latent_models(where.sm))
    files += sum(_compile_entries(model, where, directory) for model in _compressed_models(where.sm))
    files += sum(compile_codes(kind, where, directory) for kind in KINDS)
    return files + compile_experts(expert_shape(FULL.moe), where, directory)


def _delta_shapes(sizes: Sizes) -> list[DeltaShape]:
    return [shape_of(sizes.delta, sizes.block_size, dtype) for dtype in TOLERANCE]


def _kda_shapes(sizes: Sizes) -> list[KdaShape]:
    return [kda_shape(sizes.kda, sizes.block_size, dtype) for dtype in TOLERANCE]


def _shapes(sizes: Sizes, sm: int, layers: int | None) -> list[AttentionShape]:
    return list(dict.fromkeys([*_model_shapes(sizes, sm, layers), *(case.shape for case in cases(sizes.long, sm))]))


def _model_shapes(sizes: Sizes, sm: int, layers: int | None) -> Iterator[AttentionShape]:
    """Of the timed sections, and of SmolLM2."""
    heads, block_size = sizes.attention, sizes.block_size
    for kv_dtype in (heads.dtype, *QUANTISED_DTYPES):
        if kv_dtype != E4M3 or sm >= OLDEST_SM_E4M3:
            yield AttentionShape(heads.q_heads // heads.kv_heads, heads.head_dim, block_size, heads.dtype, kv_dtype)
    for head_dim in sizes.head_dims[1]:
        yield AttentionShape(heads.q_heads // heads.kv_heads, head_dim, block_size, heads.dtype, heads.dtype)
    for config in random_models(sizes, layers).values():
        share = config["num_attention_heads"] // config["num_key_value_heads"]
        for size in {block_size, sizes.load.block_size}:
            yield AttentionShape(share, config["head_dim"], size, "bfloat16", "bfloat16")
    for dtype in ("bfloat16", "float32"):
        yield AttentionShape(3, 64, block_size, dtype, dtype)


# ---- attention and KV write ----


@dataclass(frozen=True)
class Case:
    """One step: ``sequences`` are (queries, context); ``windows`` one per KV head. tma: see `kernels_with`"""

    name: str
    share: int
    head_dim: int
    dtype: str
    kv_dtype: str
    block_size: int
    sequences: tuple[tuple[int, int], ...]
    windows: tuple[Window, ...]
    softcap: float = 0.0
    chunked: bool = False
    tma: bool = False

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(
            self.share,
            self.head_dim,
            self.block_size,
            self.dtype,
            self.kv_dtype,
            self.softcap > 0,
            chunked=self.chunked,
        )


def cases(long: bool, sm: int) -> list[Case]:
    """Every dtype; decode, parts of prompts and both at once; windows, sinks, chunks; blocks smaller than a tile.

    ``long``: sequences of hundreds of tokens; else fewer of them, of dozens, and small heads.
    """
    lengths, window, sink = ((1500, 700, 640, 70), 256, 64) if long else ((40, 21, 33, 9), 12, 4)
    every = ((1, lengths[0]), (lengths[1] // 2, lengths[1]), (1, 1), (lengths[3], lengths[3]), (1, lengths[2]))
    mixed = every if long else every[:3]
    heads = (FULL_ATTENTION, (window, sink), (window // 2 + 1, 0), FULL_ATTENTION)
    decodes = tuple((1, length) for length in (lengths[0], 1, *lengths[1:]))
    main = Case("bf16", 4, 128, "bfloat16", "bfloat16", 64, mixed, heads)
    more = [
        main,
        replace(main, name="bf16_decode", sequences=decodes[: len(mixed)]),
        Case("fp16", 4, 64, "float16", "float16", 16, mixed, heads),
        Case("fp32", 3, 64, "float32", "float32", 64, mixed, heads[:3]),
        replace(main, name="int8", kv_dtype="int8"),
        replace(main, name="e4m3", kv_dtype="float8_e4m3fn"),
        replace(main, name="int4", kv_dtype=INT4),
        Case("bf16_256_softcap", 4, 256, "bfloat16", "bfloat16", 16, mixed, heads[1:2], softcap=30.0),
        Case("bf16_512", 8, 512, "bfloat16", "bfloat16", 64, mixed, heads[:2]),
        replace(main, name="bf16_chunks", chunked=True),
        *([replace(main, name="bf16_tma", tma=True)] if sm >= 90 else []),
        Case("fp16_mha_int8", 1, 64, "float16", "int8", 64, mixed, heads * 2 if long else heads),
    ]
    if long:
        more += [Case("fp16_256_int4", 2, 256, "float16", INT4, 16, mixed, heads[1:3])]
    served = [case for case in more if sm >= OLDEST_SM_E4M3 or case.kv_dtype != "float8_e4m3fn"]
    return served if long else [replace(case, head_dim=32 if case.head_dim > 256 else 64) for case in served]


@dataclass
class Inputs:
    """A step in host memory: ``arena`` holds what came before it, ``written`` that and the step's own tokens."""

    query: NDArray[Any]
    key: NDArray[Any]
    value: NDArray[Any]
    arena: NDArray[np.uint8]
    written: NDArray[np.uint8]
    layout: BlockLayout
    batch: AttentionBatch
    heads: HeadTable


def make_inputs(case: Case, rng: np.random.Generator) -> Inputs:
    """Random; whatever nobody may read is NaN, and blocks that nobody sees are not there."""
    groups = list(dict.fromkeys(case.windows))
    layout = gqa_layout(case.block_size, max(map(case.windows.count, groups)), case.head_dim, case.kv_dtype)
    tables = _random_tables(case, groups, rng)
    arena = np.full((int(tables.max()) + 3) * layout.block_bytes, 0xFF, np.uint8)
    queries, contexts = np.array(case.sequences, np.int32).T
    heads = replace(head_table(np.asarray, case.windows, places_of(case.windows)), chunked=case.chunked)

    def batch_of(counts: NDArray[np.int32], lengths: NDArray[np.int32]) -> AttentionBatch:
        cu_seqlens = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return AttentionBatch(cu_seqlens, lengths, tables, len(groups), max_query_len=int(counts.max()))

    def rows(count: int, heads: int) -> NDArray[Any]:
        drawn = rng.standard_normal((count, heads, case.head_dim), dtype=np.float32)
        return drawn.astype(numpy_dtype(case.dtype))

    past = contexts - queries
    kv_heads, before = len(case.windows), int(past.sum())
    if before:
        keys, values = rows(before, kv_heads), rows(before, kv_heads)
        ReferenceKernels().write_kv(keys, values, arena, layout, batch_of(past, past), heads)
    tokens, batch = int(queries.sum()), batch_of(queries, contexts)
    query = rows(tokens, kv_heads * case.share)
    key, value, written = rows(tokens, kv_heads), rows(tokens, kv_heads), arena.copy()
    ReferenceKernels().write_kv(key, value, written, layout, batch, heads)
    return Inputs(query, key, value, arena, written, layout, batch, heads)


def _random_tables(case: Case, groups: Sequence[Window], rng: np.random.Generator) -> NDArray[np.int32]:
    columns = -(-max(context for _, context in case.sequences) // case.block_size)
    tables = np.full((len(case.sequences), len(groups), columns), -1, np.int32)
    ends = (np.arange(columns) + 1) * case.block_size
    for index, (queries, context) in enumerate(case.sequences):
        for at, (window, sink) in enumerate(groups):
            seen = ends - case.block_size < context
            if window:
                seen &= (ends > context - queries - window + 1) | (ends - case.block_size < sink)
            tables[index, at, seen] = 1
    held = tables > 0
    tables[held] = rng.permutation(int(held.sum()))
    return tables.reshape(-1, columns)


def check_case(bench: Bench, case: Case, rng: np.random.Generator) -> None:
    """Write a step's keys and values, byte for byte as the reference, then attend, as near to it as the dtype goes."""
    rig, rows, inputs = bench.rig, bench.rows, make_inputs(case, rng)
    device = to_device(rig, inputs)
    rig.kernels.write_kv(device.key, device.value, device.arena, device.layout, device.batch, device.heads)
    different = int(np.count_nonzero(rig.download(device.arena) != inputs.written))
    rows.check(f"write_{case.name}", different == 0, f"{different} of {inputs.written.size} bytes differ")

    attended = rig.upload(inputs.written)
    out = rig.upload(np.full(inputs.query.shape, np.nan, np.float32).astype(inputs.query.dtype))
    scale = case.head_dim**-0.5
    kernels_of(rig, case).attend(
        device.query, attended, inputs.layout, device.batch, device.heads, scale=scale, softcap=case.softcap, out=out
    )
    expected = np.empty(inputs.query.shape)
    ReferenceKernels().attend(
        inputs.query, inputs.written, inputs.layout, inputs.batch, inputs.heads, scale=scale, softcap=case.softcap,
        out=expected,
    )  # fmt: skip
    rows.check_error(
        f"attend_{case.name}",
        distance(rig.download(out), expected),
        max(TOLERANCE[case.dtype], OF_STEPS if case.kv_dtype == INT4 else 0),
    )


def kernels_of(rig: Rig, case: Case) -> AttentionKernels:
    """What attends."""
    return kernels_with(rig, case.tma)


def to_device(rig: Rig, inputs: Inputs) -> Inputs:
    batch = inputs.batch
    there = {name: rig.upload(getattr(inputs, name)) for name in ("query", "key", "value", "arena", "written")}
    tables = {name: rig.upload(getattr(batch, name)) for name in ("cu_seqlens_q", "seq_lens", "block_tables")}
    columns = {name: rig.upload(getattr(inputs.heads, name)) for name in ("group", "slot", "window", "sink")}
    heads = replace(inputs.heads, **columns)
    return replace(inputs, **there, batch=replace(batch, **tables), heads=heads)


def distance(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Relative distance; NaN if anything is NaN."""
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def check_rope(bench: Bench, case: Case, rng: np.random.Generator) -> None:
    """The write that adds biases, and turns queries and keys, on their way."""
    rig, inputs = bench.rig, make_inputs(case, rng)
    heads = [rows.shape[1] for rows in (inputs.query, inputs.key, inputs.value)]
    bias = rng.standard_normal((sum(heads), case.head_dim)).astype(inputs.key.dtype)
    biases = np.split(bias, np.cumsum(heads)[:-1])
    device = to_device(rig, inputs)
    angles = rng.uniform(0, 2 * np.pi, (len(inputs.key), case.head_dim // 2)).astype(np.float32)
    cosines, sines = np.cos(angles), np.sin(angles)
    CudaKvWrite(rig.programs).write_kv_rope(
        device.query, device.key, device.value, rig.upload(cosines), rig.upload(sines), device.arena, device.layout,
        device.batch, device.heads, rig.upload(bias.reshape(-1)),
    )  # fmt: skip
    query, key, value = (
        _narrow_sum(rows, more) for rows, more in zip((inputs.query, inputs.key, inputs.value), biases, strict=True)
    )
    query, key = (rotated(rows, cosines, sines) for rows in (query, key))
    expected = inputs.arena.copy()
    ReferenceKernels().write_kv(key, value, expected, inputs.layout, inputs.batch, inputs.heads)
    different = int(np.count_nonzero(rig.download(device.arena) != expected))
    different += int(np.count_nonzero(_bytes(rig.download(device.query)) != _bytes(query)))
    bench.rows.check(f"write_rope_{case.name}", different == 0, f"{different} bytes differ")


def _narrow_sum(rows: NDArray[Any], bias: NDArray[Any]) -> NDArray[Any]:
    """In float32, rounded to the rows' dtype."""
    return (rows.astype(np.float32) + bias.astype(np.float32)).astype(rows.dtype)


def rotated(rows: NDArray[Any], cosines: NDArray[Any], sines: NDArray[Any]) -> NDArray[Any]:
    """In float32, each product rounded, the result in the rows' dtype."""
    first, second = np.split(rows.astype(np.float32), 2, axis=-1)
    cosines, sines = cosines[:, None], sines[:, None]
    turned = np.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
    return turned.astype(rows.dtype)


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8)


# ---- copies and tensor operations ----


def check_copies(bench: Bench, rng: np.random.Generator) -> None:
    """Small pieces, large ones, runs and few, to the device and back, from pinned memory."""
    rig, real = bench.rig, bench.sizes.long
    copy, reference = rig.block_copy(), ReferenceBlockCopy()
    for name, block_bytes, piece, count in (
        ("small", 24576, 2048, 300 if real else 12),
        ("large", 131072, 98304, 100 if real else 8),
        ("runs", 8192, 8192, 500 if real else 20),
        ("few", 4096, 4096, 2),
        ("odd", 3 * 1024 + 5, 1001, 50 if real else 9),
    ):
        blocks = 2 * count
        host = rig.host_arena(blocks * block_bytes)
        host.wait_ready()
        host.array[:] = rng.integers(0, 256, host.array.size, dtype=np.uint8)
        start = rng.integers(0, 256, host.array.size, dtype=np.uint8)
        device, expected = rig.upload(start), start.copy()
        first = min(block_bytes - piece, 16) if name != "odd" else 3
        ranges = np.array([[first, first + piece], [0, 0]], np.int64)
        pairs = np.zeros((count, 3), np.int32)
        order = np.sort(rng.permutation(blocks)[:count]) if name == "runs" else rng.permutation(blocks)[:count]
        pairs[:, 1:] = order[:, None]
        if name != "runs":
            pairs[:, 2] = rng.permutation(blocks)[:count]
        with bench.rows.case(f"copy_{name}") as begin:
            begin()
            copy(host.array, device, pairs, ranges, block_bytes)
            reference(host.array, expected, pairs, ranges, block_bytes)
            rig.synchronize()
            there = np.array_equal(rig.download(device), expected)
            back, returned = np.zeros_like(pairs), host.array.copy()
            back[:, 1], back[:, 2] = pairs[:, 2], pairs[::-1, 1]
            copy(device, host.array, back, ranges, block_bytes)
            reference(expected, returned, back, ranges, block_bytes)
            rig.synchronize()
            right = there and np.array_equal(host.array, returned)
            bench.rows.check(f"copy_{name}", right, f"{count} pieces of {piece} bytes, there and back")
        host.close()


OWN_OPS = (
    "embedding", "rms_norm", "rms_norm_heads", "add_rms_norm", "add_rms_norm_bias", "silu_mul", "gelu_tanh_mul",
    "squared_relu", "mix_experts", "mix_experts_without_gates", "greedy",
)  # fmt: skip
"""Operations whose kernels are not CuPy's, or some library's."""


def check_ops(
    bench: Bench, ops: TensorOps, dtype: str, rng: np.random.Generator, only: Sequence[str] | None = None
) -> None:
    """Each tensor operation in ``dtype`` against the same in float32 NumPy, on numbers that ``dtype`` has."""
    wanted = dict(_operations(NumpyOps(), dtype, rng_seed := int(rng.integers(1 << 30))))
    with bench.rig.current():
        for name, compute in _operations(ops, dtype, rng_seed):
            if only is not None and name not in only:
                continue
            with bench.rows.case(f"ops_{name}_{dtype}") as begin:
                begin()
                error = distance(np.asarray(compute()), np.asarray(wanted[name]()))
                bench.rows.check_error(f"ops_{name}_{dtype}", error, TOLERANCE[dtype])


def _operations(ops: TensorOps, dtype: str, seed: int) -> Iterator[tuple[str, Any]]:
    """(name, what computes it and returns host memory)."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(dtype)).astype(np.float32)

    rows, wide, weight, heads = draw(37, 128), draw(37, 192), draw(96, 128), draw(37, 5, 64)
    norm, table, positions = draw(128), draw(50, 128), np.arange(37, dtype=np.int32) * 17
    ids = rng.integers(0, 50, 37).astype(np.int32)
    places, factors = rng.permutation(37)[:9], rng.random(9, dtype=np.float32)
    inverse = (1 / 10000 ** (np.arange(32) / 32)).astype(np.float32)
    x = ops.tensor(rows)

    def scattered() -> Any:
        target = x + x
        ops.scatter_add_rows(target, places, ops.take_rows(x, places), factors)
        return ops.numpy(target)

    def summed(bias: Any) -> Any:
        both = ops.add_rms_norm(x, x[::-1] + x, ops.norm_weight(norm), 1e-5, bias)
        return np.stack([ops.numpy(each) for each in both])

    yield "linear", lambda: ops.numpy(ops.linear(x, ops.linear_weight(weight), ops.tensor(weight[:, 0].copy())))
    yield "embedding", lambda: ops.numpy(ops.embedding(ops.tensor(table), ops.upload(ids)))
    yield "rms_norm", lambda: ops.numpy(ops.rms_norm(x, ops.norm_weight(norm), 1e-5))
    own = ops.norm_weight(norm.reshape(2, 64))
    yield "rms_norm_heads", lambda: ops.numpy(ops.rms_norm(x.reshape(-1, 2, 64), own, 1e-5))
    yield "add_rms_norm", lambda: summed(None)
    yield "add_rms_norm_bias", lambda: summed(ops.tensor(norm[::-1].copy()))
    yield (
        "rope",
        lambda: ops.numpy(ops.rope(ops.tensor(heads), *ops.rotation(ops.upload(positions), ops.upload(inverse)))),
    )
    yield "silu_mul", lambda: ops.numpy(ops.silu_mul(ops.tensor(wide)))
    yield "gelu_tanh_mul", lambda: ops.numpy(ops.gelu_tanh_mul(ops.tensor(wide)))
    yield "squared_relu", lambda: ops.numpy(ops.squared_relu(ops.tensor(wide)))
    yield "scatter_add_rows", scattered
    up, down, logits = 0.1 * draw(7, 64, 128), 0.1 * draw(7, 128, 32), draw(37, 6)

    def mixed(*of: Any) -> Any:
        return ops.numpy(ops.mix_experts(x, ops.tensor(logits), experts_of(ops, *of)))

    yield "mix_experts", lambda: mixed([*up], [*down])
    yield "mix_experts_without_gates", lambda: mixed([*up[:, :32]], [*down], "relu2")
    yield "greedy", lambda: np.stack([ops.host(part).astype(np.float32) for part in ops.greedy(x)])


def check_sampling(bench: Bench, device: Device, dtype: str, rng: np.random.Generator) -> None:
    """Tokens drawn where the scores are, against those that the host draws."""
    if device.sampler is None:
        return
    rows, vocab = (64, 50_000) if bench.sizes.long else (4, 300)
    scores = (4 * rng.standard_normal((rows, vocab), dtype=np.float32)).astype(numpy_dtype(dtype)).astype(np.float32)
    kinds: tuple[dict[str, Any], ...] = ({}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05, "temperature": 1.5})
    params = [SamplingParams(**{"temperature": 0.8, **kinds[row % len(kinds)]}) for row in range(rows)]
    draws = Draws(params, rng.integers(1 << 62, size=rows).astype(np.uint64), np.arange(rows))
    drawn = device.sampler.draw(device.ops.tensor(scores), 0.0, draws)
    found = None if drawn is None else only_usable(*map(device.ops.host, drawn))
    other = rows if found is None else int(np.count_nonzero(found != sample(scores, draws)))
    bench.rows.check_error(f"sampling_{dtype}", other / rows, ROUNDED_DRAWS, f"of {rows} draws are others")


def check_block_tables(bench: Bench, device: Device, rng: np.random.Generator) -> None:
    """Tables after rows were opened and cells changed, some of them more than once, against those of a host."""
    rows, blocks, updates = (64, 16_384, 100_000) if bench.sizes.long else (4, 300, 500)
    shape = TableShape(max_rows=rows, groups=4, max_blocks=blocks, block_size=64)
    every: tuple[BlockTables, BlockTables] = device.block_tables(shape), HostBlockTables(shape)
    order = rng.permutation(rows).astype(np.int32)
    seq_lens = rng.integers(0, blocks * shape.block_size + 1, rows).astype(np.int32)
    for _ in range(3):
        opened = rng.integers(0, rows, 2).tolist()
        changes = np.concatenate(
            [rng.integers(0, shape.cells, (updates, 3)), rng.integers(0, 1 << 20, (updates, 1))], 1
        )
        changes[updates // 2 :, :3] = changes[: updates - updates // 2, :3]
        for tables in every:
            tables.open_rows(opened)
            tables.apply(changes.astype(np.int32))
    lengths = device.ops.upload(seq_lens)
    found = device.ops.host(every[0].gather(device.ops.upload(order), lengths, blocks))
    reached = np.arange(blocks) * shape.block_size < np.repeat(seq_lens, shape.groups)[:, None]
    wrong = int(np.count_nonzero((found != every[1].gather(order, seq_lens, blocks)) & reached))
    bench.rows.check("block_tables", wrong == 0, f"{wrong} of {np.count_nonzero(reached)} blocks are others")


def correctness(bench: Bench) -> None:
    """Everything, on inputs that no other run had."""
    rng = np.random.default_rng(bench.rig.seed)
    every = cases(bench.sizes.long, bench.rig.target.sm)
    for case in every:
        with bench.rows.case(case.name) as begin:
            begin()
            check_case(bench, case, rng)
    for case in every[:5:4]:
        with bench.rows.case(f"write_rope_{case.name}") as begin:
            begin()
            check_rope(bench, case, rng)
    check_delta(bench, TOLERANCE)
    check_kda(bench, TOLERANCE)
    check_ssm(bench, TOLERANCE)
    check_copies(bench, rng)
    for dtype in ("float32", "float16", "bfloat16"):
        with bench.rows.case(f"ops_{dtype}") as begin:
            begin()
            config = EngineConfig(device="cuda", dtype=dtype, cache_dir=str(bench.rig.work))
            device = bench.rig.device(config)
            with device.current():
                check_ops(bench, device.ops, dtype, rng)
                check_sampling(bench, device, dtype, rng)
    check_codes(bench, rng)
    with bench.rows.case("block_tables") as begin:
        begin()
        device = bench.rig.device(EngineConfig(device="cuda", cache_dir=str(bench.rig.work)))
        with device.current():
            check_block_tables(bench, device, rng)
