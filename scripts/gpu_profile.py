"""Where the time of a training step on a GPU goes: what it computed, when it was idle, and what Python did meanwhile."""

from __future__ import annotations

import collections
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

SAMPLE_S = 0.002
MOST_NAMES = 14
#: Calls in which the processor waits for the GPU, or may.
WAITS = ("Synchronize", "cudaMemcpyAsync", "cudaMalloc", "cudaHostAlloc")


class Watch:
    """Between `start` and `stop`: the GPU's own record, and every two milliseconds where this thread's Python is."""

    def start(self) -> Watch:
        self._cuda = torch.cuda.is_available()
        kinds = [torch.profiler.ProfilerActivity.CUDA if self._cuda else torch.profiler.ProfilerActivity.CPU]
        if self._cuda:
            torch.cuda.synchronize()
        self._profile: Any = torch.profiler.profile(activities=kinds)
        self._profile.start()
        self._own, self._done = threading.get_ident(), threading.Event()
        self._stacks: list[list[Any]] = []
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._began = time.perf_counter()
        self._sampler.start()
        return self

    def _sample(self) -> None:
        """Quickly: whoever takes names here holds up the thread that tells the GPU what to do."""
        while not self._done.wait(SAMPLE_S):
            frame, stack = sys._current_frames().get(self._own), []
            while frame is not None:
                stack.append(frame.f_code)
                frame = frame.f_back
            self._stacks.append(stack)

    def stop(self, steps: int) -> dict[str, Any]:
        if self._cuda:
            torch.cuda.synchronize()
        wall_s = time.perf_counter() - self._began
        self._done.set()
        self._sampler.join()
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        return {"wall_ms": round(wall_s * 1e3 / steps, 2), **self._of_gpu(events, steps), **self._of_python()}

    def _of_gpu(self, events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
        work = sorted(
            (each["ts"], each["ts"] + each["dur"], each["name"])
            for each in events
            if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in each
        )
        busy, until, gaps = 0.0, 0.0, []
        for begin, end, _ in work:
            if until and begin > until:
                gaps.append(begin - until)
            busy += max(0.0, end - max(begin, until))
            until = max(until, end)
        took: collections.Counter[str] = collections.Counter()
        often: collections.Counter[str] = collections.Counter()
        for begin, end, name in work:
            took[name[:70]] += end - begin
            often[name[:70]] += 1
        calls: collections.Counter[str] = collections.Counter()
        waited: collections.Counter[str] = collections.Counter()
        for each in events:
            if "cuda_" in str(each.get("cat")) and any(part in each["name"] for part in WAITS):
                calls[each["name"]] += 1
                waited[each["name"]] += each.get("dur", 0.0)
        return {
            "gpu_busy_ms": round(busy / steps / 1e3, 2),
            "kernels": len(work) // steps,
            "gaps_ms": round(sum(gaps) / steps / 1e3, 2),
            "gaps_over_20us": [len([each for each in gaps if each > 20]) // steps, round(max(gaps, default=0.0))],
            "waits": {name: [calls[name] / steps, round(waited[name] / steps / 1e3, 2)] for name in calls},
            "kernels_ms": {
                name: [round(time_us / steps / 1e3, 2), often[name] // steps]
                for name, time_us in took.most_common(MOST_NAMES)
            },
        }

    def _of_python(self) -> dict[str, Any]:
        seen, inside = collections.Counter[str](), collections.Counter[str]()
        for stack in self._stacks:
            names = [f"{Path(each.co_filename).stem}.{each.co_name}" for each in stack]
            seen.update(names[:1])
            inside.update(set(names))
        total = sum(seen.values()) or 1

        def shares(found: collections.Counter[str], most: int) -> dict[str, float]:
            return {name: round(count / total, 3) for name, count in found.most_common(most)}

        return {"python": shares(seen, MOST_NAMES), "python_inside": shares(inside, 45)}


def ring(asked: dict[str, Any]) -> None:
    """`ringtmp train` with these words, some steps of which are watched; what was found goes to standard error."""
    from ringtmp.cli import main
    from ringtmp.strategies.ring.master import Master

    plain, watches = Master.train_step, list[Watch]()

    def watched(self: Master, step: int, *given: Any, **named: Any) -> float:
        if step == asked["profiled"]:
            watches.append(Watch().start())
        if step == asked["profiled"] + asked["steps"]:
            print(json.dumps(watches.pop().stop(asked["steps"])), file=sys.stderr)
        return plain(self, step, *given, **named)

    Master.train_step = watched  # type: ignore[method-assign]
    sys.argv = ["ringtmp", *asked["words"]]
    main()
