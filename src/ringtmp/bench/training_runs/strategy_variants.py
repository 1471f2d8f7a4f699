"""A way to train, named as everywhere (strategies/registry.py): `ring:staleness=1`, `ps:ssp:3`, `ps:bsp:servers=workers`.

Pure. Whether a way can run on so many nodes is asked of the strategies themselves.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ringtmp.bench.analysis.intervals import Centre
from ringtmp.errors import UsageError
from ringtmp.plan.exchange_bounds import Exchange
from ringtmp.strategies import registry
from ringtmp.strategies.base import Roles, Sizes, Strategy, Traffic
from ringtmp.wire.formats import PLAIN, wire_format

#: Who is compared: the ring, and the parameter server it wants to beat, at its plainest.
RING, SERVER, PLAIN_SERVER = "ring", "ps", "ps:bsp"


class Way(msgspec.Struct, frozen=True):
    label: str
    strategy: str
    settings: dict[str, int | str] = {}  # of the strategy
    flags: dict[str, int | str] = {}  # of `ringtmp train`

    @property
    def wire(self) -> str:
        return str(self.flags.get("wire", PLAIN.name))

    @property
    def staleness(self) -> int:
        return int(self.flags.get("staleness", 0))

    @property
    def delayed(self) -> bool:
        """Gradients may be of older weights than those they change."""
        return self.staleness > 0 or self._value.delayed(self._read)

    @property
    def centre(self) -> Centre:
        """Asynchronous servers, and steps that overlap, end in bursts."""
        return "mean" if self.delayed else "median"

    @property
    def like_one_process(self) -> bool:
        """The same weights as one process, to rounding: then what one process learns, it learns."""
        learns_alike = self._value.exactness(self._read) != "steps" and not self.full_batch
        return learns_alike and not self.delayed and wire_format(self.wire).exact

    @property
    def full_batch(self) -> bool:
        """A step of it is of the whole data, and it finds its own step sizes."""
        return self._value.full_batch

    def same(self, other: Way) -> bool:
        """Whatever either is called: what is not said of a setting is its default."""
        return (self.strategy, self.flags) == (other.strategy, other.flags) and self._read == other._read

    def words(self) -> list[str]:
        found = ["--strategy", self.strategy]
        for key, value in self.settings.items():
            found += ["--with", f"{key}={value}"]
        for key, value in self.flags.items():
            if key != "microbatches":
                found += [f"--{key.replace('_', '-')}", str(value)]
        return found

    @property
    def splits_layers(self) -> bool:
        return self._value.splits_layers

    def roles(self, nodes: int) -> Roles:
        return self._value.roles(self._read, nodes)

    @property
    def _value(self) -> Strategy:
        return registry.get(self.strategy)

    @property
    def _read(self) -> Any:
        return self._value.read(self.settings)

    def traffic(self, sizes: Sizes, nodes: int) -> Traffic:
        return self._value.traffic(self._read, sizes, nodes)

    def exchange(self, nodes: int) -> Exchange | None:
        """How it exchanges the model; None: it sends something else."""
        return self.traffic(Sizes(1.0, (1.0,) * nodes, 1.0), nodes).exchange

    def workers(self, nodes: int) -> int:
        return len(self.roles(nodes).workers)

    def servers(self, nodes: int) -> tuple[int, ...]:
        """Dedicated ones."""
        who = self.roles(nodes)
        return tuple(node for node in who.servers if node not in who.workers)

    def microbatches(self, nodes: int, batch_size: int, pipeline: int) -> int | Literal["auto"]:
        """A pipeline takes what suits the work, data parallelism one per worker. `auto`: what its plan chooses."""
        asked = self.flags.get("microbatches")
        if asked is not None:
            return "auto" if asked == "auto" else min(int(asked), batch_size)
        return min(pipeline if self.splits_layers else self.workers(nodes), batch_size)

    def refusal(self, nodes: int, layers: int, batches: bool = False) -> str | None:
        """Why it cannot run on so many nodes, in the strategy's own words; None if it can. `batches`: a step has to be of a
        part of the data."""
        if self.full_batch and batches:
            return f"strategy {self.strategy} takes the whole data in every step: there are no batches of a size given here"
        if nodes == 1:
            return None
        try:
            self._value.refuse_wire(self.wire)
        except UsageError as error:
            return str(error)
        if self.splits_layers:
            laps = int(self.flags.get("laps", 1))
            least = nodes * laps + 1
            return None if layers >= least else f"a ring of {nodes} needs {least} layers, and the model has {layers}"
        try:
            self._read.check(nodes, self.wire)
        except UsageError as error:
            return str(error)
        return None


def parse(text: str) -> Way:
    choice = registry.parse(text)
    _check_flags(text, choice.run)
    return Way(text.strip(), choice.name, choice.settings, choice.run)


def parse_all(text: str) -> tuple[Way, ...]:
    ways = [parse(word) for word in text.split(",") if word.strip()]
    if not ways:
        raise UsageError("--strategies is empty: give for instance ring,ps:bsp,allreduce:ring")
    return tuple({way.label: way for way in ways}.values())


def _check_flags(text: str, flags: dict[str, int | str]) -> None:
    wire_format(str(flags.get("wire", PLAIN.name)))
    for key in ("staleness", "window", "laps", "microbatches"):
        value = flags.get(key, 1)
        if (key, value) == ("microbatches", "auto"):
            continue
        if not isinstance(value, int) or value < (0 if key == "staleness" else 1):
            raise UsageError(f"{text}: {key}={value} must be a whole number")
    if flags.get("staleness", 0) not in (0, 1):
        raise UsageError(f"{text}: staleness={flags['staleness']} must be 0 or 1")
