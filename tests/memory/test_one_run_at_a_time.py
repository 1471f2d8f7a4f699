"""Two runs in one process would share torch's random generator: the second is refused, and the first keeps its bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringtmp import Result, Ring
from ringtmp.errors import UsageError

INPUTS = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
DATA = (INPUTS, INPUTS[:, :3].argmax(1))


def fit(run: Path, **more: Any) -> Result:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    return Ring(nodes=1, progress=False).fit(model, DATA, steps=3, batch_size=8, run_dir=run, **more)


def in_another_thread(call: Callable[[], Any]) -> Any:
    """What it returns, or raises."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_a_second_run_in_another_thread_is_refused_and_the_first_keeps_its_bits(tmp_path: Path) -> None:
    alone = fit(tmp_path / "alone").summary.weights_sha256
    said: list[Any] = []

    def meanwhile(step: int, loss: float) -> None:
        ring = Ring(nodes=1, progress=False)
        said.append(in_another_thread(lambda: fit(tmp_path / "second")))
        said.append(in_another_thread(lambda: ring.resume(tmp_path / "alone", DATA, steps=4)))
        said.append(in_another_thread(lambda: ring.evaluate(tmp_path / "alone", DATA)))
        said.append(in_another_thread(lambda: ring.predict(tmp_path / "alone", INPUTS)))

    assert fit(tmp_path / "first", on_step=meanwhile).summary.weights_sha256 == alone
    assert len(said) == 12
    for each in said:
        assert isinstance(each, UsageError)
        assert "another run is under way in this process" in str(each)
    assert not (tmp_path / "second").exists()
    assert in_another_thread(lambda: fit(tmp_path / "second")).summary.weights_sha256 == alone


def test_who_looks_on_may_predict_between_two_steps(tmp_path: Path) -> None:
    alone = fit(tmp_path / "alone").summary.weights_sha256
    seen: list[Any] = []

    def look(step: int, loss: float) -> None:
        seen.append(Ring(nodes=1, progress=False).predict(tmp_path / "alone", INPUTS))

    assert fit(tmp_path / "first", on_step=look).summary.weights_sha256 == alone
    assert len(seen) == 3
