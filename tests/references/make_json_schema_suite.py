"""Writes `json_schema_suite.json`: the JSON Schema Test Suite's tests of draft 2020-12, which test llguidance, too.

    python tests/references/make_json_schema_suite.py SUITE

SUITE: its directory, as https://github.com/json-schema-org/JSON-Schema-Test-Suite has it, and jsonschema's source
archive on PyPI (4.26.0) below ``json/``. Its licence (MIT) goes with the tests.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

OUT = Path(__file__).with_name("json_schema_suite.json")


def main(suite: Path) -> None:
    files = sorted((suite / "tests" / "draft2020-12").glob("*.json"))
    groups = [{"file": file.name, **group} for file in files for group in json.loads(file.read_text())]
    content = {"licence": (suite / "LICENSE").read_text(), "groups": groups}
    OUT.write_text(json.dumps(content, indent=0, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
