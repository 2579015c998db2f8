"""README's table of what `gpu_checks.sh` measured on a GPU, by `results/gpu-h200.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Figures = Mapping[str, Any]

ROWS = (
    ("Decode attention, 64 sequences of 8k, bfloat16: of a copy's bandwidth", "decode", "b64_c8192_of_bandwidth", 2),
    ("The same: speed over torch's FlashAttention, over cuDNN's", "decode",
     ("b64_c8192_over_torch", "b64_c8192_over_cudnn"), 2),
    ("The same, over int8, e4m3, int4 caches: speed over bfloat16's", "decode",
     ("int8_over_own", "float8_e4m3fn_over_own", "int4_over_own"), 2),
    ("One sequence of 128k among 255 of 1k: of a copy's bandwidth", "decode", "skewed_of_bandwidth", 2),
    ("One sequence of 8k, of 32k: speed over torch's FlashAttention", "decode",
     ("b1_c8192_over_torch", "b1_c32768_over_torch"), 2),
    ("Half of the heads with a window of 1k, decode at 32k: time over none", "heads", "decode_over_uniform", 2),
    ("Prompt of 16k tokens, heads of 128: TFLOP/s", "prefill", "t16384", 0),
    ("The same: speed over torch's FlashAttention, over cuDNN's", "prefill",
     ("t16384_over_torch", "t16384_over_cudnn"), 2),
    ("Llama-3.2-1B, random weights, decode of 1, 8, 64 at 1k: of a copy's bandwidth", "model",
     ("graphs_b1_of_bandwidth", "graphs_b8_of_bandwidth", "graphs_b64_of_bandwidth"), 2),
    ("Its first token of 128, 1,024 tokens: ms", "model", ("graphs_prefill_128", "graphs_prefill_1024"), 1),
    ("A weight of 14,336 x 4,096 in int8, int4 with minima, FP8, times one row: speed over bfloat16's", "products",
     ("int8_1_over_floats", "int4_1_over_floats", "fp8_1_over_floats"), 2),
    ("The same, times 64 rows", "products",
     ("int8_64_over_floats", "int4_64_over_floats", "fp8_64_over_floats"), 2),
    ("A token of Llama-3.2-1B chosen by top-k and top-p, 64 rows: us", "model", "draw_top_k_top_p", 0),
    ("ERNIE-4.5's attention, half of the heads with a window, 16k: time to first token, between tokens, over none",
     "published", ("ttft_over_uniform", "tbt_over_uniform"), 2),
    ("Throughput in the same memory with recycling, over that without", "recycling", "throughput_ratio", 2),
    ("Load of 64-token blocks from the host: of a plain copy's speed, hidden behind a prompt", "copies",
     ("block64_h2d", "block64_hidden"), 2),
    ("Of 16-token blocks", "copies", ("block16_h2d", "block16_hidden"), 2),
    ("SmolLM2-135M in float32: greedy tokens that are the CPU's, of 128", "smollm2", "tokens_float32", 0),
)  # fmt: skip
"""(what, section, its number or numbers, digits)."""


def gpu_table(results: Figures) -> str:
    """Lines of Markdown; raises LookupError where ``results`` lack what they show."""
    card, found = results["card"].partition(",")[0], results["results"]
    lines = [
        f"### On one GPU: {card}",
        "",
        f"`benchmarks/gpu_checks.sh`, {results['date'].split()[0]}, CUDA {results['driver_cuda']}, kernels by Triton "
        "3.9; [all rows](benchmarks/results/gpu-h200.md), and [what they mean](docs/gpu.md#what-is-measured-on-one). "
        "torch's FlashAttention is its version 2; cuDNN has kernels made for this card.",
        "",
        "| | |",
        "| --- | ---: |",
    ]
    for what, section, names, digits in ROWS:
        each = (names,) if isinstance(names, str) else names
        lines.append(f"| {what} | {', '.join(f'{found[section][name]:,.{digits}f}' for name in each)} |")
    return "\n".join(lines)
