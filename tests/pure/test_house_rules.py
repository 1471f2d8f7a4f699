"""The house rules a reader relies on: imports point one way, nothing unsafe is used, no file grows into a maze."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

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
    {"run", "watchers"},
    {"api", "kv"},
    {"sklearn_estimators"},
    {"cli", "bench", "dashboard", "__main__"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(tree: ast.AST) -> set[str]:
    """ringtmp's own parts that a file imports: at its top, inside functions, for types alone, or by a name in a string."""
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            start = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            names = [str(start.value)] if isinstance(start, ast.Constant) else []
        for name in names:
            parts = name.split(".")
            if parts[0] == "ringtmp" and len(parts) > 1:
                found.add(parts[1] if parts[1] in RANK else "__init__")
    return found


#: The public names are loaded when they are asked for: the one file at the bottom that knows the top.
ALLOWED = {("__init__.py", each) for each in ("api", "kv", "sklearn_estimators", "metrics", "run", "watchers")}


def test_imports_point_one_way_also_inside_functions() -> None:
    assert {part_of(path) for path in FILES} <= RANK.keys(), "without a place in the order of imports"
    wrong = [
        f"{name_of(path)} imports {other}, which stands above it"
        for path in FILES
        for other in imported(tree_of(path))
        if RANK[other] > RANK[part_of(path)] and (name_of(path), other) not in ALLOWED
    ]
    assert wrong == []


def test_an_import_inside_a_function_or_a_string_is_seen() -> None:
    hidden = "def f():\n    from ringtmp.api import Ring\n    importlib.import_module(f'ringtmp.cli.{name}')"
    assert imported(ast.parse(hidden)) == {"api", "cli"}


FORBIDDEN = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
#: It reads one file back, which it has just written, in a folder that nobody else may enter.
READS_ITS_OWN = ("run/export_graphs.py", "torch.export.load")


FORBIDDEN_CALLS = ("eval", "exec", "compile", "torch.load", "torch.export.load", "os.system")


def unsafe(tree: ast.AST) -> set[str]:
    """What a file has of what runs received bytes, or listens to everybody."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
            found |= FORBIDDEN & {part for name in names for part in name.split(".")}
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in FORBIDDEN_CALLS or name.endswith(("recv_pyobj", "send_pyobj")):
                found.add(name)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {text for text in ("tcp://*", "0.0.0.0") if text in node.value}
    return found


def test_nothing_that_runs_received_bytes_is_used() -> None:
    assert unsafe(ast.parse("from x import pickle\neval(y)\ns.recv_pyobj()\nt = 'tcp://*:1'")) == {
        "pickle", "eval", "s.recv_pyobj", "tcp://*",
    }  # fmt: skip
    found = {(name_of(path), what) for path in FILES for what in unsafe(tree_of(path))}
    assert found == {READS_ITS_OWN}


def test_every_file_says_what_lives_there_and_stays_a_room() -> None:
    assert [name_of(path) for path in FILES if not ast.get_docstring(tree_of(path))] == [], "no first sentence"
    lines = {name_of(path): path.read_text().count("\n") for path in FILES}
    assert {name: count for name, count in lines.items() if count > 450} == {}


def test_a_report_knows_measurements_and_nothing_of_how_they_were_made() -> None:
    for path in sorted((ROOT / "report").glob("*.py")):
        others = imported(tree_of(path)) - {"report"}
        assert others <= {"metrics", "system", "units", "errors"}, f"{path.name} imports {sorted(others)}"


#: Nobody can check eight values without names against a signature. This many calls are left; the number only goes down.
MOST_WITHOUT_NAMES, LEFT_WITHOUT_NAMES = 7, 8
NONE_LEFT = {
    "wire",
    "transport",
    "plan",
    "launch",
    "lab",
    "runtime",
    "bench",
    "cli",
    "report",
    "metrics",
    "run",
    "watchers",
    "dashboard",
}


def test_no_call_has_eight_arguments_without_their_names() -> None:
    found = [
        (part_of(path), f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node.func)}")
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and len(node.args) > MOST_WITHOUT_NAMES
    ]
    assert [where for part, where in found if part in NONE_LEFT] == []
    assert len(found) <= LEFT_WITHOUT_NAMES, "\n".join(where for _, where in found)


LONGEST_FUNCTION, MOST_PUBLIC_METHODS = 60, 20


def too_large(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef):
        return (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION
    if isinstance(node, ast.ClassDef):
        public = [each for each in node.body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]
        return len(public) > MOST_PUBLIC_METHODS
    return False


def test_no_function_is_longer_than_a_screen_and_no_class_does_everything() -> None:
    assert too_large(ast.parse("def f():\n" + "    pass\n" * LONGEST_FUNCTION).body[0])
    found = [f"{name_of(path)}:{node.name}" for path in FILES for node in ast.walk(tree_of(path)) if too_large(node)]  # type: ignore[attr-defined]
    assert found == []
