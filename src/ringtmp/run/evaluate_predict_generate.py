"""A run that is used: evaluated, asked for predictions or for text, by processes on this machine or by devices that join."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ringtmp.config import RunConfig, replaced
from ringtmp.data.batches import Batch, evaluation_batches, split_batch
from ringtmp.data.drop_unused_inputs import names_of, without
from ringtmp.data.nested_inputs import leaves, map_tensors
from ringtmp.data.randomness import left_alone
from ringtmp.data.tables_and_streams import from_python, text_of
from ringtmp.data.user_factories import call_factory, is_factory
from ringtmp.errors import UsageError
from ringtmp.launch.agent_messages import DEFAULT_PORT
from ringtmp.launch.choose_local_pool import processes_here
from ringtmp.launch.device_facts import parse_listen
from ringtmp.launch.device_names import checked_name
from ringtmp.launch.node_pool import NodePool
from ringtmp.model.layers import Model
from ringtmp.model.output_tree import joined, map_outputs
from ringtmp.model.pretrained import is_pretrained, pretrained
from ringtmp.run.ask_ensemble import Combined
from ringtmp.run.generate import Generated, Prompt, Writing
from ringtmp.run.inference import Inference, inference
from ringtmp.run.progress import Telling
from ringtmp.run.run_data import labels_as, loss_again, named_again, with_data, without_left_out
from ringtmp.run.training_loop import EVALUATION_FACTOR
from ringtmp.run.what_to_train import Watcher
from ringtmp.runtime import left_with_nodes
from ringtmp.runtime.losses import LossFunction, is_of_bytes, loss_named
from ringtmp.runtime.run_directory import RunDirectory
from ringtmp.strategies import registry
from ringtmp.system.resources import require_files

Data = Any  # a name, (inputs, targets) or a dict of tensors, a Dataset, a DataLoader, any iterable of batches


def evaluate(
    run_dir: str | Path, data: Data, nodes: int, loss: LossFunction | None = None, pool: NodePool | None = None
) -> dict[str, Any]:
    run = RunDirectory(Path(run_dir))
    saved = run.read_config()
    if data is None or isinstance(data, str):
        train, test = named_again(with_data(saved.config, data) if data else saved.config)
        source = test or train
    else:
        source = from_python(data, seed=saved.config.training.seed)
    source, _ = labels_as(saved.loss, *without_left_out(saved.config, source, None, needed=False))
    function = loss or loss_again(run, saved.loss)
    training = saved.config.training
    assert isinstance(training.microbatches, int), "a saved run has a number"
    bytes_model, per_batch = is_of_bytes(saved.loss), training.batch_size * EVALUATION_FACTOR
    microbatches = training.microbatches * EVALUATION_FACTOR

    def batches() -> Iterator[Batch]:
        return evaluation_batches(source, per_batch, microbatches)

    if (ensemble := Combined.of(run, saved)) is not None:
        _refuse_joined(pool)
        started = partial(_inference, run, saved.config, nodes, function, None)
        score, step = ensemble.score(started, batches, source.name, function, bytes_model), ensemble.step
    else:
        with _inference(run, saved.config, nodes, function, pool) as ring:
            score = ring.master.evaluate(ring.checked(batches(), source.name, saved.loss), ring.step, bytes_model)
        step = ring.step
    told = score.of_text(saved.loss, text_of(source))
    return {
        "run_dir": str(run_dir), "step": step, "data": source.name, "samples": score.samples, "loss": score.loss,
        "accuracy": score.accuracy, "bits_per_byte": told.bits_per_byte, "perplexity": told.perplexity,
    }  # fmt: skip


def predict(run_dir: str | Path, inputs: Any, nodes: int, pool: NodePool | None = None) -> Any:
    run = RunDirectory(Path(run_dir))
    saved = run.read_config()
    training = saved.config.training
    assert isinstance(training.microbatches, int), "a saved run has a number"
    given = leaves(inputs)
    if any(not each.dim() for each in given):
        raise UsageError("inputs have samples in their first dimension, but one is a single number")
    count = len(given[0]) if given else 0
    if not count:
        raise UsageError("there are no inputs to predict from")
    if isinstance(inputs, Mapping) and (unused := [name for name in names_of(training.leave_out) if name in inputs]):
        inputs = without("the input", inputs, unused)
    inputs = run.read_layers()[0].without_targets(inputs, count)
    per_pass = training.batch_size * EVALUATION_FACTOR
    batches = []
    for first in range(0, count, per_pass):
        part = torch.arange(first, min(first + per_pass, count))
        chosen = map_tensors(partial(torch.index_select, dim=0, index=part), inputs)
        pieces, nobody = split_batch(chosen, torch.zeros(len(part)), training.microbatches * EVALUATION_FACTOR)
        batches.append(Batch(0, pieces, nobody, len(part)))
    if (ensemble := Combined.of(run, saved)) is not None:
        _refuse_joined(pool)
        started = partial(_inference, run, saved.config, nodes, loss_named("mse"), None)
        return _for_anybody(torch.cat(ensemble.predictions(started, lambda: iter(batches), "the input")))
    with _inference(run, saved.config, nodes, loss_named("mse"), pool) as ring:
        outputs = ring.master.predict(ring.checked(batches, "the input"), ring.step)
    return map_outputs(_for_anybody, joined(outputs))


def _for_anybody(output: torch.Tensor) -> torch.Tensor:
    """NumPy has no bfloat16; every number of it is one of float32."""
    return output.float() if output.dtype == torch.bfloat16 else output


def generate(
    run_dir: str | Path, prompt: Prompt, nodes: int, show: Callable[[str], None], *, model: Model | None = None,
    pool: NodePool | None = None,
) -> Generated:  # fmt: skip
    run, told = RunDirectory(Path(run_dir)), Telling()
    config = run.read_config().config
    with suppress(UsageError):  # without the files it was built from, the run's own graphs are enough
        if model is None and is_pretrained(config.model.name):
            model = pretrained(config.model.name, filled=False)
        elif model is None and is_factory(config.model.name):
            model = call_factory("model", config.model.name, config.model.settings)
    with left_alone():
        writing = Writing(run, prompt, model, told.phase, told.tell)
        return writing.write(_pool_for(run, config, nodes, pool), show)


def devices_for(
    run_dir: str | Path, listen: str, ring: str, nodes: int | None, watcher: Watcher, *, discovery: bool = True
) -> NodePool:
    """Devices that join to evaluate, predict or generate: as many as trained, unless told otherwise."""
    config = RunDirectory(Path(run_dir)).read_config().config
    config = config if nodes is None else replaced(config, {"nodes": nodes})
    return device_pool(listen, ring, config, watcher, discovery=discovery)


def device_pool(
    listen: str, ring: str, config: RunConfig, watcher: Watcher, *, start_with: int | None = None, wait_s: float = 0.0,
    discovery: bool = True, qr: bool = False, supervised: bool = False, resumed: Path | None = None,
) -> NodePool:  # fmt: skip
    """Devices that join this machine's ring over the network. `supervised`: the master is started again when it is killed,
    as it may have been in the run that is `resumed`."""
    nodes = config.ring.nodes
    if nodes == 1:
        raise UsageError("--listen with --nodes 1 leaves no device to wait for: leave one of them out")
    if start_with is not None and not 2 <= start_with <= nodes:
        raise UsageError(f"--start-with {start_with} must be from 2 to --nodes {nodes}")
    host, port = parse_listen(listen, DEFAULT_PORT)
    left = left_with_nodes.read(resumed) if supervised and resumed is not None else None
    from ringtmp.launch.joined_devices import DevicePool  # and ZeroMQ with it
    from ringtmp.launch.key_store import Rings

    return DevicePool(
        Rings(), checked_name("ring", ring), host, port, nodes=nodes, threads=config.training.threads, phase=watcher.phase,
        tell=watcher.tell, start_with=start_with, wait_s=wait_s, notice_s=config.keep.notice_s,
        package=registry.package_of(config.ring.strategy), discovery=discovery, qr=qr, outlives_master=supervised,
        before=left.ring if left is not None else "",
    )  # fmt: skip


@contextmanager
def _inference(
    run: RunDirectory, config: RunConfig, nodes: int, loss: LossFunction, pool: NodePool | None, member: int = 0
) -> Iterator[Inference]:
    with left_alone(), inference(run, config.training, loss, _pool_for(run, config, nodes, pool), member) as ring:
        yield ring


def _refuse_joined(pool: NodePool | None) -> None:
    if pool is not None:
        raise UsageError(
            "an ensemble is asked on this machine, one member after the other: each was small enough for one device, so "
            "leave --listen out"
        )


def _pool_for(run: RunDirectory, config: RunConfig, nodes: int, given: NodePool | None) -> NodePool:
    """Where a run is not trained: the devices, or processes here."""
    if given is not None:
        return given
    require_files(nodes)
    return processes_here(nodes, config.training.threads or 1, run.logs, keeps=False)
