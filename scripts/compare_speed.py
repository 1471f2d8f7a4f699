"""Step times of two commits in turns, on one machine: has a change made training slower?

    python scripts/compare_speed.py OTHER/.venv/bin/python --settings two,lab-100 --workloads gpt --repeats 4

`OTHER` is a clone of the other commit with its own environment; lab settings need root. Each round is one `bench speed` of
either commit in either setting; who goes first changes from round to round. Printed: the median of the rounds, their range, and
new over old. Every round is kept in --out, so that a comparison that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="Python of the other commit's environment")
    parser.add_argument("--settings", default="two,lab-100")
    parser.add_argument("--workloads", default="gpt")
    parser.add_argument("--case", default="ring:zero-bubble")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/compare-speed.json"))
    asked = parser.parse_args()
    found: dict[str, float] = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    sides = [("old", asked.other.absolute()), ("new", Path(sys.executable))]
    places = [(setting, work) for setting in asked.settings.split(",") for work in asked.workloads.split(",")]
    for number in range(asked.repeats):
        for setting, work in places:
            for side, python in sides if number % 2 else sides[::-1]:
                name = f"{work} {setting} {number} {side}"
                if name not in found:
                    found[name] = step_s(python, setting, work, asked.case, asked.steps)
                    asked.out.write_text(json.dumps(found, indent=1) + "\n")
                print(f"{name}: {found[name] * 1e3:.1f} ms", flush=True)
    for setting, work in places:
        old, new = (
            [found[f"{work} {setting} {number} {side}"] * 1e3 for number in range(asked.repeats)]
            for side in ("old", "new")
        )
        said = (f"{median(each):.1f} ms ({min(each):.1f} to {max(each):.1f})" for each in (old, new))
        print(f"{asked.case}, {work}, {setting}: {' -> '.join(said)}, new over old {median(new) / median(old):.3f}")


def step_s(python: Path, setting: str, work: str, case: str, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            python, "-m", "ringtmp", "bench", "speed", "--cases", case, "--settings", setting, "--workloads", work,
            "--repeats", 1, "--steps", steps, "--out", folder, "--json", "--quiet",
        ]  # fmt: skip
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=1800)
        if done.returncode:
            sys.exit(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stderr}")
    rows = [each for each in json.loads(done.stdout)["rows"] if each["case"].startswith(case)]
    return min(float(each["step_s"]["middle"]) for each in rows)  # of the numbers of microbatches that were tried


if __name__ == "__main__":
    main()
