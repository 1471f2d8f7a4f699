"""Does training slow down while many look on? Runs with and without viewers of the live page, in turns, on one machine.

    python scripts/measure_viewers.py --both --pairs 12 --steps 600

A pair is one run with viewers, connected from before the first step to the end, and one without; who goes first changes from
pair to pair, and both have a page beside them. The viewers are one process that never reads what it is sent (--read: reads all
of it; --both: first the one, then the other). Printed: the speed with viewers over the speed without, as the median over pairs
with a 95 % interval, and the share of a core that the page took. Every run is kept in
--out, so that a measurement that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path
from statistics import fmean, median
from typing import cast

import msgspec
import psutil

from ringtmp.bench.analysis.intervals import interval
from ringtmp.metrics import events

#: Steps that are left out at the beginning of a run: they record every span, and caches are cold.
WARM_UP = 40
SEED = 0
START_LIMIT_S = 600.0


class Run(msgspec.Struct, frozen=True):
    """`held`: the fewest viewers that were connected at any look, from before the first step to the end."""

    step_s: float  # the mean, after the first steps
    samples_per_s: float
    page_share: float  # of a core, by the page's process, while it trained
    held: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--read", action="store_true", help="viewers read what they are sent")
    parser.add_argument("--both", action="store_true", help="viewers that never read, then viewers that do")
    parser.add_argument("--out", type=Path, default=Path("runs/viewers.json"))
    parser.add_argument("--json", action="store_true", help="print one object instead of a sentence")
    parser.add_argument(
        "--look", metavar="ADDRESS", help=argparse.SUPPRESS
    )  # what a process of viewers is started with
    asked = parser.parse_args()
    if asked.look:
        look(asked.look, asked.viewers, asked.read)
        return
    if asked.steps <= WARM_UP or asked.pairs < 1 or asked.viewers < 1:
        parser.error(f"--steps must be more than {WARM_UP}, --pairs and --viewers at least 1")
    for read in (False, True) if asked.both else (asked.read,):
        asked.read = read
        tell(asked)


def tell(asked: argparse.Namespace) -> None:
    found = measured(asked)
    pairs = [(found[f"{number} with"], found[f"{number} without"]) for number in range(asked.pairs)]
    ratio = interval([[without.step_s / watched.step_s] for watched, without in pairs], "median", SEED)
    shares = [median([each[side].page_share for each in pairs]) for side in (0, 1)]
    if asked.json:
        told = {"ratio": ratio, "page_share": shares[0], "page_share_alone": shares[1], "runs": found}
        print(msgspec.json.encode(told).decode())
        return
    print(
        f"{asked.viewers} viewers that {'read' if asked.read else 'never read'}, {asked.pairs} pairs of {asked.steps} steps: "
        f"{ratio.middle:.4f} times as fast as without ({ratio.low:.4f} to {ratio.high:.4f}); the page took "
        f"{shares[0]:.2%} of a core, without viewers {shares[1]:.2%}"
    )


def measured(asked: argparse.Namespace) -> dict[str, Run]:
    key = f"{asked.viewers} {'reading' if asked.read else 'stuck'}, {asked.nodes} nodes, {asked.steps} steps"
    kept = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    found = msgspec.convert(kept.get(key, {}), dict[str, Run])
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for number in range(asked.pairs):
        for watched in (True, False) if number % 2 else (False, True):
            name = f"{number} {'with' if watched else 'without'}"
            if name not in found:
                found[name] = trained(asked, watched)
                kept[key] = msgspec.to_builtins(found)
                asked.out.write_text(json.dumps(kept, indent=1) + "\n")
            run = found[name]
            print(f"{name}: {run.step_s * 1e3:.2f} ms a step, page {run.page_share:.2%}", file=sys.stderr, flush=True)
    return found


def trained(asked: argparse.Namespace, watched: bool) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        training = subprocess.Popen(
            [sys.executable, "-m", "ringtmp", "train", "--nodes", str(asked.nodes), "--steps", str(asked.steps),
             "--run-dir", str(run), "--dashboard", "--quiet", "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        viewers = None
        try:
            address = _address(training)
            page = next(each for each in psutil.Process(training.pid).children() if "watch" in each.cmdline())
            if watched:
                viewers = _viewers(asked, address)
            held, share = _watched_over(training, page, viewers, run)
            said, told = training.communicate(timeout=60)
        finally:
            training.kill()
            training.wait()
            if viewers is not None:
                viewers.kill()
                viewers.wait()
        if training.returncode:
            sys.exit(f"training ended with {training.returncode}: {told}")
        if watched and held < asked.viewers:
            sys.exit(f"of {asked.viewers} viewers only {held} were connected all the time: this measures nothing")
        steps = [each.wall_s for each in events.of_run(run) if isinstance(each, events.StepDone)][WARM_UP:]
        return Run(fmean(steps), json.loads(said)["samples_per_s"], share, held)


def _address(training: subprocess.Popen[str]) -> str:
    """To look, as it is printed before training begins."""
    assert training.stderr is not None
    for line in training.stderr:
        if match := re.match(r"watch +(http\S+)", line):
            return match[1]
    sys.exit(f"no page: training ended with {training.wait()}")


def _viewers(asked: argparse.Namespace, address: str) -> subprocess.Popen[str]:
    more = ["--read"] if asked.read else []
    started = subprocess.Popen(
        [sys.executable, __file__, "--look", address, "--viewers", str(asked.viewers), *more],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert started.stdout is not None
    if started.stdout.readline() != "there\n":
        sys.exit("the viewers could not connect")
    return started


def _watched_over(
    training: subprocess.Popen[str], page: psutil.Process, viewers: subprocess.Popen[str] | None, run: Path
) -> tuple[int, float]:
    """Until it ends: the fewest viewers that were connected, and the share of a core that the page took meanwhile."""
    limit = time.monotonic() + START_LIMIT_S
    held = _connected(viewers)
    if viewers is not None and _begun(run):
        sys.exit("training had begun before the viewers were there: this measures nothing")
    while not _begun(run):
        if training.poll() is not None or time.monotonic() > limit:
            break  # it says itself why
        time.sleep(0.05)
    since = time.monotonic()
    before = used = page.cpu_times()
    elapsed = 1e-9
    while training.poll() is None and not _ended(run):
        try:
            used, elapsed = page.cpu_times(), time.monotonic() - since
        except psutil.Error:
            break
        held = min(held, _connected(viewers))
        time.sleep(0.5)
    return held, (used.user + used.system - before.user - before.system) / elapsed


def _begun(run: Path) -> bool:
    log = run / "events.jsonl"
    return log.exists() and b'"type":"step"' in log.read_bytes()


def _ended(run: Path) -> bool:
    """The page goes, and its viewers with it, when the run has ended."""
    with (run / "events.jsonl").open("rb") as log:
        log.seek(max(0, log.seek(0, 2) - 2**16))
        last = log.read()
    return b'"type":"node_end"' in last or b'"type":"end"' in last


def _connected(viewers: subprocess.Popen[str] | None) -> int:
    if viewers is None:
        return 0
    found = psutil.Process(viewers.pid).net_connections("tcp")
    return len([each for each in found if each.status == psutil.CONN_ESTABLISHED])


def look(address: str, count: int, read: bool) -> None:
    """Connect so many times, say so, and read all of it or nothing, until killed."""
    host = address.split("/")[2]
    jar = CookieJar()
    urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar)).open(address, timeout=60).read()
    cookie = "; ".join(f"{each.name}={each.value}" for each in jar)
    name, _, port = host.rpartition(":")
    held: list[socket.socket] = []
    waiting = selectors.DefaultSelector()
    for _ in range(count):
        made = socket.create_connection((name, int(port)), timeout=60)
        if not read:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.sendall(f"GET /stream HTTP/1.1\r\nHost: {host}\r\nCookie: {cookie}\r\n\r\n".encode())
        waiting.register(made, selectors.EVENT_READ)
        held.append(made)
    print("there", flush=True)
    while not read:
        time.sleep(60)
    while waiting.get_map():
        for key, _ in waiting.select():
            if not cast(socket.socket, key.fileobj).recv(2**16):
                waiting.unregister(key.fileobj)


if __name__ == "__main__":
    main()
