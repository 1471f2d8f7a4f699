"""Compiled graphs that outlive a generation: who survives a loss has most of its layers again, and need not compile them."""

from __future__ import annotations

import msgspec

from ringtmp.model.portable_layer import Graph
from ringtmp.model.run_graph import Program
from ringtmp.model.sufficient_factors import Catching
from ringtmp.runtime import compute_device

#: What a program is made of: the graph, whether torch.compile has it, whether it catches factors, and where it runs.
_Key = tuple[bytes, bool, bool, str]


class Programs:
    """Of one process. They hold no weights."""

    def __init__(self) -> None:
        self._kept: dict[_Key, Program] = {}
        self._used: set[_Key] = set()
        self.made = 0  # so far

    def renew(self) -> None:
        """Another generation begins: what the one before did not use is let go."""
        self._kept = {key: each for key, each in self._kept.items() if key in self._used}
        self._used = set()

    def of(self, graph: Graph, compiled: bool = False, catch: bool = False) -> Program:
        """Layers with the same graph share one."""
        where = str(compute_device.here())
        key = msgspec.msgpack.encode(graph), compiled, catch, where
        if key not in self._kept:
            self._kept[key] = Program(graph, where, compiled, Catching() if catch else None)
            self.made += 1
        self._used.add(key)
        return self._kept[key]
