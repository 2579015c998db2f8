"""README's tables and picture of what `peers.py` measured: headwise beside vLLM and llama.cpp on the same CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from runtimes import random_drafting, random_hybrid, random_mixture, random_state_space

Figures = Mapping[str, Any]

SCENARIOS = {
    "decode1": "Decode of one request",
    "prefill": "Prefill of 1,800 tokens",
    "batch16": "16 requests, 256 tokens in, 64 out",
    "long_decode": "Decode of 8 requests at 1,500 tokens",
}
LONG = {"prefill": "Prefill of 12,000 tokens", "decode": "Decode after them"}
OURS = {"headwise": "headwise, bfloat16", "headwise_gguf": "headwise, GGUF"}
DRAFTS = {
    "decode1": "one request",
    "decode4": "4 requests at 256 tokens",
    "decode16": "16 requests at 256 tokens",
}
LONG_OURS = {"headwise": "headwise, all heads full", "headwise_half": "headwise, half of the heads with a window"}
WIDEST = ("AVX512_BF16", "AVX512", "AVX2", "NEON")
"""llama.cpp's names of instructions, the widest first."""

PICTURE = "docs/peers.svg"
COLOURS = {
    "headwise": "#1f6feb",
    "vllm_bf16": "#8b949e",
    "vllm_fp32": "#c9d1d9",
    "headwise_gguf": "#bc4c00",
    "llamacpp": "#d8b08c",
}
"""By runtime, in the order of columns and bars; a peer is a paler one than what of ours it is compared with."""
WIDTH, LABELS, BAR, GAP, TOP = 900, 260, 13, 14, 52
"""Pixels: of the picture, left of the bars, of a bar, between groups of bars, above a model's first group."""


# ---- tables ----


def peers_tables(f: Figures) -> list[str]:
    """The lines of Markdown of all tables; raises LookupError where ``f`` lacks what they show."""
    lines = [
        f"![Tokens a second of headwise, vLLM and llama.cpp]({PICTURE})",
        "",
        "Tokens a second on the same CPU, with the same weights and token ids. In brackets: how many times as fast "
        "headwise is, in bfloat16 as vLLM, and from the blocks of the same GGUF file (`weights_dtype: gguf`) as "
        f"llama.cpp in the build of its package. Medians of {f['rounds']} rounds; `benchmarks/peers.py`.",
    ]
    return [*lines, *_model_tables(f), *_long_table(f)]


def mixture_tables(f: Figures) -> list[str]:
    """The same of a mixture of experts."""
    sizes = random_mixture.FULL
    what = (
        f"{sizes.layers} layers with {sizes.experts} experts each, of which a token goes to {sizes.per_token}: random "
        "weights in Qwen 3's architecture"
    )
    return _tables_of(what, "peers_mixture", f)


def hybrid_tables(f: Figures) -> list[str]:
    """The same of a model with gated delta-nets."""
    sizes, interval = random_hybrid.FULL, random_hybrid.INTERVAL
    what = (
        f"{sizes.layers} layers with a hidden size of {sizes.hidden:,}, of which {sizes.layers // interval} have "
        f"attention and the others delta-nets of {sizes.key_heads} heads of {sizes.key_dim}: random weights in Qwen "
        "3.5's architecture"
    )
    return _tables_of(what, "peers_hybrid", f)


def drafts_tables(f: Figures) -> list[str]:
    """Of a model that drafts for itself."""
    sizes, has_vllm = random_drafting.FULL, "vllm" in f["about"]
    lines = [
        f"A model of {sizes.layers} layers with a hidden size of {sizes.hidden:,} and a layer that drafts (multi-token "
        f"prediction), random weights in MiMo's architecture, bfloat16: tokens a second of decodes with up to "
        f"{f['drafts']} drafts of a sequence in a step, and in brackets over those without, by how many drafts are "
        f"right. Medians of {f['rounds']} rounds; `benchmarks/peers_drafts.py`.",
        "",
        f"| Right drafts | Decode of | headwise |{' vLLM |' if has_vllm else ''}",
        f"| ---: | --- | ---: |{' ---: |' if has_vllm else ''}",
    ]
    for case in f["cases"]:
        names = ["headwise", *(["vllm"] if has_vllm else [])]
        cells = (f"{case['rates'][f'{name}_mtp']:,.0f} ({case['over_plain'][name]:.2f})" for name in names)
        lines.append(f"| {case['right']:.0%} | {DRAFTS[case['scenario']]} | {' | '.join(cells)} |".replace("%", " %"))
    return lines


def state_space_tables(f: Figures) -> list[str]:
    """The same of a model with state space models."""
    sizes = random_state_space.FULL
    what = (
        f"{sizes.layers} layers with a hidden size of {sizes.hidden:,}, of which "
        f"{sum(map(sizes.has_attention, range(sizes.layers)))} have attention and the others state space models "
        f"(Mamba-2) of {sizes.state_heads} heads of {sizes.state_head_dim}, with states of {sizes.state}: random "
        "weights in Granite 4's architecture"
    )
    return _tables_of(what, "peers_state_space", f)


def _tables_of(what: str, script: str, f: Figures) -> list[str]:
    told = f"{what}. Otherwise as above. Medians of {f['rounds']} rounds; `benchmarks/{script}.py`."
    return [told, *_model_tables(f)]


def _model_tables(f: Figures) -> list[str]:
    lines = list[str]()
    for name, model in f["models"].items():
        names = {runtime: word for runtime, word in _names(f).items() if runtime in model["rates"]}
        rows = {
            word: [
                _cell(model["rates"][runtime][key], None if runtime in OURS else model[runtime][key])
                for runtime in names
            ]
            for key, word in SCENARIOS.items()
        }
        lines += ["", *_table(name, list(names.values()), rows)]
    return lines


def _long_table(f: Figures) -> list[str]:
    long = f.get("long_context")
    if long is None:  # as when nothing but the script itself is tried
        return []
    peers = {runtime: word for runtime, word in _names(f).items() if runtime in long["rates"] and runtime not in OURS}
    rates, over = long["rates"], long["half_over"]
    rows = {
        word: [
            *(_cell(rates[runtime][key]) for runtime in LONG_OURS),
            *(_cell(rates[runtime][key], over[runtime][key]) for runtime in peers),
        ]
        for key, word in LONG.items()
    }
    rounds = long.get("rounds", min(f["rounds"], 2))  # figures that do not say it had two at most
    return [
        "",
        f"One request of 12,000 tokens, medians of {rounds} rounds. In brackets: how many times as fast headwise is "
        "with windows for heads, which no peer has.",
        "",
        *_table("smollm2-135m", [*LONG_OURS.values(), *peers.values()], rows),
    ]


def _names(f: Figures) -> dict[str, str]:
    """What each runtime is called, in the order of the columns."""
    isa = f["about"].get("llamacpp", {}).get("isa", "").split()
    widest = next((name for name in WIDEST if name in isa), "SSE")
    names = {
        **OURS,
        "vllm_bf16": "vLLM, bfloat16",
        "vllm_fp32": "vLLM, float32",
        "llamacpp": f"llama.cpp ({widest}), GGUF",
    }
    return {runtime: names[runtime] for runtime in COLOURS}


def _cell(rate: float, ratio: float | None = None) -> str:
    """A rate, and of a peer how many times as fast ours is."""
    return f"{rate:,.0f}" if ratio is None else f"{rate:,.0f} ({ratio:.2f})"


def _table(corner: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join([corner, *columns])} |",
        f"| --- |{' ---: |' * len(columns)}",
        *(f"| {' | '.join([word, *cells])} |" for word, cells in rows.items()),
    ]


# ---- picture ----


def peers_picture(f: Figures) -> str:
    """The tables' first figures as an SVG picture: bars in tokens a second, the longest of each row of equal length."""
    names, parts, y = _names(f), list[str](), 0
    for name, model in f["models"].items():
        runtimes = [runtime for runtime in names if runtime in model["rates"]]
        parts += [_text(12, y + 22, name, weight="bold"), *_legend(runtimes, names, y + 42)]
        y += TOP
        for key, word in SCENARIOS.items():
            rates = {runtime: model["rates"][runtime][key] for runtime in runtimes}
            parts += _bars(word, rates, y)
            y += BAR * len(runtimes) + GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" '
        'font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{y}" fill="white"/>', *parts, "</svg>", ""])


def _legend(runtimes: Sequence[str], names: Mapping[str, str], y: int) -> list[str]:
    parts, x = list[str](), 12
    for runtime in runtimes:
        parts += [_rect(x, y - 10, 11, 11, COLOURS[runtime]), _text(x + 16, y, names[runtime])]
        x += 40 + 7 * len(names[runtime])
    return parts


def _bars(word: str, rates: Mapping[str, float], y: int) -> list[str]:
    longest, parts = WIDTH - LABELS - 60, [_text(LABELS - 8, y + BAR * len(rates) / 2 + 5, word, anchor="end")]
    for row, (runtime, rate) in enumerate(rates.items()):
        length, top = longest * rate / max(rates.values()), y + row * BAR
        parts += [
            _rect(LABELS, top, length, BAR - 2, COLOURS[runtime]),
            _text(LABELS + length + 5, top + 10, f"{rate:,.0f}"),
        ]
    return parts


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" fill="{fill}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="#24292f"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(text)}</text>'
