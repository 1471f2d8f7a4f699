"""From settings to what a plan needs: layers built and measured, the batch they see, the options they run under.

Measuring runs every kind of layer a few times at three microbatch sizes, with the thread count of the run; what was
measured before comes from the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ringtmp.config import RunConfig, usual_microbatches
from ringtmp.data.batches import TrainingBatches
from ringtmp.data.sources import Source, Stream
from ringtmp.model.build import build_layers
from ringtmp.model.layers import Model
from ringtmp.model.profile import ProfileCache, Profiler, with_loss
from ringtmp.plan import microbatches as counts
from ringtmp.plan import planner
from ringtmp.plan.devices import Device, LayerCost
from ringtmp.plan.memory_forecast import PROCESS_BYTES
from ringtmp.plan.planner import Plan
from ringtmp.runtime.losses import loss_named
from ringtmp.runtime.optimizers import make_optimizer
from ringtmp.strategies.ring.plan import plan_options
from ringtmp.system.resources import peak_rss_bytes, set_threads


@dataclass(frozen=True)
class Work:
    """What is to be done in a step, measured."""

    layers: tuple[LayerCost, ...]
    batch_size: int
    microbatches: int  # with "auto" where the search begins
    steps_per_epoch: int | None  # None: a stream
    batch_sizes: frozenset[int]
    least_microbatch: int  # samples the model needs at least

    def allows(self, count: int) -> bool:
        """Whether every microbatch has enough samples when batches are sliced into so many."""
        return min(counts.microbatch_sizes(self.batch_sizes, count)) >= self.least_microbatch


def measure(
    config: RunConfig,
    model: Model,
    train: Source,
    phase: Callable[[str], None] = lambda text: None,
    cache: ProfileCache | None = None,
) -> Work:
    """`config` is resolved. Refuses what a session would refuse of model and data."""
    training = config.training
    assert training.microbatches is not None, "the settings are not resolved"
    threads = training.threads or 1
    set_threads(threads)
    batch_size = train.batch_size if isinstance(train, Stream) else training.batch_size
    microbatches = min(usual_microbatches(training), batch_size)
    batches = TrainingBatches(train, batch_size, microbatches, training.seed)
    if training.microbatches == "auto":
        (smallest, _), sizes = counts.to_build(batches.sizes(), batch_size, microbatches, auto=True)
    else:
        largest, smallest = -(-batch_size // microbatches), batch_size // microbatches
        # Half and twice the size tell what other numbers of microbatches would cost; BatchNorm refuses a single sample.
        half, twice = largest // 2 if largest >= 4 else largest, 2 * largest if microbatches > 1 else largest
        sizes = sorted({half, largest, twice})

    def sample(count: int) -> object:
        return train.example(count)[0]

    profiler = Profiler(
        sample(sizes[-1]),
        sizes,
        threads,
        lambda parameters: make_optimizer(training.optimizer, training.optimizer_settings, parameters),
        f"{training.optimizer} {sorted(training.optimizer_settings.items())}",
        cache,
    )
    layers, outputs, one_sample = [], None, True
    for built in build_layers(model, training.seed, sample, [smallest, sizes[-1]]):
        layers.append(profiler.cost(built))
        outputs, one_sample = built.sample_outputs, built.takes_one_sample
        phase(f"measuring the model: layer {len(layers)}, {built.layer.name}")
        del built  # one layer in memory, not two
    least = 1 if one_sample else 2
    loss = loss_named(training.loss or train.loss)
    targets = train.example(sizes[-1])[1]
    layers[-1] = with_loss(layers[-1], loss, outputs, targets, threads)
    return Work(
        tuple(layers), batch_size, microbatches, batches.steps_per_epoch, frozenset(batches.sizes()), least
    )  # fmt: skip


def with_master_here(devices: Sequence[Device], counted_bytes: int) -> tuple[Device, ...]:
    """The master is this process: what it holds by now (data, the model's builder) it will hold then. `counted_bytes`: what it
    held when the memory beside it was measured; of a described device, whose memory is all there is, none."""
    memory = devices[0].memory_bytes + counted_bytes
    extra = max(0.0, float(peak_rss_bytes() - PROCESS_BYTES))
    return (replace(devices[0], memory_bytes=memory, extra_bytes=extra), *devices[1:])


def plan(config: RunConfig, work: Work, devices: Sequence[Device], keep_all: bool = False) -> Plan:
    """As the run's settings have it; with "auto" with the number of microbatches that is found fastest."""
    options = plan_options(config, work.batch_size, work.microbatches, len(work.layers), len(devices), keep_all)
    if config.training.microbatches == "auto":
        return counts.best_plan(work.layers, devices, options, work.allows)
    return planner.plan(work.layers, devices, options)
