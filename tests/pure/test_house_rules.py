"""The house rules a reader relies on: imports point one way, nothing unsafe is used, no file grows into a maze."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ringtmp

ROOT = Path(ringtmp.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
#: A package may import those in the rows above its own, and its own row.
ORDER = [
    {"errors", "units", "untrusted", "system", "__init__"},
    {"data"},
    {"model", "plan", "metrics"},
    {"report"},
    {"wire"},
    {"transport"},
    {"config"},
    {"runtime"},
    {"strategies"},
    {"launch", "lab"},
    {"run"},
    {"api"},
    {"cli", "bench", "__main__"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(tree: ast.AST, everywhere: bool) -> set[str]:
    """ringtmp's own parts a file imports; only at the top unless `everywhere`."""
    found = set()
    for node in ast.walk(tree) if everywhere else ast.iter_child_nodes(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "ringtmp" and len(parts) > 1:
                found.add(parts[1] if parts[1] in RANK else "__init__")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    here = part_of(path)
    assert here in RANK, f"{here} has no place in the order of imports"
    for other in imported(ast.parse(path.read_text()), everywhere=False):
        assert RANK[other] <= RANK[here], f"{path.name} in {here} imports {other}, which stands above it"


FORBIDDEN = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_runs_received_bytes_is_used(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
            assert not FORBIDDEN & {part for name in names for part in name.split(".")}
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in ("eval", "exec", "compile", "torch.load", "torch.export.load", "os.system"), name
            assert not name.endswith(("recv_pyobj", "send_pyobj")), name
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert "tcp://*" not in node.value
            assert "0.0.0.0" not in node.value


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_says_what_lives_there_and_stays_a_room(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "its first sentence says what lives there"
    assert text.count("\n") <= 500


def test_a_report_knows_measurements_and_nothing_of_how_they_were_made() -> None:
    for path in sorted((ROOT / "report").glob("*.py")):
        others = imported(ast.parse(path.read_text()), everywhere=True) - {"report"}
        assert others <= {"metrics", "system", "units", "errors"}, f"{path.name} imports {sorted(others)}"


@pytest.mark.parametrize("path", sorted((ROOT / "run").glob("*.py")), ids=lambda path: path.name)
def test_what_a_run_is_made_of_is_whole_from_the_start(path: Path) -> None:
    """No field is filled in later, with an assert behind it."""
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.Assert) and "is not None" in ast.unparse(node.test)), ast.unparse(node)
