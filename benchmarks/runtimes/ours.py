"""headwise as a runtime, and the options by which benchmarks choose its configuration."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from runtimes.control import Spec


def headwise_spec(**fields: Any) -> Spec:
    """With these fields of `EngineConfig`."""
    return Spec("headwise_cpu", Path(sys.executable), fields)


def add_engine_options(parser: ArgumentParser) -> None:
    """`--dtype` and `--engine`, which `engine_fields` reads."""
    parser.add_argument("--dtype", default="auto", help="of headwise's weights and activations; default: auto")
    parser.add_argument(
        "--engine", action="append", default=[], type=_field, metavar="KEY=VALUE", help="of headwise's configuration"
    )


def engine_fields(args: Namespace) -> dict[str, Any]:
    return {"device": "cpu", "dtype": args.dtype, **dict(args.engine)}


def _field(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ArgumentTypeError(f"give KEY=VALUE, got {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
