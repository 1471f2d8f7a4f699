"""The Python interface: `Ring(...).fit(...)`, `evaluate`, `predict`, and the result of a run."""

from __future__ import annotations

import copy
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import msgspec
import torch
from torch import nn

from ringtmp.config import KeepPart, ModelPart, RingPart, RunConfig, TrainingPart, merge_for_resume, resolve
from ringtmp.data import named
from ringtmp.data.batches import Batch, evaluation_batches, split_batch
from ringtmp.data.sources import Source, from_python, leaves
from ringtmp.errors import UsageError
from ringtmp.factory import is_factory, load_factory
from ringtmp.inference import Inference
from ringtmp.job import Job, Watcher
from ringtmp.launch.crew import Crew
from ringtmp.launch.facts import parse_listen
from ringtmp.launch.keys import Rings, checked_name
from ringtmp.launch.local import LocalCrew
from ringtmp.launch.memory import MemoryCrew
from ringtmp.launch.remote import RemoteCrew
from ringtmp.launch.speech import DEFAULT_PORT, SILENCE_LIMIT_S
from ringtmp.metrics import events
from ringtmp.metrics.summary import Summary, summarise
from ringtmp.model import zoo
from ringtmp.model.layers import Model
from ringtmp.model.revive import revive
from ringtmp.ring.checkpoint import latest, named_weights
from ringtmp.ring.losses import LossFunction, loss_named
from ringtmp.ring.rundir import RunDirectory, default_run_dir
from ringtmp.session import EVALUATION_FACTOR, Session
from ringtmp.signals import on_signals
from ringtmp.untrusted import printable

Data = Any  # a name, (inputs, targets) tensors, a Dataset, a DataLoader, any iterable of batches


class Silent:
    """Looks on and says nothing."""

    def phase(self, text: str) -> None: ...
    def step(self, done: int, total: int | None, event: events.StepDone, idle: float) -> None: ...
    def evaluated(self, event: events.Evaluated) -> None: ...
    def warn(self, text: str) -> None: ...
    def expect(self, lines: Sequence[str]) -> None: ...
    def tell(self, text: str) -> None: ...


class Telling(Silent):
    """Says on stderr what a person must know: the line to run on each device, who came, warnings."""

    def tell(self, text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        print(f"warning: {printable(text)}", file=sys.stderr, flush=True)


class Result:
    """What a run gave: `summary` (as `--json` prints it), `run_dir`, and the trained `model`, loaded when asked for."""

    def __init__(self, run_dir: Path, source: Model | None = None) -> None:
        self.run_dir = run_dir
        self._source = source

    @cached_property
    def summary(self) -> Summary:
        made = summarise(events.read(self.run_dir / "events.jsonl"), str(self.run_dir))
        assert made is not None, "a finished run has a first event"
        return made

    @cached_property
    def model(self) -> nn.Module:
        """An ordinary module with the trained weights: of the user's own classes where they are at hand."""
        _index, layers = RunDirectory(self.run_dir).read_layers()
        checkpoint, _ = latest(self.run_dir / "checkpoints")
        if self._source is None:
            return revive([(layer, checkpoint.layer(i, layer)[0]) for i, layer in enumerate(layers)])
        model = _as_module(self._source)
        model.load_state_dict(dict(named_weights(checkpoint, layers)))
        return model


class Ring:
    """A ring of `nodes`; this process is the master.

    Without `listen` the others are processes on this machine, started and stopped with a run. With it they are devices
    that join with the token the watcher is shown (`ringtmp node --join ...`); one that would slow the ring is left out,
    unless `all_devices`. With `rebalance` layers are dealt anew when devices become slower or faster. `strategy` and its
    `settings` are those of `ringtmp strategies`; the same nodes then train in another way.
    """

    def __init__(
        self,
        nodes: int = 3,
        *,
        all_devices: bool = False,
        cuts: str | None = None,
        window: int | None = None,
        schedule: str = "1f1b",
        laps: int = 1,
        route: str = "ring",
        recompute: str = "none",
        rebalance: bool = True,
        strategy: str = "ring",
        settings: Mapping[str, Any] | None = None,
        threads: int | None = None,
        listen: str | None = None,
        ring: str = "home",
    ) -> None:
        self._part = RingPart(
            nodes=nodes,
            all_devices=all_devices, cuts=cuts, window=window, schedule=schedule,  # type: ignore[arg-type]
            laps=laps, route=route, recompute=recompute, rebalance=rebalance,  # type: ignore[arg-type]
            strategy=strategy, strategy_settings=dict(settings or {}),
        )  # fmt: skip
        self._threads = threads
        self._listen = listen
        self._ring = ring

    def fit(
        self,
        model: Model | str,
        train_data: Data,
        *,
        test_data: Data = None,
        loss: str | LossFunction | None = None,
        optimizer: str | tuple[str, Mapping[str, Any]] = "adam",
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int = 32,
        microbatches: int | Literal["auto"] | None = None,
        lr_schedule: Mapping[str, Any] | None = None,
        clip_norm: float | None = None,
        seed: int = 0,
        wire: str = "float32",
        staleness: int = 0,
        early_stop: int | None = None,
        checkpoint_every: int | None = None,
        protect: str = "auto",
        run_dir: str | Path | None = None,
        watcher: Watcher | None = None,
    ) -> Result:
        """Train. Equal arguments give equal bits, whatever the number of nodes, the cuts, window, route and schedule."""
        name, settings = (optimizer, {}) if isinstance(optimizer, str) else (optimizer[0], dict(optimizer[1]))
        config = RunConfig(
            ModelPart(model if isinstance(model, str) else type(model).__name__),
            TrainingPart(
                data=train_data if isinstance(train_data, str) else "given", epochs=epochs, steps=steps,
                batch_size=batch_size, microbatches=microbatches, optimizer=name, optimizer_settings=settings,
                lr_schedule=dict(lr_schedule or {}), clip_norm=clip_norm, seed=seed, wire=wire, staleness=staleness,
                threads=self._threads, early_stop=early_stop,
            ),
            self._part,
            KeepPart(checkpoint_every=checkpoint_every, protect=protect),  # type: ignore[arg-type]
        )  # fmt: skip
        given = None if isinstance(train_data, str) else (from_python(train_data), _optional(test_data))
        watcher = watcher or Telling()
        crew = remote_crew(self._listen, self._ring, self._part.nodes, self._threads, watcher) if self._listen else None
        return start(config, None if isinstance(model, str) else model, given, loss, run_dir, watcher, crew)

    def resume(
        self,
        run_dir: str | Path,
        train_data: Data = None,
        *,
        test_data: Data = None,
        loss: LossFunction | None = None,
        watcher: Watcher | None = None,
        **changes: Any,
    ) -> Result:
        """Go on with a run, with the bits of one that was never stopped. Data by name is found again by itself."""
        given = None if train_data is None else (from_python(train_data), _optional(test_data))
        part = self._part
        ring = {"nodes": part.nodes, "cuts": part.cuts, "window": part.window, "rebalance": part.rebalance}
        watcher = watcher or Telling()
        changed = {**ring, "schedule": self._part.schedule, **changes}
        crew = None
        if self._listen:
            saved = settings_of(run_dir, changed)
            crew = remote_crew(
                self._listen, self._ring, saved.ring.nodes, saved.training.threads, watcher,
                notice_s=saved.keep.notice_s,
            )  # fmt: skip
        return resume(run_dir, changed, given, loss, watcher, crew)

    def evaluate(self, run_dir: str | Path, data: Data = None) -> dict[str, Any]:
        """Loss and scores of a run's newest checkpoint; on its own test part unless data is given."""
        return evaluate(run_dir, data, self._part.nodes)

    def predict(self, run_dir: str | Path, inputs: Any) -> Any:
        """The outputs of a run's newest checkpoint for a batch of inputs."""
        return predict(run_dir, inputs, self._part.nodes)


def start(
    config: RunConfig,
    model: Model | None,
    data: tuple[Source, Source | None] | None,
    loss: str | LossFunction | None,
    run_dir: str | Path | None,
    watcher: Watcher,
    crew: Crew | None = None,
) -> Result:
    """A new run. Without `model` and `data` they come from their names in the settings."""
    config = resolve(config)
    train, test = data or named.load(config.training.data, config.training.seed, config.model.settings)
    source = model if model is not None else named_model(config.model, train)
    function, name = _loss(loss or config.training.loss or None, train)
    run = RunDirectory(Path(run_dir) if run_dir is not None else default_run_dir())
    _train(Job(config, source, train, test, function, name, run), watcher, crew)
    return Result(run.path, None if isinstance(source, Iterator) else source)


def resume(
    run_dir: str | Path,
    changes: dict[str, Any],
    data: tuple[Source, Source | None] | None,
    loss: LossFunction | None,
    watcher: Watcher,
    crew: Crew | None = None,
) -> Result:
    """Go on with the run in `run_dir` from its newest whole checkpoint."""
    run = RunDirectory(Path(run_dir))
    saved = run.read_config()
    config = settings_of(run_dir, changes)
    train, test = data or _named_again(config)
    if loss is None and saved.loss == "callable":
        raise UsageError(f"the run {run_dir} was trained with a loss of your own: pass it again")
    function = loss or loss_named(saved.loss)
    _train(Job(config, None, train, test, function, saved.loss, run), watcher, crew)
    return Result(run.path)


def settings_of(run_dir: str | Path, changes: dict[str, Any]) -> RunConfig:
    """What a run goes on with: its own settings, but for the changes."""
    return resolve(merge_for_resume(RunDirectory(Path(run_dir)).read_config().config, changes))


def evaluate(run_dir: str | Path, data: Data, nodes: int, loss: LossFunction | None = None) -> dict[str, Any]:
    run = RunDirectory(Path(run_dir))
    saved = run.read_config()
    if data is None or isinstance(data, str):
        part = msgspec.structs.replace(saved.config.training, data=data or saved.config.training.data)
        train, test = _named_again(msgspec.structs.replace(saved.config, training=part))
        source = test or train
    else:
        source = from_python(data)
    if loss is None and saved.loss == "callable":
        raise UsageError(f"the run {run_dir} was trained with a loss of your own: pass it again")
    training = saved.config.training
    assert isinstance(training.microbatches, int), "a saved run has a number"
    with _inference(run, saved.config, nodes, loss or loss_named(saved.loss)) as ring:
        batches = evaluation_batches(
            source, training.batch_size * EVALUATION_FACTOR, training.microbatches * EVALUATION_FACTOR
        )
        score = ring.master.evaluate(batches, ring.step, saved.loss == "next_byte")
    return {
        "run_dir": str(run_dir), "step": ring.step, "data": source.name, "samples": score.samples, "loss": score.loss,
        "accuracy": score.accuracy, "bits_per_byte": score.bits_per_byte,
    }  # fmt: skip


def predict(run_dir: str | Path, inputs: Any, nodes: int) -> Any:
    run = RunDirectory(Path(run_dir))
    saved = run.read_config()
    training = saved.config.training
    assert isinstance(training.microbatches, int), "a saved run has a number"
    count = len(leaves(inputs)[0])
    if not count:
        raise UsageError("there are no inputs to predict from")
    per_pass = training.batch_size * EVALUATION_FACTOR
    batches = []
    for first in range(0, count, per_pass):
        part = torch.arange(first, min(first + per_pass, count))
        pieces, nobody = split_batch(
            _select(inputs, part), torch.zeros(len(part)), training.microbatches * EVALUATION_FACTOR
        )
        batches.append(Batch(0, pieces, nobody, len(part)))
    with _inference(run, saved.config, nodes, loss_named("mse")) as ring:
        outputs = ring.master.predict(batches, ring.step)
    return _concatenate(outputs)


def remote_crew(
    listen: str,
    ring: str,
    nodes: int,
    threads: int | None,
    watcher: Watcher,
    start_with: int | None = None,
    wait_s: float = 0.0,
    notice_s: float = SILENCE_LIMIT_S,
) -> Crew:
    """Devices that join this machine's ring over the network."""
    if nodes == 1:
        raise UsageError("--listen with --nodes 1 has nobody to listen for: leave one of them out")
    if start_with is not None and not 2 <= start_with <= nodes:
        raise UsageError(f"--start-with {start_with} must be from 2 to --nodes {nodes}")
    host, port = parse_listen(listen, DEFAULT_PORT)
    name = checked_name("ring", ring)
    return RemoteCrew(
        Rings(), name, host, port, nodes, threads, start_with, wait_s, watcher.phase, watcher.tell, notice_s
    )


def named_model(part: ModelPart, train: Source) -> Callable[[], Any]:
    if is_factory(part.name):
        factory = load_factory("model", part.name)
        return lambda: factory(**part.settings)
    zoo.build(part.name, train.shape, part.settings)  # refuse a wrong name or setting before anything starts
    return lambda: zoo.build(part.name, train.shape, part.settings)


def _named_again(config: RunConfig) -> tuple[Source, Source | None]:
    if config.training.data == "given":
        raise UsageError("this run was trained on data given from Python: pass the data again")
    return named.load(config.training.data, config.training.seed, config.model.settings)


def _train(job: Job, watcher: Watcher, crew: Crew | None) -> None:
    if crew is None:
        nodes, threads = job.config.ring.nodes, job.config.training.threads or 1
        keep = job.config.keep
        if nodes == 1:
            crew = MemoryCrew(1, threads=threads)
        else:
            crew = LocalCrew(nodes, threads, job.run.logs, keep.notice_s, spare=keep.protect != "off")
    with interruptible() as interruption:
        Session(job, crew, watcher, interruption).train()


@contextmanager
def _inference(run: RunDirectory, config: RunConfig, nodes: int, loss: LossFunction) -> Iterator[Inference]:
    threads = config.training.threads or 1
    crew: Crew = MemoryCrew(1, threads=threads) if nodes == 1 else LocalCrew(nodes, threads, run.logs, keeps=False)
    with Inference(run, config, nodes, loss, crew) as ring:
        yield ring


class Interruption:
    """Whether the user wants to stop. Once armed, the first signal asks and the second insists."""

    def __init__(self) -> None:
        self.armed = False
        self.asked = False
        self.deaf = False  # the run is being ended already

    def __call__(self) -> bool:
        return self.asked

    def handle(self, number: int, frame: FrameType | None) -> None:
        # A shell that goes sends its own, and the terminal another: nobody insists.
        if self.deaf or (self.asked and number == signal.SIGHUP):
            return
        if not self.armed or self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Ctrl-C, SIGTERM and a closed terminal become a question while the ring trains. Only the main thread may ask for
    signals."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    with on_signals(interruption.handle):
        yield interruption


def _optional(data: Data) -> Source | None:
    return None if data is None else from_python(data)


def _loss(loss: str | LossFunction | None, train: Source) -> tuple[LossFunction, str]:
    if callable(loss):
        return loss, "callable"
    name = loss or train.loss
    return loss_named(name), name


def _as_module(source: Any) -> nn.Module:
    if isinstance(source, nn.Module):
        # A single module that is one layer has its names under "0."; so has its place in a Sequential.
        return copy.deepcopy(source) if isinstance(source, nn.Sequential) else nn.Sequential(copy.deepcopy(source))
    if callable(source):
        made = source()
        if isinstance(made, nn.Module):
            return made if isinstance(made, nn.Sequential) else nn.Sequential(made)
        return _as_module(list(made))
    named_layers = [item if isinstance(item, tuple) else (str(i), item) for i, item in enumerate(source)]
    return nn.Sequential(OrderedDict((name, copy.deepcopy(module)) for name, module in named_layers))


def _select(inputs: Any, index: torch.Tensor) -> Any:
    if isinstance(inputs, torch.Tensor):
        return inputs[index]
    return tuple(_select(each, index) for each in inputs)


def _concatenate(outputs: list[Any]) -> Any:
    if isinstance(outputs[0], torch.Tensor):
        return torch.cat(outputs)
    return tuple(_concatenate([each[i] for each in outputs]) for i in range(len(outputs[0])))
