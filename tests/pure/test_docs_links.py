"""Whatever the pages name exists: relative links with their anchors, source files, tests and scripts."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "ringtmp"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
#: These pages record what was true on their day, so the files they name may have moved since.
OF_THEIR_DAY = {ROOT / "docs" / "log.md", ROOT / "docs" / "experiments" / "results.md"}
#: Files of the reader's own, as examples.
YOURS = {"mine.py", "FILE.py"}
LINK = re.compile(r"\]\(([^)\s]+)\)")
PYTHON_FILE = re.compile(r"\w[\w/.-]*\.py\b")
FOLDER = re.compile(r"`([\w./-]+/)`")


def anchors(page: Path) -> set[str]:
    """Headings as GitHub turns them into anchors."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def missing_files(text: str) -> list[str]:
    """Names of Python files and folders in a text that the project does not have."""
    ours = {path.name for folder in ("src", "tests", "scripts", "examples") for path in (ROOT / folder).rglob("*.py")}
    tops = {path.name for path in (*ROOT.iterdir(), *SOURCE.iterdir()) if path.is_dir()}
    missing = []
    for name in sorted(set(PYTHON_FILE.findall(text)) - YOURS):
        if "/" in name:
            found = any((folder / name).exists() for folder in (ROOT, SOURCE, SOURCE.parent))
        else:
            found = name in ours
        if not found:
            missing.append(name)
    for name in sorted(set(FOLDER.findall(text))):
        if name.split("/")[0] in tops and not (ROOT / name).is_dir() and not (SOURCE / name).is_dir():
            missing.append(name)
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        there = (page.parent / target) if target else page
        assert there.exists(), f"{page.name} links to {link}, which does not exist"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {link}: no such heading"


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OF_THEIR_DAY], ids=lambda page: page.name)
def test_every_file_a_page_names_exists(page: Path) -> None:
    assert missing_files(page.read_text()) == []


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_the_tree_of_a_page_has_every_folder_of_the_source(page: str) -> None:
    text = (ROOT / page).read_text()
    tree = text[text.index("src/ringtmp/\n") :].partition("```")[0]
    folders = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert folders - set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE)) == set()


def test_the_order_of_imports_in_the_page_is_the_one_that_is_tested() -> None:
    rules = ast.parse((ROOT / "tests" / "pure" / "test_house_rules.py").read_text())
    order = next(ast.literal_eval(node.value) for node in rules.body if _assigns(node, "ORDER"))
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(order) + 1))
    for (_, row), names in zip(rows, order, strict=True):
        told = set(re.findall(r"`(\w+)`", row.partition(" (")[0]))
        assert told == {name for name in names if not name.startswith("__")}


def _assigns(node: ast.stmt, name: str) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign) and any(isinstance(each, ast.Name) and each.id == name for each in node.targets)


def test_a_file_that_is_gone_is_noticed() -> None:
    text = "`plan/route.py`, tests/pure/test_export.py, route.py, `plan/`, `RUN/report/`, mine.py"
    assert missing_files(text) == []
    gone = "`plan/gone.py`, tests/pure/test_gone.py, gone.py, `plan/gone/`"
    assert missing_files(gone) == ["gone.py", "plan/gone.py", "tests/pure/test_gone.py", "plan/gone/"]
