"""Puts together what parts of a run of `gpu_checks.sh` found, each in a folder of its own, as README and docs have it.

python benchmarks/gpu/join.py benchmarks/results/gpu-h200 OUT-1 OUT-2 ...    # writes gpu-h200.json and gpu-h200.md

Sections that several parts have are those of the last one. Date, card and versions are those of the first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BY_SECTION = ("results", "seconds")
BY_ROW = ("missed", "failed", "skipped")
ROW = "| "


def joined(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of several."""
    whole = dict(results[0])
    for more in results[1:]:
        for name in (*BY_SECTION, *BY_ROW):
            whole[name] = {
                key: value for key, value in whole[name].items() if key.partition(".")[0] not in more["seconds"]
            } | more[name]
        whole["void"] = sorted({*whole["void"], *more["void"]})
    del whole["met"]  # of rows that may be another part's now
    return whole


def joined_tables(tables: Sequence[str]) -> str:
    """One table of Markdown of several."""
    heads, rows = [table.partition("| --- |") for table in tables], dict[str, dict[str, str]]()
    for _, _, body in heads:
        found: dict[str, dict[str, str]] = {}
        for line in body.splitlines()[1:]:
            name = line.removeprefix(ROW).partition(" ")[0]
            found.setdefault(name.partition(".")[0], {})[name] = line
        rows |= found
    begin, line, body = heads[0]
    return "\n".join(
        [begin + line + body.splitlines()[0], *(row for each in rows.values() for row in each.values()), ""]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="where it goes, without .json and .md")
    parser.add_argument("parts", type=Path, nargs="+", help="folders with gpu.json and gpu.md")
    options = parser.parse_args(arguments)
    whole = joined([json.loads((part / "gpu.json").read_text()) for part in options.parts])
    options.target.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
    options.target.with_suffix(".md").write_text(
        joined_tables([(part / "gpu.md").read_text() for part in options.parts])
    )


if __name__ == "__main__":
    main()
