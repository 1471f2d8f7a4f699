"""How large may a model be? Depth grows, then width, until a run of two steps is refused or fails; a bounded search.

Every size is one `ringtmp lab … train`. A size that does not work ends in its reason, and the search goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from ringtmp.bench.measuring.measurement_files import Result
from ringtmp.bench.measuring.run_command import last_line
from ringtmp.bench.programs.end_started_processes import end
from ringtmp.system.end_with_parent import end_with_parent, tied

Outcome = Literal["fits", "refused", "failed", "timed out"]
TRY_LIMIT_S = 240.0
#: All tries together; a measurement may take half an hour.
ALL_LIMIT_S = 1320.0
#: Exit code of `ringtmp` for what does not fit.
REFUSED = 3


class Search(msgspec.Struct, frozen=True):
    """`words` of ringtmp, complete but for the size."""

    words: tuple[str, ...]
    inputs: int
    outputs: int
    width: int  # while depth grows
    depth: int  # where it begins
    least_depth: int  # while width grows: what the strategy needs
    factor: float
    most_tries: int  # per direction
    grow_width: bool


class Try(msgspec.Struct, frozen=True):
    depth: int
    width: int
    parameters: int
    outcome: Outcome
    reason: str
    peak_rss_bytes: tuple[int, ...] = ()


Attempt = Callable[[int, int], Try]


def main() -> None:
    end_with_parent()  # and what is started here with this
    search = msgspec.json.decode(sys.argv[1], type=Search)
    tries = perform(search, within(ALL_LIMIT_S, time.monotonic, lambda depth, width: attempt(search, depth, width)))
    facts: dict[str, Any] = {"tries": msgspec.to_builtins(tries)}
    sys.stdout.write(msgspec.json.encode(Result((), facts)).decode() + "\n")


def within(limit_s: float, clock: Callable[[], float], attempt: Attempt) -> Attempt:
    """No try is begun that might not end in time; what was tried before counts."""
    end = clock() + limit_s

    def maybe(depth: int, width: int) -> Try:
        if clock() > end:
            return Try(depth, width, 0, "timed out", f"not tried: the search has taken {limit_s:g} s")
        return attempt(depth, width)

    return maybe


def perform(search: Search, attempt: Attempt) -> list[Try]:
    """Depth first, at one width; then width, at the least depth, from the width whose layers are as large."""
    found = climb(search.depth, search.factor, search.most_tries, lambda depth: attempt(depth, search.width))
    if search.grow_width:
        best = max((each.parameters for each in found if each.outcome == "fits"), default=0)
        wide = max(search.width, int((best / max(1, search.least_depth)) ** 0.5))
        found += climb(wide, search.factor**0.5, search.most_tries, lambda width: attempt(search.least_depth, width))
    return found


def climb(first: int, factor: float, most: int, attempt: Callable[[int], Try]) -> list[Try]:
    """Up while it works, down until it does; then once between the largest that did and the smallest that did not."""
    tried: dict[int, Try] = {}
    size = first
    while len(tried) < most and size not in tried:
        tried[size] = attempt(size)
        fits = [each for each, made in tried.items() if made.outcome == "fits"]
        fails = [each for each, made in tried.items() if made.outcome != "fits"]
        if fits and fails:
            size = (max(fits) + min(fails)) // 2
        elif fits:
            size = max(size + 1, round(size * factor))
        else:
            size = max(1, int(size / factor))
    return list(tried.values())


def parameters(search: Search, depth: int, width: int) -> int:
    """Of an mlp."""
    return (search.inputs + 1) * width + (depth - 1) * (width + 1) * width + (width + 1) * search.outputs


def attempt(search: Search, depth: int, width: int) -> Try:
    words = [*search.words, "--set", f"depth={depth}", "--set", f"width={width}", "--run-dir", f"run-{depth}-{width}"]
    count = parameters(search, depth, width)
    command = [sys.executable, "-P", "-m", "ringtmp", *words]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=tied(os.environ)
    )
    try:
        out, err = process.communicate(timeout=TRY_LIMIT_S)
    except subprocess.TimeoutExpired:
        return Try(depth, width, count, "timed out", f"did not finish within {TRY_LIMIT_S:g} s")
    finally:
        if process.poll() is None:
            end(process)
    if process.returncode == 0:
        summary = msgspec.json.decode(out.splitlines()[-1])
        return Try(depth, width, count, "fits", "", tuple(node["peak_rss_bytes"] or 0 for node in summary["per_node"]))
    said = err.decode(errors="replace")
    ours = "\n".join(line for line in said.splitlines() if line.startswith("ringtmp: "))
    return Try(depth, width, count, "refused" if process.returncode == REFUSED else "failed", last_line(ours or said))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
