"""The Python interface: `Ring(...).fit(...)`, `evaluate`, `predict`, and the result of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Unpack

import torch
from torch import nn

from ringtmp.config import ModelPart, RingPart, RunConfig, parse_schedule, replaced
from ringtmp.config.keyword_arguments import checked_keywords, fields, shows_settings
from ringtmp.config.keyword_types import FitKeywords, RingKeywords
from ringtmp.config.options_to_keywords import as_keywords
from ringtmp.data.randomness import left_alone
from ringtmp.data.tables_and_streams import Source, Stream, Table, from_python, text_of, with_loss
from ringtmp.data.text_samples import Reading, read_text
from ringtmp.data.tokenizer import Encoder, open_tokenizer
from ringtmp.data.user_factories import call_factory, is_factory, refuse_file_alone
from ringtmp.errors import Interrupted, RingError, UsageError
from ringtmp.launch.choose_local_pool import processes_here
from ringtmp.launch.node_pool import NodePool, refuse_without_ranks
from ringtmp.metrics import events
from ringtmp.metrics.history import Row
from ringtmp.model import zoo
from ringtmp.model.compiled_graph import refuse_without_compiler
from ringtmp.model.language_model_config import LanguageFacts
from ringtmp.model.layers import Model
from ringtmp.model.next_token import Choice
from ringtmp.model.pretrained import is_pretrained, pretrained
from ringtmp.run.check_settings import resolve, resumed
from ringtmp.run.errors_for_callers import without_inside
from ringtmp.run.evaluate_predict_generate import device_pool, devices_for, evaluate, generate, predict
from ringtmp.run.generate import Generated, Prompt
from ringtmp.run.interruption import interruptible
from ringtmp.run.one_run_per_process import one_at_a_time
from ringtmp.run.open_line_to_home import USUAL_NAME, line_to_home
from ringtmp.run.progress import Telling, watching
from ringtmp.run.result import Result
from ringtmp.run.run_data import labels_as, loss_again, named_again, without_left_out
from ringtmp.run.session import Session
from ringtmp.run.text_settings import check_text, named_data, usual_context
from ringtmp.run.what_to_train import Job, OpenLine, Watcher
from ringtmp.runtime.compute_device import bfloat16_units, computing_on, refuse_slow_bfloat16
from ringtmp.runtime.losses import LossFunction, loss_named
from ringtmp.runtime.run_directory import RunDirectory
from ringtmp.system.files import default_run_dir
from ringtmp.system.resources import cpu_name, require_files
from ringtmp.watchers.functions import Functions

Data = Any  # a name, (inputs, targets) or a dict of tensors, a Dataset, a DataLoader, any iterable of batches

P = ParamSpec("P")
R = TypeVar("R")


def _runs(call: Callable[P, R]) -> Callable[P, R]:
    """A call from Python that trains or computes: one at a time, and errors name settings as keywords. Who pressed Ctrl-C, or
    gave what cannot be, sees the call and how to go on, not where in here it was noticed."""

    @wraps(call)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with _named_as_keywords(), one_at_a_time():
                return call(*args, **kwargs)
        except (Interrupted, KeyboardInterrupt) as asked:
            raise asked.with_traceback(None) from None
        except UsageError as wrong:
            raise without_inside(wrong) from None

    return alone


@contextmanager
def _named_as_keywords() -> Iterator[None]:
    try:
        yield
    except RingError as error:
        text, *rest = error.args or ("",)
        error.args = (as_keywords(str(text)), *rest)
        raise


class Ring:
    """A ring of nodes; this process is the master.

    Without `listen` the others are processes on this machine, started and stopped with a run. With it they are devices
    that join with the token or the code the watcher is shown, as members of the ring called `ring`; without `discovery` a
    token is needed. With `home_listen` or `home_join` this ring is one of two homes (docs/homes.md), and `homes` the name of
    the ring whose tokens the other joins with.
    `progress` is shown on a terminal and in a notebook, unless it is False or `fit` has a watcher; True shows it anywhere.
    The rest are settings of `ringtmp train`; docs/api.md lists them.
    """

    @shows_settings("Ring")
    def __init__(
        self,
        nodes: int | None = None,
        *,
        listen: str | None = None,
        ring: str = "home",
        discovery: bool = True,
        home_listen: str | None = None,
        home_join: str | None = None,
        homes: str = USUAL_NAME,
        progress: bool | None = None,
        **settings: Unpack[RingKeywords],
    ) -> None:
        given = settings if nodes is None else {"nodes": nodes, **settings}
        self._given = checked_keywords("Ring", Ring.__init__, given)
        self._nodes: int = self._given.get("nodes", RingPart().nodes)
        self._progress = progress
        self._listen = listen
        self._ring = ring
        self._discovery = discovery
        self._line = line_to_home(home_listen, home_join, homes)

    @shows_settings("fit")
    @_runs
    def fit(
        self,
        model: Model | str,
        train_data: Data,
        *more: Any,
        test_data: Data = None,
        loss: str | LossFunction | None = None,
        optimizer: str | tuple[str, Mapping[str, Any]] | None = None,
        lr_schedule: str | Mapping[str, Any] | None = None,
        run_dir: str | Path | None = None,
        watcher: Watcher | Sequence[Watcher] | None = None,
        on_step: Callable[[int, float], Any] | None = None,
        on_epoch: Callable[[Row], Any] | None = None,
        on_recovery: Callable[[events.Regrouped], Any] | None = None,
        on_end: Callable[[events.RunEnded], Any] | None = None,
        **settings: Unpack[FitKeywords],
    ) -> Result:
        """Train. Equal arguments give equal bits, whatever the number of nodes, the cuts, window, route and schedule.
        `on_step` is called after every step with its number, from 1, and its loss; `on_epoch` with the row of an epoch as in
        `result.history.epochs`; `on_recovery` and `on_end` with what happened. docs/api.md says more."""
        given = checked_keywords("fit", Ring.fit, settings)
        if more:
            raise UsageError(_said_of_more(train_data))
        if isinstance(train_data, str) and test_data is not None:
            raise UsageError(
                f"{train_data} already includes test data: leave out test_data, or pass your own train_data"
            )
        named = {
            "name": model if isinstance(model, str) else type(model).__name__,
            "data": train_data if isinstance(train_data, str) else "given",
            "lr_schedule": _schedule(lr_schedule),
            **_optimizer(optimizer),
        }
        config = resolve(replaced(RunConfig(), {**self._given, **given, **named}))
        data = None if isinstance(train_data, str) else _given(train_data, test_data, config.training.seed)
        functions = Functions(on_step, on_epoch, on_recovery, on_end)
        with watching(self._progress, watcher, functions) as told:
            return start(
                config, None if isinstance(model, str) else model, data, loss, run_dir=run_dir, watcher=told,
                pool=self._devices(config, told), line=self._line,
            )  # fmt: skip

    @_runs
    def resume(
        self,
        run_dir: str | Path,
        train_data: Data = None,
        *,
        test_data: Data = None,
        loss: LossFunction | None = None,
        model: Model | None = None,
        watcher: Watcher | Sequence[Watcher] | None = None,
        on_step: Callable[[int, float], Any] | None = None,
        on_epoch: Callable[[Row], Any] | None = None,
        on_recovery: Callable[[events.Regrouped], Any] | None = None,
        on_end: Callable[[events.RunEnded], Any] | None = None,
        **changes: Any,
    ) -> Result:
        """Go on with a run, with the bits of one that was never stopped. Settings given to `Ring` or here take the place
        of the run's own. Data by name is found again by itself. `model`: what was trained, so that `result.model` is of
        its class; its weights do not matter."""
        if "optimizer" in changes:
            changes = {**changes, **_optimizer(changes["optimizer"])}
        if "lr_schedule" in changes:
            changes = {**changes, "lr_schedule": _schedule(changes["lr_schedule"])}
        changed = {**self._given, **fields(changes)}
        config = settings_of(run_dir, changed)
        data = None if train_data is None else _given(train_data, test_data, config.training.seed)
        functions = Functions(on_step, on_epoch, on_recovery, on_end)
        with watching(self._progress, watcher, functions) as told:
            return resume(
                run_dir, changed, data, loss, watcher=told, pool=self._devices(config, told), model=model, line=self._line
            )  # fmt: skip

    @_runs
    def evaluate(self, run_dir: str | Path, data: Data = None, loss: LossFunction | None = None) -> dict[str, Any]:
        """Loss and scores of a run's newest checkpoint; on its own test part unless data is given. A loss of your own must
        be given again."""
        return evaluate(run_dir, data, self._nodes, loss, self._devices_for(run_dir))

    @_runs
    def predict(self, run_dir: str | Path, inputs: Any) -> Any:
        """The outputs of a run's newest checkpoint for a batch of inputs."""
        return predict(run_dir, inputs, self._nodes, self._devices_for(run_dir))

    @_runs
    def generate(
        self,
        run_dir: str | Path,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 64,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        chat: bool = False,
        tokenizer: str | Path | None = None,
        model: Model | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Generated:
        """A prompt, as text or token numbers, written on by a run's newest checkpoint; the best token each time, unless a
        temperature, `top_k` or `top_p` is given. `on_text` gets the text as it comes. `model`: what was trained, where the
        run does not know it by name; its weights do not matter."""
        choice = Choice(temperature, top_k, top_p, seed)
        asked = Prompt(prompt, max_new_tokens, choice, chat, None if tokenizer is None else str(tokenizer))
        show = on_text or (lambda text: None)
        return generate(run_dir, asked, self._nodes, show, model=model, pool=self._devices_for(run_dir))

    def _devices_for(self, run_dir: str | Path) -> NodePool | None:
        if self._listen is None:
            return None
        return devices_for(run_dir, self._listen, self._ring, self._nodes, Telling(), discovery=self._discovery)

    def _devices(self, config: RunConfig, watcher: Watcher) -> NodePool | None:
        if self._listen is None:
            return None
        return device_pool(self._listen, self._ring, config, watcher, discovery=self._discovery)


def _said_of_more(train_data: Data) -> str:
    """Where something came after the training data, without a name."""
    if hasattr(train_data, "shape"):
        return "give inputs and targets as one pair: fit(model, (inputs, targets), ...); the rest by name"
    return "test data and the rest go by name: fit(model, train_data, test_data=...)"


def text_data(
    path: str | Path, tokenizer: Any, *, context: int | None = None, attention_mask: bool = False
) -> tuple[Table, Table]:
    """Text for training and for the test, as `--data text:PATH` has it, or for a file called *.jsonl `--data jsonl:PATH`.

    `tokenizer`: a fast one of transformers, or the path of one; `context`: tokens in a sample, 128 unless the tokeniser says
    that its model takes fewer; `attention_mask`: with a mask, if anything is padded. `fit` takes what this returns as its
    data, and so may a factory of yours return it."""
    file = Path(path)
    encoder = open_tokenizer(str(tokenizer)) if isinstance(tokenizer, str | Path) else Encoder(tokenizer, "given")
    lines = file.suffix == ".jsonl"
    how = Reading(encoder, context or usual_context(encoder, LanguageFacts()), attention_mask)
    return read_text(f"{'jsonl' if lines else 'text'}:{file}", file, lines, how)


def start(
    config: RunConfig,
    model: Model | None = None,
    data: tuple[Source, Source | None] | None = None,
    loss: str | LossFunction | None = None,
    *,
    run_dir: str | Path | None = None,
    watcher: Watcher | None = None,
    pool: NodePool | None = None,
    line: OpenLine | None = None,
) -> Result:
    """A new run. Without `model` and `data` they come from their names in the settings."""
    config = resolve(config)
    config, (train, test) = (config, data) if data else named_data(config, model, (watcher or Watcher()).phase)
    train, test = without_left_out(config, train, test)
    source = model if model is not None else named_model(config.model, train)
    fitting = check_text(train, config.model.name, source)
    function, name, train, test = _loss(loss or config.training.loss or None, train, test)
    run = RunDirectory(Path(run_dir) if run_dir is not None else default_run_dir())
    with _modes_kept(source):
        unwritten = _train(Job(config, fitting, train, test, function, name, run, line=line), watcher, pool)
    return Result(run.path, None if isinstance(source, Iterator) else source, unwritten=unwritten)


def resume(
    run_dir: str | Path,
    changes: Mapping[str, Any],
    data: tuple[Source, Source | None] | None = None,
    loss: LossFunction | None = None,
    *,
    watcher: Watcher | None = None,
    pool: NodePool | None = None,
    model: Model | None = None,
    line: OpenLine | None = None,
) -> Result:
    """Go on with the run in `run_dir` from its newest whole checkpoint."""
    run = RunDirectory(Path(run_dir))
    saved = run.read_config()
    config = settings_of(run_dir, changes)
    told = watcher or Watcher()
    train, test = labels_as(
        saved.loss, *without_left_out(config, *(data or named_again(config, told.phase)), needed=False)
    )
    function = loss or loss_again(run, saved.loss)
    job = Job(config, None, train, test, function, saved.loss, run, line=line)
    unwritten = _train(job, watcher, pool)
    return Result(run.path, model, lambda: named_model(config.model, train), unwritten=unwritten)


def settings_of(run_dir: str | Path, changes: Mapping[str, Any]) -> RunConfig:
    """What a run goes on with: its own settings, but for the changes."""
    return resumed(RunDirectory(Path(run_dir)).read_config().config, changes)


def named_model(part: ModelPart, train: Source) -> Callable[[], Any]:
    if is_factory(part.name):
        return call_factory("model", part.name, part.settings)
    if is_pretrained(part.name):
        if part.settings:
            if "context" in part.settings:
                raise UsageError(f"--set context=… is for the bundled models: with {part.name} write --context N")
            raise UsageError(
                f"--set {next(iter(part.settings))}=… is for models of the zoo and factories, not for {part.name}"
            )
        return pretrained(part.name)
    refuse_file_alone("model", part.name)
    if text_of(train) is not None:
        raise UsageError(
            f"the bundled model {part.name} does not take tokens: leave out --tokenizer, or give a model that takes input_ids "
            "and labels (--model hf:PATH, FILE.py:factory)"
        )
    zoo.build(part.name, train.shape, part.settings)  # refuse a wrong name or setting before anything starts
    return lambda: zoo.build(part.name, train.shape, part.settings)


@contextmanager
def _modes_kept(model: Model) -> Iterator[None]:
    """A model that is read is put into training and evaluation mode in turn; the user's is left as it was."""
    given = [model] if isinstance(model, nn.Module) else model if isinstance(model, list | tuple) else []
    layers = [item[-1] if isinstance(item, tuple) else item for item in given]
    modes = [(module, module.training) for each in layers if isinstance(each, nn.Module) for module in each.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _train(job: Job, watcher: Watcher | None, pool: NodePool | None) -> list[events.Event]:
    """To the end; returns what could not be written of the record."""
    refuse_without_ranks(job.config.ring, pool)
    require_files(job.config.ring.nodes)
    if (text := text_of(job.train)) is not None:
        for remark in text.remarks:
            (watcher or Watcher()).tell(remark)
    if pool is None:
        keep, threads = job.config.keep, job.config.training.threads or 1
        pool = processes_here(
            job.config.ring.nodes, threads, job.run.logs, notice_s=keep.notice_s, spare=keep.protect != "off",
            device=job.config.ring.device,
        )  # fmt: skip
    with left_alone(), computing_on(job.config.ring.device), interruptible() as interruption:
        compute = job.config.training.compute
        refuse_slow_bfloat16(compute, bfloat16_units(), f"this machine ({cpu_name()})")
        if job.config.training.compile:
            refuse_without_compiler()
        session = Session(job, pool, watcher or Watcher(), interruption)
        session.train()
    return session.unwritten


def _given(train: Data, test: Data, seed: int) -> tuple[Source, Source | None]:
    if isinstance(train, tuple) and len(train) == 2 and all(isinstance(each, Table | Stream) for each in train):
        if test is not None:
            raise UsageError("text_data already includes test data: leave out test_data, or give the first part alone")
        train, test = train
    return from_python(train, seed=seed), None if test is None else from_python(test, seed=seed)


def _optimizer(given: Any) -> dict[str, Any]:
    """By the names of the settings' fields."""
    if given is None or isinstance(given, str):
        return {"optimizer": given} if given else {}
    pair = isinstance(given, tuple | list) and len(given) == 2
    if pair and isinstance(given[0], str) and isinstance(given[1], Mapping):
        return {"optimizer": given[0], "optimizer_settings": dict(given[1])}
    kind = given if isinstance(given, type) else type(given)
    name = kind.__name__.lower() if issubclass(kind, torch.optim.Optimizer) else "adam"
    raise UsageError(f'optimizer must be a name, or a name with settings: write optimizer=("{name}", {{"lr": 0.001}})')


def _schedule(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        return parse_schedule(given)
    if given is not None and not isinstance(given, Mapping):
        raise UsageError('lr_schedule is text such as "cosine:warmup=20", or {"kind": "cosine", "warmup": 20}')
    return dict(given or {})


def _loss(
    loss: str | LossFunction | None, train: Source, test: Source | None
) -> tuple[LossFunction, str, Source, Source | None]:
    """The loss, its name, and the data as that loss takes it."""
    train, name = with_loss(train, "callable" if callable(loss) else loss)
    function = loss if callable(loss) else loss_named(name)
    return function, name, *labels_as(name, train, test)
