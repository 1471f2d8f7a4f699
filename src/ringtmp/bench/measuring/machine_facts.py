"""What a measurement depends on besides its job: versions, the machine, and what others took of it meanwhile."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import psutil

import ringtmp
from ringtmp import __version__
from ringtmp.launch.device_facts import usable_cores
from ringtmp.system.resources import cpu_name, fingerprint

LOOK_S = 0.5
#: What others may use of the machine before its figures need a warning.
QUIET = 0.1
_STAT = Path("/proc/stat")
#: What of the bench runs while a job is measured, or makes what a measurement keeps.
_MEASURES = ("bench/peers/", "bench/programs/", "bench/measuring/read_output.py", "bench/measuring/run_record.py")
_REPORTS = ("bench/", "report/", "cli/bench.py", "cli/report.py")
_STEAL = 8  # position in the first line of /proc/stat: cpu user nice system idle iowait irq softirq steal


class Environment(msgspec.Struct, frozen=True):
    """Part of a measurement's digest: after a change of any of these it is measured again. No host name, no path."""

    ringtmp: str
    code_sha256: str  # of everything that runs while a job is measured
    torch: str
    capability: str
    python: str
    platform: str
    cpu: str
    cores: int


def look() -> Environment:
    known = fingerprint(threads=1)
    return Environment(
        ringtmp=__version__,
        code_sha256=code_sha256(Path(ringtmp.__file__).parent),
        torch=known["torch"],
        capability=known["capability"],
        python=known["python"],
        platform=known["platform"],
        cpu=cpu_name(),
        cores=usable_cores(),
    )


def code_sha256(root: Path) -> str:
    """Over the package's source, but for what only plans and reports: a new column is no reason to measure again."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(_MEASURES) or not name.startswith(_REPORTS):
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class Meter:
    """What others do: load and busy processors just before a measurement, stolen time during it. Takes half a second."""

    def __init__(self) -> None:
        self.load_before = os.getloadavg()[0]
        # The load still remembers the measurement before this one; this does not.
        self.busy_before = psutil.cpu_percent(interval=LOOK_S) / 100
        self._stolen_s = _stolen_s()

    def stolen_s(self) -> float | None:
        """CPU seconds the hypervisor gave to others since the start, over all processors; None where nobody counts."""
        now = _stolen_s()
        return None if now is None or self._stolen_s is None else max(0.0, now - self._stolen_s)


def _stolen_s() -> float | None:
    try:
        return stolen_ticks(_STAT.read_text()) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def stolen_ticks(stat: str) -> int:
    """From the text of /proc/stat; ValueError when it has no such line."""
    fields = stat.partition("\n")[0].split()
    if len(fields) <= _STEAL or fields[0] != "cpu":
        raise ValueError("no line of all processors")
    return int(fields[_STEAL])


def processors(count: int) -> tuple[int, ...]:
    """The first `count` processors this process may use; fewer if it has fewer, none where nobody can choose."""
    own: list[int] = psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else []
    return tuple(sorted(own)[:count])
