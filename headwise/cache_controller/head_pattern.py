"""Head patterns: which (layer, KV head) pairs need full attention, and the policies that follow from it.

A pattern is a table of scores ``[num_layers, num_kv_heads]``; the higher a head's score, the more it looks at tokens
that are neither among the first nor among the most recent ones. Two file formats are read: DuoAttention's (rows of
tab-separated numbers, arXiv 2410.10819) and headwise's own JSON, which also says what it was measured on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.errors import ConfigError

FORMAT = "headwise-pattern/1"

Policies = tuple[tuple[HeadPolicy, ...], ...]
"""``[num_layers][num_kv_heads]``"""


@dataclass(frozen=True)
class HeadPattern:
    """A table of scores and where it comes from.

    scores:   ``float64 [num_layers, num_kv_heads]``, finite, not negative
    source:   what messages call it: its file
    model:    name of the model that it was measured on; empty where the file does not say
    identity: that model's weights (`ModelCard.weights`); empty where the file does not say
    """

    scores: NDArray[np.float64]
    source: str
    model: str = ""
    identity: str = ""
    created_by: str = ""

    def check_fits(self, shape: tuple[int, int], model: str, identity: str) -> None:
        """Raise `ConfigError` unless the pattern has this ``(layers, KV heads)`` shape and is of this model.

        A pattern that names its model must agree with the served one in name or in identity.
        """
        named = {self.model, self.identity} - {""}
        if named and not named & {model, identity}:
            raise ConfigError(
                f"{self.source}: the pattern was measured on {self.model or self.identity}, the model to serve is "
                f"{model}; measure one with `headwise calibrate --model {model}`, or, if the two models are akin and "
                "you mean it, remove 'model' and 'identity' from the file"
            )
        if self.scores.shape != shape:
            rows, columns = self.scores.shape
            raise ConfigError(
                f"{self.source}: the pattern has {rows} rows (layers) of {columns} scores (KV heads), {model} has "
                f"{shape[0]} layers of {shape[1]} KV heads; use a pattern of this model, or measure one with "
                f"`headwise calibrate --model {model}`"
            )


# ---- files ----


def parse_pattern(text: str, source: str) -> HeadPattern:
    """Read a pattern file's text, JSON or TSV; raises `ConfigError` naming ``source``, the row and the remedy."""
    if not text.strip():
        raise ConfigError(f"{source} is empty; a pattern has one row of scores per layer, tab-separated, or is JSON")
    return _parse_json(text, source) if text.lstrip().startswith("{") else _parse_tsv(text, source)


def format_pattern(pattern: HeadPattern) -> str:
    """The pattern as JSON, one layer a line, as `parse_pattern` reads it."""
    head = {
        "format": FORMAT,
        "model": pattern.model,
        "identity": pattern.identity,
        "created_by": pattern.created_by,
    }
    fields = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items() if value]
    rows = ",\n".join(f"    {json.dumps([round(float(score), 6) for score in row])}" for row in pattern.scores)
    return "{\n" + ",\n".join([*fields, f'  "scores": [\n{rows}\n  ]']) + "\n}\n"


def _parse_tsv(text: str, source: str) -> HeadPattern:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    rows = [(f"line {number}", line.strip("\r\n").split("\t")) for number, line in lines]
    return HeadPattern(_table(rows, source), source)


def _parse_json(text: str, source: str) -> HeadPattern:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source} is not valid JSON: {error}; write it again with `headwise calibrate`") from None
    if data.get("format") != FORMAT:
        raise ConfigError(f"{source}: 'format' must be {FORMAT!r}, got {data.get('format')!r}")
    rows = data.get("scores")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        raise ConfigError(f"{source}: 'scores' must be a list with one list of scores per layer")
    names = {name: data.get(name, "") for name in ("model", "identity", "created_by")}
    for name, value in names.items():
        if not isinstance(value, str):
            raise ConfigError(f"{source}: {name!r} must be text, got {value!r}")
    return HeadPattern(_table([(f"layer {layer}", row) for layer, row in enumerate(rows)], source), source, **names)


def _table(rows: Sequence[tuple[str, Sequence[Any]]], source: str) -> NDArray[np.float64]:
    """Scores of named rows as one array, each checked."""
    first, width = rows[0][0], len(rows[0][1])
    if not width:
        raise ConfigError(f"{source}, {first}: a layer needs at least one score, one per KV head")
    for name, row in rows:
        if len(row) != width:
            raise ConfigError(
                f"{source}, {name}: {len(row)} scores, {first} has {width}; every layer needs one score per KV head, "
                "separated by tabs in a TSV file"
            )
    return np.array([[_score(value, source, name, head) for head, value in enumerate(row)] for name, row in rows])


def _score(value: Any, source: str, row: str, head: int) -> float:
    try:
        score = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        raise ConfigError(f"{source}, {row}: score {head} is {value!r}, which is no number") from None
    if not math.isfinite(score) or score < 0:
        raise ConfigError(
            f"{source}, {row}: score {head} is {value!r}; scores are finite and not negative: "
            "measure the pattern again with `headwise calibrate`"
        )
    return score


# ---- policies ----


def policies_from_scores(
    scores: NDArray[np.float64], sparsity: float, sink: int, window: int, own: Policies | None = None
) -> Policies:
    """Make the ``sparsity`` share of heads with the lowest scores streaming (``window`` and ``sink``).

    The threshold is DuoAttention's: the ``sparsity`` quantile of all scores, with linear interpolation; heads below it
    stream. Of ``n`` heads that is ``ceil(sparsity * (n - 1))``, and all ``n`` at 1. Where DuoAttention breaks ties at
    random, equal scores stream in the order of their layer, then of their head: the same file, the same policies.

    ``own`` are the policies the model itself has (default: full everywhere). A streaming head that the model windows
    keeps the tighter of both; what else the model windows stays as it is.

    Raises `ConfigError` on a share outside [0, 1], a window or sink that is negative, a window of 0, ``sink > window``.
    """
    check_streaming(sparsity, sink, window)
    own = own or tuple((FULL,) * scores.shape[1] for _ in range(scores.shape[0]))
    streams = streaming_heads(scores, sparsity)
    streaming = HeadPolicy(window, sink)
    return tuple(
        tuple(_tighter(policy, streaming) if streams[layer, head] else policy for head, policy in enumerate(row))
        for layer, row in enumerate(own)
    )


def streaming_heads(scores: NDArray[np.float64], sparsity: float) -> NDArray[np.bool_]:
    """``bool [num_layers, num_kv_heads]``: the heads that `policies_from_scores` makes streaming."""
    rank = round(sparsity * (scores.size - 1), 9)  # 0.55 * 100 is 55.00000000000001
    count = scores.size if sparsity >= 1 else math.ceil(rank)
    streams = np.zeros(scores.size, dtype=np.bool_)
    streams[np.argsort(scores, axis=None, kind="stable")[:count]] = True
    return streams.reshape(scores.shape)


def check_streaming(sparsity: float, sink: int, window: int, block_size: int = 1) -> None:
    """Raise `ConfigError` unless these can be what streaming heads are made of."""
    if not 0 <= sparsity <= 1:
        raise ConfigError(f"sparsity is the share of heads that stream, from 0 to 1, got {sparsity!r}")
    if sink < 0:
        raise ConfigError(f"sink must not be negative, got {sink}; 0 keeps no first tokens")
    if window < 1:
        raise ConfigError(f"window must be at least 1, a token sees itself, got {window}")
    if window < block_size:
        raise ConfigError(
            f"window {window} is less than block_size {block_size}: memory is freed in whole blocks, so a window "
            f"smaller than one hides tokens and frees nothing for it; use a window of at least {block_size}, or "
            "smaller blocks"
        )
    if sink > window:
        raise ConfigError(f"sink {sink} is more than window {window}: lower sink or raise window")


def _tighter(own: HeadPolicy, streaming: HeadPolicy) -> HeadPolicy:
    """A policy that shows nothing which either hides."""
    if own.is_full:
        return streaming
    return HeadPolicy(min(own.window, streaming.window), min(own.sink, streaming.sink))
