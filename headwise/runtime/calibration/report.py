"""What a head pattern costs and saves: perplexity, pass key recall and cache bytes, full against patterned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.head_pattern import HeadPattern, Policies, policies_from_scores
from headwise.cache_controller.planner import plan_head_groups
from headwise.errors import ConfigError
from headwise.kernels.gqa import gqa_layout
from headwise.runtime.calibration.calibrate import DenseModel, SequenceAttention
from headwise.runtime.calibration.passkeys import PasskeyInput
from headwise.runtime.loader.progress import Progress

LOGIT_ROWS = 128
"""Rows of logits held at a time."""


@dataclass(frozen=True)
class Row:
    """One sparsity's line of the report.

    perplexity:      of the held-out text, over the tokens that a streaming head cannot see the whole past of
    recall:          share of pass keys that greedy decoding would give back in full
    answer_nll:      mean negative log-likelihood per token of the pass keys, in nats: recall in finer steps
    bytes_per_token: cache bytes that each further token of a long sequence takes, as packed into head groups
    """

    sparsity: float
    perplexity: float
    recall: float
    answer_nll: float
    bytes_per_token: float
    groups: int


@dataclass(frozen=True)
class Report:
    """``full`` is the model as it is; ``rows`` are under the pattern, by sparsity."""

    model: str
    sink: int
    window: int
    tokens: int
    passkeys: int
    full: Row
    rows: tuple[Row, ...]


def evaluate(
    model: DenseModel,
    pattern: HeadPattern,
    sparsities: Sequence[float],
    *,
    sink: int,
    window: int,
    inputs: Sequence[PasskeyInput],
    texts: Sequence[NDArray[np.int32]],
    progress: Progress,
) -> Report:
    """Judge ``pattern`` on ``inputs`` and ``texts`` that it was not measured on."""
    own = model.config.policies
    tables = [own] + [policies_from_scores(pattern.scores, share, sink, window, own) for share in sparsities]
    rows: dict[Policies, Row] = {}
    progress.stage("judging the pattern")
    for done, (share, policies) in enumerate(zip([0.0, *sparsities], tables, strict=True)):
        progress.update(done, len(tables))
        if policies not in rows:
            rows[policies] = _row(model, policies, share, inputs, texts, first=sink + window)
    return Report(
        model=model.name,
        sink=sink,
        window=window,
        tokens=max(len(item.token_ids) for item in inputs),
        passkeys=sum(len(item.answers) for item in inputs),
        full=rows[own],
        rows=tuple(
            Row(**{**asdict(rows[policies]), "sparsity": share})
            for share, policies in zip(sparsities, tables[1:], strict=True)
        ),
    )


def _row(
    model: DenseModel,
    policies: Policies,
    sparsity: float,
    inputs: Sequence[PasskeyInput],
    texts: Sequence[NDArray[np.int32]],
    first: int,
) -> Row:
    found, answers = zip(*(_recall(model, policies, item) for item in inputs), strict=True)
    losses = [_losses(model, policies, text, np.arange(first, len(text) - 1))[0] for text in texts]
    per_token, groups = bytes_per_token(policies, model.config.head_dim)
    return Row(
        sparsity=sparsity,
        perplexity=float(np.exp(np.concatenate(losses).mean())),
        recall=float(np.concatenate(found).mean()),
        answer_nll=float(np.concatenate(answers).mean()),
        bytes_per_token=per_token,
        groups=groups,
    )


def _recall(model: DenseModel, policies: Policies, item: PasskeyInput) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Which pass keys come back, and the loss of each answer token.

    The right answers are part of the input: greedy decoding gives one back iff each of its tokens is the likeliest.
    """
    losses, right = _losses(model, policies, item.token_ids, item.retrieving)
    ends = np.cumsum([stop - start for start, stop in item.answers])[:-1]
    return np.array([part.all() for part in np.split(right, ends)]), losses


def _losses(
    model: DenseModel, policies: Policies, token_ids: NDArray[np.int32], rows: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """For the query positions ``rows``: loss of the next token in nats, and whether it is the likeliest."""
    hidden = model.forward(token_ids, SequenceAttention(model, policies, len(token_ids)))
    losses, right = [], []
    for first in range(0, len(rows), LOGIT_ROWS):
        part = rows[first : first + LOGIT_ROWS]
        logits, wanted = model.logits(hidden, part), token_ids[part + 1]
        logits -= logits.max(axis=-1, keepdims=True)
        chosen = logits[np.arange(len(part)), wanted]
        losses.append(np.log(np.exp(logits).sum(axis=-1, dtype=np.float64)) - chosen)
        right.append(logits.argmax(axis=-1) == wanted)
    return np.concatenate(losses), np.concatenate(right)


def bytes_per_token(policies: Policies, head_dim: int) -> tuple[float, int]:
    """Bytes that a token takes once windows have moved past it, and the number of head groups."""
    plan = plan_head_groups(policies)
    layout = gqa_layout(64, plan.slots, head_dim)
    full = sum(policy.is_full for policy in plan.policies)
    return full * layout.block_bytes / layout.block_size, len(plan.groups)


# ---- files ----


def write_report(report: Report, pattern_file: Path) -> tuple[Path, Path]:
    """Write the report beside the pattern, as Markdown and as JSON; their paths."""
    markdown, plain = (pattern_file.with_suffix(suffix) for suffix in (".report.md", ".report.json"))
    markdown.write_text(as_markdown(report, pattern_file.name), encoding="utf-8")
    plain.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return markdown, plain


def as_markdown(report: Report, pattern_name: str) -> str:
    """The report for people."""
    full = report.full
    lines = [
        f"# Head pattern of {report.model}",
        "",
        f"`{pattern_name}`, measured and judged with a sink of {report.sink} and a window of {report.window} tokens on "
        f"inputs of {report.tokens} tokens with {report.passkeys} pass keys in all. The first line is the model as it "
        "is. Perplexity is of held-out text, beyond the first sink and window; recall is the share of pass keys that "
        "greedy decoding gives back; bytes are what each further token of a long sequence adds to the cache.",
        "",
        "| Sparsity | Perplexity | Recall | Answer loss (nats) | Bytes per token | Saved | Head groups |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, row in [("model", full), *((f"{row.sparsity:g}", row) for row in report.rows)]:
        saved = 1 - row.bytes_per_token / full.bytes_per_token if full.bytes_per_token else 0.0
        lines.append(
            f"| {name} | {row.perplexity:.3f} | {row.recall:.0%} | {row.answer_nll:.3f} | {row.bytes_per_token:,.0f} | "
            f"{saved:.0%} | {row.groups} |"
        )
    return "\n".join(lines) + "\n"


def write_heat_map(pattern: HeadPattern, path: Path) -> None:
    """Draw the scores, layers downwards and KV heads across; raises `ConfigError` where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "the heat map needs matplotlib: `pip install 'headwise[calibrate]'`, or use --no-heat-map"
        ) from None
    layers, heads = pattern.scores.shape
    figure = Figure(figsize=(2.5 + 0.4 * heads, 1.5 + 0.2 * layers), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(pattern.scores, aspect="auto", cmap="viridis", vmin=0)
    axes.set(title=pattern.model, xlabel="KV head", ylabel="layer", xticks=range(heads))
    figure.colorbar(image, label="attention past sink and window")
    figure.savefig(path, dpi=120)
