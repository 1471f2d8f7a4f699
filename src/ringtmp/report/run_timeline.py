"""A run as its page tells it: all its parts on one time line."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import msgspec

from ringtmp.metrics.events import Evaluated, Event, NodeStep, RunStarted, StepDone
from ringtmp.metrics.fold_events import Part, parts_of
from ringtmp.metrics.summary import NodeSummary, Summary, nodes_by_part, of_parts


class Run(msgspec.Struct, frozen=True):
    """What a run left, sorted. Steps are without those that were done again."""

    summary: Summary
    parts: tuple[Part, ...]
    nodes: tuple[dict[int, NodeSummary], ...]  # of each part

    @property
    def started(self) -> RunStarted:
        """The last start: what the run is now."""
        return self.parts[-1].started

    @property
    def steps(self) -> list[StepDone]:
        return [each for part in self.parts for each in part.steps]

    @property
    def evaluations(self) -> list[Evaluated]:
        return [each for part in self.parts for each in part.evaluations]

    @property
    def node_steps(self) -> list[NodeStep]:
        return [
            each for part, nodes in zip(self.parts, self.nodes, strict=True)
            for node in nodes for each in part.node_steps.get(node, ())
        ]  # fmt: skip

    @property
    def began_s(self) -> float:
        """When the first step began, in seconds of the run."""
        first = next((part for part in self.parts if part.every_step), None)
        return first.run_s(first.every_step[0].at - first.every_step[0].wall_s) if first else 0.0

    @property
    def resumed(self) -> list[tuple[Part, str]]:
        """Every part but the first, with a word on how it began."""
        return [
            (
                part,
                f"resumed after step {part.first_step}" + (f", {before.lost_steps} lost" if before.lost_steps else ""),
            )
            for before, part in pairwise(self.parts)
        ]


def gather(stream: Iterable[Event], run_dir: str) -> Run | None:
    """None when nothing was started."""
    parts = parts_of(stream)
    return Run(of_parts(parts, run_dir), parts, tuple(nodes_by_part(parts))) if parts else None
