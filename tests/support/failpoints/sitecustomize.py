"""Kills the process it is loaded into at a named point. Python loads it by itself wherever this folder is on the path,
so nothing in the product knows of it.

FAILPOINTS names the points (`points.py`), separated by '|'; FAILPOINT_MARKS is a folder in which each leaves a file with
the time, so that it happens once in a run, however many processes it takes. With FAILPOINT_NEXT, a file, only the point whose
name is in there counts, from the moment it is.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import os
import signal
import sys
import time
from types import ModuleType
from typing import Any


class Arming:
    """Wraps the methods of every point as soon as their modules are loaded."""

    def __init__(self, named: list[str], marks: str) -> None:
        sys.path.insert(0, os.path.dirname(__file__))
        points = importlib.import_module("points")
        sys.path.pop(0)
        healing = {name: point for name, (_, point) in points.WHILE_HEALING.items()}
        known = {**points.ONCE, **healing, **points.MASTERS, **points.MEMBERS}
        self._marks = marks
        self._next = os.environ.get("FAILPOINT_NEXT")
        self._points = {name: known[name] for name in named}
        self._home, self._kind = points.ENDPOINT.split(":")  # of the endpoint: one name for it, which a test looks at
        self._endpoint: Any = None  # of the node that lives in this process

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        short = name.removeprefix("ringtmp.")
        armed = [each for each in self._points if self._points[each].what.split(":")[0] == short]
        if not name.startswith("ringtmp.") or not (armed or short == self._home):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def loaded(module: ModuleType) -> None:
            load(module)
            if short == self._home:
                self._remember(getattr(module, self._kind))
            for each in armed:
                self._arm(module, each)

        loader.exec_module = loaded
        return spec

    def _remember(self, endpoint: Any) -> None:
        begin = endpoint.__init__

        @functools.wraps(begin)
        def begun(this: Any, *args: Any, **options: Any) -> None:
            begin(this, *args, **options)
            self._endpoint = this

        endpoint.__init__ = begun

    def _arm(self, module: ModuleType, name: str) -> None:
        point = self._points[name]
        kind, method = point.what.split(":")[1].split(".")
        owner = getattr(module, kind)
        work = getattr(owner, method)
        seen = 0

        @functools.wraps(work)
        def watched(*args: Any, **options: Any) -> Any:
            nonlocal seen
            here = self._endpoint
            counts = here is not None and here.node == point.node and here.generation >= point.generation
            if counts and self._is_next(name) and point.only(*args):
                seen += 1
            else:
                counts = False
            if counts and seen == point.times and point.when == "before":
                self._die(name)
            result = work(*args, **options)
            if counts and seen == point.times and point.when == "after":
                self._die(name)
            return result

        setattr(owner, method, watched)

    def _is_next(self, name: str) -> bool:
        if self._next is None:
            return True
        try:
            with open(self._next) as told:
                return told.read() == name
        except FileNotFoundError:
            return False

    def _die(self, name: str) -> None:
        try:
            mark = os.open(os.path.join(self._marks, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return  # another process died of it already
        os.write(mark, str(time.monotonic()).encode())
        os.kill(os.getpid(), signal.SIGKILL)


if "FAILPOINTS" in os.environ:
    sys.meta_path.insert(0, Arming(os.environ["FAILPOINTS"].split("|"), os.environ["FAILPOINT_MARKS"]))
