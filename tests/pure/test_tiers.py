"""`make nightly`: parts by name, each with a stamp, so that what was stopped goes on where it was."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

#: Stands where pytest would: notes what it was asked for, and fails for the parts that a file names.
ASKED = """#!/bin/sh
echo "$1 $3" >> asked
case "$3" in *"not alone"*) grep -qs "$1" failing && exit 1 || exit 0 ;; *) exit 5 ;; esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A Makefile, two files with something for the night and one without, and an environment that is set up."""
    shutil.copy(Path(__file__).parents[2] / "Makefile", tmp_path)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "scripts/setup.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "tests/pure").mkdir(parents=True)
    for name, mark in (("seeds", "nightly"), ("soak", "nightly"), ("quick", "long")):
        (tmp_path / f"tests/pure/test_{name}.py").write_text(f"pytest.mark.{mark}")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/pytest").write_text(ASKED)
    (tmp_path / ".venv/bin/pytest").chmod(0o755)
    (tmp_path / ".venv/.installed").touch()
    return tmp_path


def nightly(clone: Path, *words: str) -> tuple[int, list[str]]:
    """Its exit code, and the parts it ran."""
    (clone / "asked").unlink(missing_ok=True)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # not our caller's make
    done = subprocess.run(
        ["make", "nightly", *words], cwd=clone, env=plain, capture_output=True, text=True, check=False
    )
    asked = (clone / "asked").read_text().splitlines() if (clone / "asked").exists() else []
    assert all("nightly and" in each for each in asked), asked
    parts = [
        each.split()[0].removeprefix("tests/pure/test_").removesuffix(".py") for each in asked if "not alone" in each
    ]
    return done.returncode, sorted(parts)


def test_a_part_that_has_passed_is_not_run_again_unless_asked(clone: Path) -> None:
    assert nightly(clone, "PART=soak") == (0, ["soak"])
    assert nightly(clone) == (0, ["seeds"])
    assert nightly(clone) == (0, [])
    assert nightly(clone, "AGAIN=1", "PART=seeds") == (0, ["seeds"])
    assert nightly(clone, "AGAIN=1") == (0, ["seeds", "soak"])


def test_a_part_that_fails_does_not_keep_the_others_from_running_and_is_run_again(clone: Path) -> None:
    (clone / "failing").write_text("tests/pure/test_seeds.py")
    assert nightly(clone) == (2, ["seeds", "soak"])
    assert nightly(clone) == (2, ["seeds"])
    (clone / "failing").unlink()
    assert nightly(clone) == (0, ["seeds"])
