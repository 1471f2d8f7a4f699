"""A way to train by its short name, as --strategies has it: `ring`, `ring:staleness=1`, `ps:ssp:3`, `ps:bsp:servers=workers`.

    NAME[:SHORT][:KEY=VALUE]...    SHORT as --strategy has it; KEY a setting of the strategy or one of TRAIN_KEYS

Pure. Whether a way can run on so many nodes is asked of the strategies themselves.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ringtmp.bench.analysis.intervals import Centre
from ringtmp.errors import UsageError, unknown
from ringtmp.strategies import registry

#: Flags of `ringtmp train` that may differ from way to way.
TRAIN_KEYS = ("staleness", "wire", "schedule", "window", "laps", "route", "recompute", "microbatches", "protect")
#: Those only a ring has.
RING_KEYS = ("staleness", "schedule", "window", "laps", "route", "recompute")


class Way(msgspec.Struct, frozen=True):
    label: str
    strategy: str
    settings: dict[str, int | str] = {}  # of the strategy
    flags: dict[str, int | str] = {}  # of `ringtmp train`

    @property
    def wire(self) -> str:
        return str(self.flags.get("wire", "float32"))

    @property
    def staleness(self) -> int:
        return int(self.flags.get("staleness", 0))

    @property
    def asynchronous(self) -> bool:
        return str(self.settings.get("consistency", "bsp")) not in ("bsp", "ssp:0")

    @property
    def delayed(self) -> bool:
        """Gradients may be of older weights than those they change."""
        return self.asynchronous or self.staleness > 0

    @property
    def centre(self) -> Centre:
        """Asynchronous servers, and steps that overlap, end in bursts."""
        return "mean" if self.delayed else "median"

    @property
    def like_one_process(self) -> bool:
        """The same weights as one process, to rounding: then what one process learns, it learns."""
        return not self.delayed and self.wire == "float32" and "quorum" not in self.settings

    def words(self) -> list[str]:
        found = ["--strategy", self.strategy]
        for key, value in self.settings.items():
            found += ["--with", f"{key}={value}"]
        for key, value in self.flags.items():
            if key != "microbatches":
                found += [f"--{key}", str(value)]
        return found

    def workers(self, nodes: int) -> int:
        return len(registry.roles(self.strategy, self.settings, nodes).workers)

    def servers(self, nodes: int) -> tuple[int, ...]:
        """Dedicated ones."""
        who = registry.roles(self.strategy, self.settings, nodes)
        return tuple(node for node in who.servers if node not in who.workers)

    def microbatches(self, nodes: int, batch_size: int, pipeline: int) -> int:
        """A pipeline takes what suits the work, data parallelism one per worker."""
        if "microbatches" in self.flags:
            return min(int(self.flags["microbatches"]), batch_size)
        return min(pipeline if self.strategy == "ring" else self.workers(nodes), batch_size)

    def refusal(self, nodes: int, layers: int) -> str | None:
        """Why it cannot run on so many nodes, in the strategy's own words; None if it can."""
        if nodes == 1:
            return None
        if self.strategy == "ring":
            laps = int(self.flags.get("laps", 1))
            least = nodes * laps + 1
            return None if layers >= least else f"a ring of {nodes} needs {least} layers, and the model has {layers}"
        try:
            registry.checked(self.strategy, self.settings, nodes, self.wire)
        except UsageError as error:
            return str(error)
        return None


def parse(text: str) -> Way:
    name, *rest = text.strip().split(":")
    pairs = [word for word in rest if "=" in word]
    short = ":".join([name, *(word for word in rest if "=" not in word)])
    strategy, settings = registry.named(short)
    known = [setting.name for setting in registry.ENTRIES[strategy].settings]
    keys = [key for key in TRAIN_KEYS if strategy == "ring" or key not in RING_KEYS]
    flags: dict[str, int | str] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key in known:
            settings[key] = _number(value)
        elif key in keys:
            flags[key] = _number(value)
        else:
            raise unknown(f"setting of {strategy} in --strategies", key, [*known, *keys])
    _check_flags(text, flags)
    return Way(text.strip(), strategy, settings, flags)


def parse_all(text: str) -> tuple[Way, ...]:
    ways = [parse(word) for word in text.split(",") if word.strip()]
    if not ways:
        raise UsageError("--strategies is empty: give for instance ring,ps:bsp,allreduce:ring")
    return tuple({way.label: way for way in ways}.values())


def _number(value: str) -> Any:
    return int(value) if value.isdigit() else value


def _check_flags(text: str, flags: dict[str, int | str]) -> None:
    wires = ("float32", "bfloat16", "float16", "int8")
    if flags.get("wire", "float32") not in wires:
        raise unknown("wire", str(flags["wire"]), wires)
    for key in ("staleness", "window", "laps", "microbatches"):
        value = flags.get(key, 1)
        if not isinstance(value, int) or value < (0 if key == "staleness" else 1):
            raise UsageError(f"{text}: {key}={value} must be a whole number")
    if flags.get("staleness", 0) not in (0, 1):
        raise UsageError(f"{text}: staleness={flags['staleness']} must be 0 or 1")
