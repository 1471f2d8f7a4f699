"""Every sample predicted before it is learned: the error over time in summary and report, with the bits of a run that does not
predict; and lines of a stream that are no samples, left out as asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ringtmp import api
from ringtmp.config import KeepPart
from ringtmp.data.standard_input import standard_input
from ringtmp.data.tables_and_streams import from_python
from ringtmp.errors import UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from ringtmp.metrics.events import StepDone
from ringtmp.metrics.test_then_train_error import in_stretches, predicted
from ringtmp.report.run_page import page
from ringtmp.report.run_timeline import gather
from test_healing import STEPS, Death, Mortal, run
from test_training_loop import blobs, stack


def batches(count: int = STEPS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    inputs, labels = blobs(16 * count)
    return iter([(inputs[at : at + 16], labels[at : at + 16]) for at in range(0, 16 * count, 16)])


def trained(folder: Path, pool: InMemoryPool, **keep: object) -> api.Result:
    part = KeepPart(checkpoint_every=4, **keep)  # type: ignore[arg-type]
    return run(folder, pool, part, (from_python(batches()), None))


def test_what_is_predicted_was_not_learned_and_changes_no_bit(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", InMemoryPool(3)).summary
    found = trained(tmp_path / "tested", InMemoryPool(3), test_then_train=True)
    summary = found.summary
    assert plain.predicted is None
    assert summary.weights_sha256 == plain.weights_sha256 is not None
    assert summary.predicted is not None
    assert summary.predicted.samples == 16 * STEPS
    (first, *_, last) = summary.predicted.over_time
    assert first.accuracy is not None
    assert last.accuracy is not None
    assert first.accuracy < 0.7 < last.accuracy
    assert sum(each.samples for each in summary.predicted.over_time) == 16 * STEPS
    drawn = gather(events.read(found.run_dir / "events.jsonl"), str(found.run_dir))
    assert drawn is not None
    names = {figure.name for section in page(drawn).sections for figure in section.figures}
    assert {"predicted-loss", "predicted-error"} <= names


def test_the_first_batch_is_predicted_with_the_first_weights(tmp_path: Path) -> None:
    found = trained(tmp_path / "run", InMemoryPool(2), test_then_train=True)
    step = found.history.steps[0]
    inputs, labels = next(batches())
    with torch.no_grad():
        outputs = stack().eval()(inputs)
    by_hand = torch.nn.functional.cross_entropy(outputs, labels)
    (first, *_) = [each for part in found._parts for each in part.steps]
    assert first.predicted_loss == pytest.approx(float(by_hand), rel=1e-5)
    assert first.predicted_accuracy == pytest.approx(float((outputs.argmax(1) == labels).float().mean()))
    assert first.predicted_loss != step.loss  # dropout and the batch's own statistics are of training alone


def test_a_step_done_again_after_a_loss_counts_once(tmp_path: Path) -> None:
    calm = trained(tmp_path / "calm", InMemoryPool(3), test_then_train=True).summary
    lossy = trained(tmp_path / "lossy", Mortal(3, Death(1, 7)), test_then_train=True).summary
    assert lossy.recoveries
    assert lossy.predicted == calm.predicted
    assert lossy.weights_sha256 == calm.weights_sha256


def test_stretches_are_means_over_samples() -> None:
    steps = [
        StepDone(0.0, at, 0, 1.0, lr=0.1, samples=size, wall_s=1.0, predicted_loss=loss, predicted_accuracy=right)
        for at, (size, loss, right) in enumerate([(4, 2.0, 0.0), (12, 1.0, 1.0), (8, 0.5, 0.5)])
    ]
    found = predicted(steps)
    assert found is not None
    assert (found.samples, found.loss, found.accuracy) == (24, pytest.approx(1.0), pytest.approx(16 / 24))
    assert [each.last_step for each in found.over_time] == [1, 2, 3]
    (whole,) = in_stretches(steps, 1)
    assert whole.loss == pytest.approx(1.0)


# -- lines that are no samples ------------------------------------------------------------------------------------------


def line(number: int) -> bytes:
    inputs, labels = blobs(200)
    return json.dumps({"inputs": inputs[number].tolist(), "targets": int(labels[number])}).encode() + b"\n"


GOOD = [line(number) for number in range(64)]
BAD = [
    b"not json\n",
    b'{"inputs": [1, 2]}\n',
    b'{"inputs": [1.0], "targets": 0}\n',
    b"[\n",
    b'{"inputs": [], "targets": {}}\n',
]


def test_bad_lines_are_counted_said_and_left_out_as_asked(tmp_path: Path) -> None:
    class Heard(api.Watcher):
        def __init__(self) -> None:
            self.warnings: list[str] = []

        def warn(self, text: str) -> None:
            self.warnings.append(text)

    mixed = GOOD[:20] + BAD[:1] + GOOD[20:40] + BAD[1:] + GOOD[40:]
    heard = Heard()
    whole = run(tmp_path / "good", InMemoryPool(2), None, (standard_input(16, GOOD), None))
    found = run(tmp_path / "mixed", InMemoryPool(2), None, (standard_input(16, mixed, "skip"), None), watcher=heard)
    assert found.summary.weights_sha256 == whole.summary.weights_sha256 is not None
    assert (found.summary.bad_lines, whole.summary.bad_lines) == (len(BAD), 0)
    assert [each for each in heard.warnings if "line 21 is no sample" in each and "left out" in each]
    assert found.summary.exactness == "stream"


def test_a_stream_of_bad_lines_alone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="data - is empty"):
        standard_input(4, BAD[:2] + BAD[3:], "skip")
    monkeypatch.setattr("ringtmp.data.standard_input.MOST_BAD_IN_A_ROW", 5)
    with pytest.raises(UsageError, match="the last 5 lines were no samples: data -: line 5 is no sample"):
        standard_input(4, [b"x\n"] * 100, "skip")


def test_a_line_of_another_shape_is_told_across_batches() -> None:
    stream = standard_input(2, [*GOOD[:4], BAD[2], *GOOD[4:6]])
    assert stream.next() is not None
    assert stream.next() is not None
    with pytest.raises(UsageError, match=r"line 5 has inputs of shape \(1,\) .* the lines before \(6,\)"):
        stream.next()
