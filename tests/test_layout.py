"""Where tests and what they share have their places, and that docs name files that there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import headwise

TESTS = Path(__file__).parent
PACKAGE = Path(headwise.__file__).parent
OF_NO_PACKAGE = {"benchmarks", "deploy", "e2e", "soak"}
"""Of the whole, or of what is not in the package."""


def imported_by(path: Path) -> Iterator[str]:
    """Also in the scripts that a test starts: strings that are Python."""
    trees = [ast.parse(path.read_text())]
    for node in ast.walk(trees[0]):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value:
            try:
                trees.append(ast.parse(node.value))
            except SyntaxError:
                continue
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


NAMES_TESTS = re.compile(r"import\b.*\b(test_|conftest)|\b(test_\w*|conftest)\b.*\bimport\b")


def test_no_module_of_tests_imports_a_test_module() -> None:
    found = {
        f"{path.relative_to(TESTS)} imports {name}"
        for path in TESTS.rglob("*.py")
        if NAMES_TESTS.search(path.read_text())  # else it need not be parsed, which takes longer
        for name in imported_by(path)
        if any(part.startswith("test_") or part == "conftest" for part in name.split("."))
    }
    assert found == set(), "what tests share belongs in tests/support"


def test_tests_mirror_the_packages() -> None:
    tested = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    tested = {folder for folder in tested if not OF_NO_PACKAGE & {*folder.parts[:1]}}
    packages = {path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    assert {str(folder) for folder in tested - packages} == set(), "folders of tests without a package"
    assert {str(folder) for folder in packages - tested} == set(), "packages without a folder of tests"


def test_files_that_the_docs_name_exist() -> None:
    root = TESTS.parent
    pages = [root / "README.md", root / "CONTRIBUTING.md", *root.glob("docs/*.md"), *root.glob("*/README.md")]
    named = {
        (page.name, name)
        for page in pages
        for name in re.findall(r"(?<!\.cache/)\b(?:headwise|tests|benchmarks|deploy|docs)/[\w/.-]*\w", page.read_text())
        if "NAME" not in name  # whoever adds something gives it one
    }
    assert {f"{page}: {name}" for page, name in named if not (root / name).exists()} == set()
