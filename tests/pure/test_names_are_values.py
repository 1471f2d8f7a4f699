"""An optimizer, a wire format, a schedule, a loss is one value in one registry: nobody else tells them apart by their names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ringtmp
from ringtmp.plan.pipeline_schedules import SCHEDULES
from ringtmp.runtime.learning_rates import RATE_SCHEDULES
from ringtmp.runtime.losses import LOSSES
from ringtmp.runtime.optimizers import OPTIMIZERS
from ringtmp.wire.formats import WIRE_FORMATS

ROOT = Path(ringtmp.__file__).parent
#: Names that are words besides: a "step" is an event, a "constant" a kind of tensor in a graph, a "model" what is trained.
WORDS = {"step", "constant", "model"}
NAMES = {*SCHEDULES, *RATE_SCHEDULES, *LOSSES, *OPTIMIZERS, *WIRE_FORMATS} - WORDS
HOMES = {
    "plan/pipeline_schedules.py",
    "runtime/learning_rates.py",
    "runtime/losses.py",
    *(f"runtime/optimizers/{each.name}" for each in (ROOT / "runtime/optimizers").glob("*.py")),
    "wire/formats.py",
}
#: Where such a name is the type of a tensor, which is another idea.
TYPES = {"wire/tensors.py"}


def told_apart(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where a registered name stands in a comparison, a case, or as the key of a table."""
    for node in ast.walk(tree):
        values: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            values = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            values = [node.value]
        elif isinstance(node, ast.Dict):
            values = list(node.keys)
        for value in values:
            members = value.elts if isinstance(value, ast.Tuple | ast.List | ast.Set) else [value]
            for each in members:
                if isinstance(each, ast.Constant) and each.value in NAMES:
                    yield each.lineno, str(each.value)


def test_no_file_but_its_own_tells_them_apart_by_name() -> None:
    files = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
    found = [
        f"{name}:{line} {value}"
        for name, path in files.items()
        if name not in HOMES | TYPES
        for line, value in told_apart(ast.parse(path.read_text()))
    ]
    assert found == []


def test_the_reader_of_the_syntax_tree_finds_what_it_looks_for() -> None:
    source = 'a == "gpipe"; b in ("adam", x); {"int8": 1}; f("mse", wire="float16")\nmatch a:\n    case "cosine": pass'
    assert sorted(name for _, name in told_apart(ast.parse(source))) == ["adam", "cosine", "gpipe", "int8"]


def test_what_is_excused_needs_its_excuse() -> None:
    for each in TYPES:
        assert list(told_apart(ast.parse((ROOT / each).read_text()))), f"{each} need not be excused"
