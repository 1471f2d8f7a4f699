"""A whole run on the in-memory transport: build, train, keep, resume, evaluate, predict, trace."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from oracle import plain_loop, state_sha256
from ringtmp import Ring, api
from ringtmp.api import Watcher, start
from ringtmp.config import KeepPart, ModelPart, RingPart, RunConfig, TrainingPart
from ringtmp.data.batches import TrainingBatches
from ringtmp.data.tables_and_streams import tensors
from ringtmp.errors import CheckpointError, Interrupted, LossNotFinite, UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from ringtmp.metrics.trace import chrome_trace
from ringtmp.plan.route import plain_ring
from ringtmp.run.check_settings import resolve
from ringtmp.run.interruption import Interruption
from ringtmp.run.session import Session
from ringtmp.run.what_to_train import Job
from ringtmp.runtime.losses import cross_entropy, loss_named
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.runtime.run_directory import RunDirectory
from ringtmp.strategies.ring.node import Node
from ringtmp.transport.faults import Tapped
from ringtmp.transport.in_process import Hub
from ringtmp.wire.messages import Activations, Recipe, Setup


def blobs(size: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    labels = torch.arange(size) % 3
    return torch.randn(size, 6, generator=generator) + 3 * nn.functional.one_hot(labels, 6), labels


def stack() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3)
    )


def settings(nodes: int = 3, schedule: Any = "1f1b", **training: Any) -> RunConfig:
    base = {"batch_size": 16, "microbatches": 4, "optimizer": "adamw", "optimizer_settings": {"lr": 0.01}}
    return RunConfig(
        training=TrainingPart(data="given", **{**base, **training}),
        ring=RingPart(nodes=nodes, schedule=schedule),
        keep=KeepPart(checkpoint_every=3),
    )


def train(
    folder: Path, nodes: int = 3, watcher: Any = None, data: Any = None, model: Any = None, **training: Any
) -> api.Result:
    inputs, labels = blobs()
    data = data or (tensors("t", inputs, labels), tensors("t", *blobs(30)))
    config, watcher = settings(nodes, **training), watcher or Watcher()
    return start(config, model or stack(), data, None, run_dir=folder, watcher=watcher, pool=InMemoryPool(nodes))


def resume(folder: Path, nodes: int, **changes: Any) -> api.Result:
    data = (tensors("t", *blobs()), tensors("t", *blobs(30)))
    return api.resume(folder, {"nodes": nodes, **changes}, data, None, watcher=Watcher(), pool=InMemoryPool(nodes))


def test_a_run_equals_a_plain_loop_and_its_model_loads_in_plain_pytorch(tmp_path: Path) -> None:
    result = train(tmp_path / "run", steps=7, clip_norm=0.5, lr_schedule={"kind": "step", "every": 3, "factor": 0.5})
    plain = stack()
    source = TrainingBatches(tensors("t", *blobs()), 16, 4, 0)
    batches = []
    for step in range(7):
        batch = source.batch(step)
        assert batch is not None
        batches.append((torch.cat(list(batch.inputs)), torch.cat(list(batch.targets))))
    plain_loop(
        plain, batches, 4, cross_entropy, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True), 0, 0.5,
        {"kind": "step", "every": 3, "factor": 0.5, "warmup": 0},
    )  # fmt: skip
    assert result.summary.weights_sha256 == state_sha256(plain)
    assert result.summary.checked == "model"  # it is a module, and small
    newest = sorted((result.run_dir / "checkpoints").glob("step-*"))[-1]
    loaded: dict[str, torch.Tensor] = {}
    for file in sorted(newest.glob("weights-*.safetensors")):
        loaded.update(load_file(file))
    other = stack()
    other.load_state_dict(loaded)
    assert state_sha256(other) == result.summary.weights_sha256
    assert isinstance(result.model[3], nn.BatchNorm1d)  # type: ignore[index]
    assert state_sha256(result.model) == result.summary.weights_sha256
    revived = api.Result(result.run_dir).model.eval()
    x = blobs()[0]
    assert revived(x).equal(result.model.eval()(x))


def test_resuming_at_another_node_count_gives_the_bits_of_a_run_never_stopped(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 2, steps=11, lr_schedule={"kind": "cosine", "total": 11})
    train(tmp_path / "parts", 3, steps=4, lr_schedule={"kind": "cosine", "total": 11})
    resume(tmp_path / "parts", 1, steps=8)
    last = resume(tmp_path / "parts", 4, steps=11)
    assert last.summary.weights_sha256 == whole.summary.weights_sha256
    assert last.summary.steps == 11


def test_an_interrupted_run_saves_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 3, epochs=3)
    run = RunDirectory(tmp_path / "run")
    interruption = Interruption()

    class PullsThePlug(Watcher):
        def step(self, done: int, total: int | None, event: events.StepDone, idle: float) -> None:
            if done == 5:
                assert interruption.armed
                interruption.asked = True

    data = tensors("t", *blobs()), tensors("t", *blobs(30))
    job = Job(resolve(settings(3, epochs=3)), stack(), *data, cross_entropy, "cross_entropy", run)
    with pytest.raises(Interrupted, match="after step 5; the checkpoint is saved: resume with"):
        Session(job, InMemoryPool(3), PullsThePlug(), interruption).train()
    assert resume(tmp_path / "run", 2).summary.weights_sha256 == whole.summary.weights_sha256


@pytest.mark.parametrize("damage", ["flip", "missing", "manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    whole = train(tmp_path / "whole", steps=9)
    train(tmp_path / "run", steps=6)
    newest = sorted((tmp_path / "run/checkpoints").glob("step-*"))[-1]
    victim = newest / ("manifest.json" if damage == "manifest" else "weights-0002.safetensors")
    if damage == "missing":
        victim.unlink()
    else:
        content = bytearray(victim.read_bytes())
        content[-1 if damage == "flip" else 0] ^= 1
        victim.write_bytes(bytes(content))
    said: list[str] = []

    class Listener(Watcher):
        def warn(self, text: str) -> None:
            said.append(text)

    data = tensors("t", *blobs()), tensors("t", *blobs(30))
    result = api.resume(
        tmp_path / "run", {"steps": 9, "nodes": 2}, data, None, watcher=Listener(), pool=InMemoryPool(2)
    )
    assert "step-00000006" in said[0]
    assert "going back to step 3" in said[0]
    assert result.summary.weights_sha256 == whole.summary.weights_sha256


@pytest.mark.parametrize("what", ["copied", "removed"])
def test_a_run_reports_the_digest_of_its_own_last_step_whatever_is_done_to_its_checkpoints(
    tmp_path: Path, what: str
) -> None:
    class Meddles(Watcher):
        def step(self, done: int, total: int | None, event: events.StepDone, idle: float) -> None:
            kept = tmp_path / "run/checkpoints"
            if done == 4 and what == "copied":
                shutil.copytree(kept / "step-00000003", kept / "step-best")

        def phase(self, text: str) -> None:
            if text == "saving" and what == "removed":  # the sixth step's is there already
                shutil.rmtree(tmp_path / "run/checkpoints")

    hit = train(tmp_path / "run", watcher=Meddles(), steps=6)
    assert hit.summary.weights_sha256 == train(tmp_path / "whole", steps=6).summary.weights_sha256
    assert state_sha256(hit.model) == hit.summary.weights_sha256


def test_two_checkpoints_are_kept(tmp_path: Path) -> None:
    train(tmp_path / "run", steps=10)
    kept = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert kept == ["step-00000009", "step-00000010"]


def test_no_checkpoint_at_all_is_an_error_that_says_so(tmp_path: Path) -> None:
    train(tmp_path / "run", steps=3)
    for path in (tmp_path / "run/checkpoints").glob("*/manifest.json"):
        path.unlink()
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        resume(tmp_path / "run", 2, steps=5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch_size": 8}, "cannot change --batch-size .it is 16"),
        ({"seed": 3}, "cannot change --seed"),
        ({"optimizer": "sgd"}, "cannot change --optimizer"),
        ({"microbatches": 2}, "cannot change --microbatches"),
    ],
)
def test_resuming_refuses_what_would_change_the_bits(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    train(tmp_path / "run", steps=1)
    with pytest.raises(UsageError, match=says):
        resume(tmp_path / "run", 2, steps=2, **change)


def test_a_second_process_is_kept_out_of_a_run(tmp_path: Path) -> None:
    train(tmp_path / "run", steps=1)
    holder = RunDirectory(tmp_path / "run")
    holder.lock()
    try:
        with pytest.raises(UsageError, match="is in use by process"):
            resume(tmp_path / "run", 2, steps=2)
    finally:
        holder.unlock()
    assert resume(tmp_path / "run", 2, steps=2).summary.steps == 2


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    train(tmp_path / "run", steps=1)
    with pytest.raises(UsageError, match="already holds a run"):
        train(tmp_path / "run", steps=1)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_step_and_node(tmp_path: Path) -> None:
    class Explodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return x * self.scale / (18 - self.seen).clamp(min=0)  # infinite in the 18th microbatch

    model = nn.Sequential(nn.Linear(6, 16), Explodes(), nn.Linear(16, 16), nn.Linear(16, 3))
    with pytest.raises(LossNotFinite, match=r"in step 4, first in what node 1 computed \(layers 1 to 1\)"):
        train(tmp_path / "run", 3, model=model, steps=20)
    kept = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert kept == ["step-00000000", "step-00000003"]


def test_a_loss_that_is_not_finite_at_once_is_no_matter_of_the_learning_rate(tmp_path: Path) -> None:
    model = stack()
    nn.init.constant_(next(model.parameters()), float("nan"))  # as a damaged file of weights may have it
    with pytest.raises(LossNotFinite, match=r"nan in step 0.*no update has been made yet, so look .* weights that"):
        Ring(nodes=1, progress=False).fit(
            model, blobs(), steps=2, batch_size=16, microbatches=4, run_dir=tmp_path / "run"
        )


def test_training_stops_early_when_the_test_loss_no_longer_improves(tmp_path: Path) -> None:
    result = train(tmp_path / "run", epochs=50, early_stop=2, optimizer="sgd", optimizer_settings={"lr": 1e-12})
    assert result.summary.outcome == "stopped early"
    assert result.summary.steps < 50 * 4


def test_streams_loaders_and_callables_train(tmp_path: Path) -> None:
    inputs, labels = blobs()

    def endless() -> Iterator[Any]:
        while True:
            yield inputs[:16], labels[:16]

    own = lambda outputs, targets: nn.functional.cross_entropy(outputs, targets) * 2  # noqa: E731
    first = Ring(nodes=1).fit(stack(), endless(), loss=own, steps=5, run_dir=tmp_path / "a")
    assert (first.summary.steps, first.summary.accuracy) == (5, None)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=16)
    with pytest.raises(UsageError, match="12 samples, so its smallest microbatch has 1, but a BatchNorm needs 2"):
        Ring(nodes=1).fit(stack(), loader, epochs=2, run_dir=tmp_path / "x")
    second = Ring(nodes=1).fit(stack(), loader, epochs=2, microbatches=4, run_dir=tmp_path / "b")
    assert second.summary.steps == 8
    third = Ring(nodes=1).fit((layer for layer in stack()), (inputs, labels), epochs=1, run_dir=tmp_path / "c")
    assert third.model(inputs).shape == (60, 3)


def test_evaluation_and_prediction_do_not_depend_on_the_ring(tmp_path: Path) -> None:
    result = train(tmp_path / "run", epochs=4)
    inputs, labels = blobs(30)
    model = result.model.eval()
    with torch.no_grad():
        expected = model(inputs)
    score = api.evaluate(tmp_path / "run", (inputs, labels), 1)
    assert score["accuracy"] == pytest.approx(float((expected.argmax(1) == labels).float().mean()))
    assert score["loss"] == pytest.approx(float(loss_named("cross_entropy")(expected, labels)), rel=1e-5)
    assert score["accuracy"] == pytest.approx(result.summary.accuracy)
    assert torch.allclose(api.predict(tmp_path / "run", inputs, 1), expected, atol=1e-5)


def test_neither_inputs_nor_labels_nor_logit_gradients_leave_the_master(tmp_path: Path) -> None:
    """Listens to every packet of a run, placement included."""
    heard: list[bytes] = []

    def listen(sender: int, receiver: int, channel: Any, frames: Any) -> None:
        heard.append(b"".join(bytes(frame) for frame in frames))

    inputs, labels = blobs()
    labels = labels + 1_000_003 * (torch.arange(60) % 2)  # a label's eight bytes, found nowhere by chance
    secrets: list[bytes] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs.retain_grad() if outputs.requires_grad else None
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: secrets.extend(row.numpy().tobytes() for row in gradient))
        return nn.functional.cross_entropy(outputs, targets % 3)

    data = tensors("t", inputs, labels)
    pool = InMemoryPool(3, wrap=lambda transport: Tapped(transport, listen))
    start(settings(3, steps=8), stack(), (data, None), loss, run_dir=tmp_path / "run", watcher=Watcher(), pool=pool)
    assert len(secrets) >= 8 * 12
    secrets += [row.numpy().tobytes() for row in inputs]
    secrets += [label.numpy().tobytes() for label in labels[1::2]]
    everything = b"\0".join(heard)
    assert len(everything) > 10_000, "nothing was heard"
    assert not [secret for secret in secrets if secret in everything]


def test_a_loss_only_tail_is_possible_and_warned_of(tmp_path: Path) -> None:
    said: list[str] = []

    class Listener(Watcher):
        def warn(self, text: str) -> None:
            said.append(text)

    config = RunConfig(
        training=settings(steps=3).training, ring=RingPart(nodes=2, cuts="0-1,2-5,-"), keep=KeepPart(checkpoint_every=3)
    )
    data = (tensors("t", *blobs()), None)
    result = start(config, stack(), data, None, run_dir=tmp_path / "run", watcher=Listener(), pool=InMemoryPool(2))
    assert "labels, leave the master" in said[0]
    assert result.summary.weights_sha256 == train(tmp_path / "other", 1, steps=3).summary.weights_sha256


def test_events_account_for_all_of_a_nodes_time_and_bytes(tmp_path: Path) -> None:
    result = train(tmp_path / "run", 3, steps=6)
    summary = result.summary
    steps = [event for event in events.read(tmp_path / "run/events.jsonl") if isinstance(event, events.NodeStep)]
    assert len(steps) == 3 * 6
    for event in steps:
        assert event.busy_s + event.idle_s == pytest.approx(event.end - event.start, abs=1e-6)
        assert sum(event.idle.values()) == pytest.approx(event.idle_s, abs=1e-9)
    # 16, 16, 16, 12 samples an epoch; every cut of this model is 16 values wide, forward and back
    samples = 16 + 16 + 16 + 12 + 16 + 16
    assert summary.bytes_total == 2 * 3 * 16 * 4 * samples
    assert summary.placement_bytes > 0
    assert [node.role for node in summary.per_node] == ["master", "worker", "worker"]
    assert sum(node.params for node in summary.per_node) == sum(p.numel() for p in stack().parameters())


def test_a_trace_has_lanes_in_which_nothing_overlaps(tmp_path: Path) -> None:
    train(tmp_path / "run", 3, steps=4)
    rows = chrome_trace(events.read(tmp_path / "run/events.jsonl"))["traceEvents"]
    spans = [row for row in rows if row["ph"] == "X"]
    assert {row["cat"] for row in spans} == {"compute", "send", "receive"}
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for row in spans:
        lanes.setdefault((row["pid"], row["tid"]), []).append((row["ts"], row["ts"] + row["dur"]))
    for lane in lanes.values():
        for (_, end), (begin, _) in zip(sorted(lane), sorted(lane)[1:], strict=False):
            assert begin >= end - 1e-3
    json.dumps(rows)


def test_the_config_of_a_run_is_complete(tmp_path: Path) -> None:
    train(tmp_path / "run", steps=1)
    saved = RunDirectory(tmp_path / "run").read_config().config
    assert saved.training.microbatches == 4
    assert saved.training.lr_schedule == {"kind": "constant", "warmup": 0}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"loss": "cross_entropi"}, "did you mean 'cross_entropy'"),
        ({"optimizer": "adm"}, "did you mean 'adam'"),
        ({"optimizer_settings": {"momentums": 1}}, "unknown setting of adamw"),
        ({"optimizer_settings": {"lr": -1}}, "lr=-1"),
        ({"lr_schedule": {"kind": "cosin"}}, "did you mean 'cosine'"),
        ({"lr_schedule": {"kind": "step"}}, "needs every=N"),
        ({"steps": 0}, "--steps 0 must be at least 1"),
        ({"steps": 3, "epochs": 3}, "not both"),
        ({"clip_norm": -1.0}, "--clip-norm -1.0"),
        ({"batch_size": 100}, "batch size 100 is larger than the 60"),
        ({"wire": "int7"}, "unknown wire"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        train(tmp_path / "run", **change)
    assert not (tmp_path / "run").exists()


def test_labels_beyond_the_models_outputs_are_refused(tmp_path: Path) -> None:
    inputs, labels = blobs()
    data = tensors("t", inputs, labels + 1), None
    with pytest.raises(UsageError, match="has label 3, and the model has 3 outputs"):
        train(tmp_path / "run", data=data, steps=1)
    assert not (tmp_path / "run").exists()


def test_a_model_by_name_follows_the_data(tmp_path: Path) -> None:
    config = RunConfig(ModelPart("mlp", {"width": 8, "depth": 2}), TrainingPart(steps=2), RingPart(nodes=2))
    result = start(config, None, None, None, run_dir=tmp_path / "run", watcher=Watcher(), pool=InMemoryPool(2))
    assert next(tuple(p.shape) for p in result.model.parameters()) == (8, 64)
    with pytest.raises(UsageError, match="unknown setting of mlp 'widht': did you mean 'width'"):
        start(RunConfig(ModelPart("mlp", {"widht": 8})), None, None, None, run_dir=tmp_path / "x", watcher=Watcher())
    with pytest.raises(UsageError, match="unknown model 'mpl': did you mean 'mlp'"):
        start(RunConfig(ModelPart("mpl")), None, None, None, run_dir=tmp_path / "x", watcher=Watcher())


def test_a_node_released_in_mid_run_changes_no_bit(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 1, steps=9)
    pool = InMemoryPool(4)

    class Releases(Watcher):
        def step(self, done: int, total: int | None, event: events.StepDone, idle: float) -> None:
            if done in (2, 5):
                pool.release(1)

    data = tensors("t", *blobs()), tensors("t", *blobs(30))
    result = start(settings(4, steps=9), stack(), data, None, run_dir=tmp_path / "run", watcher=Releases(), pool=pool)
    assert result.summary.weights_sha256 == whole.summary.weights_sha256
    assert [(each.generation, each.nodes) for each in result.summary.recoveries] == [(2, 3), (3, 2)]
    assert result.summary.nodes == 2


@pytest.mark.usefixtures("offenders")
def test_a_node_refuses_activations_that_are_not_in_its_plan(tmp_path: Path) -> None:
    """A neighbour that sends one value too many per sample is found out by the plan, not by the layer."""
    train(tmp_path / "run", 2, steps=1)
    index, _ = RunDirectory(tmp_path / "run").read_layers()
    assert [[each.rest for each in layer] for layer in index.outputs] == [[(16,)]] * 5 + [[(3,)]]
    hub = Hub()
    endpoint = Endpoint(hub.transport(1), "ring", 1)
    route = plain_ring(2, [(0, 2), (2, 5), (5, 6)])
    recipe = Recipe(0, 1, "sgd", {"lr": 0.1}, {"kind": "constant", "warmup": 0})
    crossings = {visit.index: index.outputs[visit.first - 1] for visit in route.visits[1:]}
    Node(endpoint, Setup(route, recipe, 4, "1f1b", 0, {}, 0, crossings))
    sender = Endpoint(hub.transport(0), "ring", 1)
    sender.post(1, Activations(1, 0, 1, 0, 2, True, True, (True,)), [torch.zeros(2, 16)])
    assert len(endpoint.collect()) == 1
    sender.post(1, Activations(1, 0, 1, 1, 2, True, True, (True,)), [torch.zeros(2, 17)])
    assert not endpoint.collect()
    (offence,) = endpoint.offences()
    assert offence.node == 0
    assert "the plan says" in offence.text
