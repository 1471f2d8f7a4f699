"""The built wheel works in an empty environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_wheel_installs_in_an_empty_environment_and_trains(tmp_path: Path) -> None:
    def run(*command: object, **options: object) -> str:
        done = subprocess.run(
            [str(each) for each in command], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT)
    wheel = next(tmp_path.glob("ringtmp-*.whl"))
    run(sys.executable, "-m", "venv", tmp_path / "env")
    python = tmp_path / "env/bin/python"
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    done = run(tmp_path / "env/bin/ringtmp", "train", "--json", "--quiet", "--steps", 30)
    assert json.loads(done)["outcome"] == "done"
