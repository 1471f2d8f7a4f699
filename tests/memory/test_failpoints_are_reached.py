"""Every failpoint names something a run does, so that no rename leaves the kills of `make long` without effect.

A whole ring runs in this process, on the in-memory transport, and heals once; calls are counted at every point. That a
real process dies at its point is shown in test_killed_at_named_moments.
"""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from failpoints.points import CUTS, MASTERS, ONCE, WHILE_HEALING, Point
from ringtmp.config import KeepPart
from test_healing import Death, Mortal, run

POINTS = {**ONCE, **{name: point for name, (_, point) in WHILE_HEALING.items()}, **MASTERS}


def owner_of(what: str) -> tuple[Any, str]:
    """The class a point names, and its method."""
    module, path = what.split(":")
    kind, method = path.split(".")
    return getattr(importlib.import_module(f"ringtmp.{module}"), kind), method


def watch(point: Point, name: str, came_by: Counter[str], patch: pytest.MonkeyPatch) -> None:
    """Count the calls that a process armed with this point would count, whichever node they are of."""
    owner, method = owner_of(point.what)
    work = getattr(owner, method)

    @functools.wraps(work)
    def watched(*args: Any, **options: Any) -> Any:
        came_by[name] += bool(point.only(*args))
        return work(*args, **options)

    patch.setattr(owner, method, watched)


def test_a_ring_that_heals_comes_by_every_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    came_by: Counter[str] = Counter()
    for name, point in POINTS.items():
        watch(point, name, came_by, monkeypatch)
    hit = run(tmp_path / "hit", Mortal(3, Death(2, 7, 4)), KeepPart(), cuts=CUTS, clip_norm=1.0)
    assert [each.source for each in hit.summary.recoveries] == ["snapshot"]
    assert not [name for name in POINTS if not came_by[name]], "nobody would ever be killed there"
