"""Power meters: what a device itself says of the energy it uses. Each reads below a root folder, or a command's output.

    rapl     /sys/class/powercap: counters of processor packages and their memory (Intel, AMD). Root only, usually.
    hwmon    /sys/class/hwmon: monitors on the board (INA2xx, INA3221 of a Jetson, an ACPI power meter), in watts.
    pmic     `vcgencmd pmic_read_adc` of a Raspberry Pi 5: volts and amperes of its rails; less than what the plug sees.
    nvml     `nvidia-smi`: a GPU's watts. Nodes compute on processors, so it is read only when asked for.

Tested on recorded trees and outputs; only nvml has been tried on its hardware. Counters are read when asked; watts are
sampled by a thread and added up.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

SAMPLE_S = 0.5
_COMMAND_LIMIT_S = 5.0
PMIC_COMMAND = ("vcgencmd", "pmic_read_adc")
NVML_COMMAND = ("nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits")
#: Chips that watch a board's supply. Others (a GPU's, a battery's, a disk's) see only a part, or what flows in to charge.
_BOARD_CHIPS = re.compile(r"(ina\d|ltc29|pac19|power_meter|cgbc|isl28022)")
#: A rail that feeds all others stands for them: Jetsons call it VDD_IN or POM_5V_IN. (VIN_SYS_5V0 feeds only some.)
_INPUT_RAIL = re.compile(r"(^|_)V?IN$", re.IGNORECASE)
_ADC = re.compile(r"^\s*(\S+)_([AV])\s+(?:current|volt)\(\d+\)=([\d.]+)[AV]\s*$", re.MULTILINE)


class Meter(Protocol):
    name: str

    def joules(self) -> float:
        """Since the meter was made."""
        ...


class Rapl:
    """Counters in microjoules that begin again at a range of their own; read at least once per round (minutes)."""

    name = "rapl"

    def __init__(self, root: Path) -> None:
        """Raises OSError where there is none, or none may be read."""
        self._zones: list[tuple[Path, int]] = []
        for folder in sorted(root.glob("sys/class/powercap/intel-rapl:*")):
            # Packages and their memory. Cores and uncore are inside the package, psys is around it.
            kind = (folder / "name").read_text().strip()
            if kind.startswith("package") or kind == "dram":
                self._zones.append((folder / "energy_uj", int((folder / "max_energy_range_uj").read_text())))
        if not self._zones:
            raise FileNotFoundError("no processor package below sys/class/powercap")
        self._last = [_integer(path) for path, _ in self._zones]
        self._total_uj = 0

    def joules(self) -> float:
        for place, (path, reach) in enumerate(self._zones):
            now = _integer(path)
            grown = now - self._last[place]
            self._total_uj += grown if grown >= 0 else grown + reach
            self._last[place] = now
        return self._total_uj * 1e-6


def hwmon_watts(root: Path) -> float | None:
    """Of all board monitors together; None where there is none."""
    found: list[float] = []
    for folder in sorted(root.glob("sys/class/hwmon/hwmon*")):
        with contextlib.suppress(OSError, ValueError):
            if _BOARD_CHIPS.match((folder / "name").read_text().strip()):
                rails = _rails(folder)
                feeding = [watts for label, watts in rails if _INPUT_RAIL.search(label)]
                found += feeding or [watts for _, watts in rails]
    return sum(found) if found else None


def _rails(folder: Path) -> list[tuple[str, float]]:
    """Label and watts: power in microwatts where the chip tells it, else millivolts times milliamperes."""
    rails = []
    for path in sorted((*folder.glob("power*_input"), *folder.glob("power*_average"))):
        number = re.sub(r"\D", "", path.name)
        if path.name.endswith("average") and (folder / f"power{number}_input").exists():
            continue
        rails.append((_label(folder, "power", number), _integer(path) * 1e-6))
    if rails:
        return rails
    for path in sorted(folder.glob("curr*_input")):
        number = re.sub(r"\D", "", path.name)
        volts = folder / f"in{number}_input"
        if volts.exists():
            rails.append((_label(folder, "in", number), _integer(volts) * _integer(path) * 1e-6))
    return rails


def _label(folder: Path, kind: str, number: str) -> str:
    path = folder / f"{kind}{number}_label"
    return path.read_text().strip() if path.exists() else ""


def pmic_watts(text: str) -> float | None:
    """Volts times amperes of every rail that has both; None where the text has no such rail."""
    read: dict[tuple[str, str], float] = {}
    for rail, unit, value in _ADC.findall(text):
        read[rail, unit] = float(value)
    both = [rail for rail, unit in read if unit == "A" and (rail, "V") in read]
    return sum(read[rail, "A"] * read[rail, "V"] for rail in both) if both else None


def nvml_watts(text: str) -> float | None:
    """A line per GPU; those that cannot tell say [N/A] or [Not Supported]."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found.append(float(line))
    return sum(found) if found else None


class Sampled:
    """Joules from watts: read twice a second by a thread of its own, straight lines between."""

    def __init__(
        self,
        name: str,
        watts: Callable[[], float | None],
        clock: Callable[[], float] = time.monotonic,
        thread: bool = True,
    ) -> None:
        """Raises OSError if the first reading fails."""
        self.name = name
        self._watts = watts
        self._clock = clock
        self._lock = threading.Lock()
        self._joules = 0.0
        first = watts()
        if first is None:
            raise FileNotFoundError(f"{name} tells no watts")
        self._last, self._at = first, clock()
        if thread:
            threading.Thread(target=self._run, name="meter", daemon=True).start()

    def joules(self) -> float:
        """Up to now, at the last watts that were read."""
        with self._lock:
            return self._joules + self._last * (self._clock() - self._at)

    def sample(self) -> None:
        watts, now = self._watts(), self._clock()
        with self._lock:
            if watts is None:  # for once: as before
                watts = self._last
            self._joules += (self._last + watts) / 2 * (now - self._at)
            self._last, self._at = watts, now

    def _run(self) -> None:
        while True:
            time.sleep(SAMPLE_S)
            self.sample()


Run = Callable[[Sequence[str]], str]


def run_command(command: Sequence[str]) -> str:
    """Its output; empty where it does not exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def find(root: Path, run: Run = run_command, wanted: str = "auto") -> Meter | None:
    """The first meter that can be read: the board's, then the processor's."""
    make: dict[str, Callable[[], Meter]] = {
        "hwmon": lambda: Sampled("hwmon", lambda: hwmon_watts(root)),
        "pmic": lambda: Sampled("pmic", lambda: pmic_watts(run(PMIC_COMMAND))),
        "rapl": lambda: Rapl(root),
        "nvml": lambda: Sampled("nvml", lambda: nvml_watts(run(NVML_COMMAND))),
    }
    for name in ("hwmon", "pmic", "rapl") if wanted == "auto" else (wanted,):
        with contextlib.suppress(OSError, ValueError):
            return make[name]()
    return None


NAMES = ("auto", "off", "hwmon", "pmic", "rapl", "nvml")


def _integer(path: Path) -> int:
    return int(path.read_text())
