"""From settings to what a plan needs: layers built and measured, the batch they see, the options they run under.

Measuring runs every kind of layer a few times at three microbatch sizes, with the thread count of the run; what was
measured before comes from the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ringtmp.config import RunConfig
from ringtmp.data.batches import TrainingBatches
from ringtmp.data.sources import Source, Stream
from ringtmp.model.build import build_layers
from ringtmp.model.layers import Model
from ringtmp.model.profile import ProfileCache, profile_layers
from ringtmp.plan.device import Device, LayerCost
from ringtmp.plan.memory import PROCESS_BYTES
from ringtmp.plan.planner import PlanOptions
from ringtmp.plan.route import parse_cuts
from ringtmp.resources import peak_rss_bytes, set_threads
from ringtmp.ring.optimizer import make_optimizer


@dataclass(frozen=True)
class Work:
    """What is to be done in a step, measured."""

    layers: tuple[LayerCost, ...]
    batch_size: int
    microbatches: int
    steps_per_epoch: int | None  # None: a stream


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
    batches = TrainingBatches(train, batch_size, training.microbatches, training.seed)
    microbatches = min(training.microbatches, batch_size)
    largest = -(-batch_size // microbatches)
    # Half and twice the size tell what other numbers of microbatches would cost; BatchNorm refuses a single sample.
    sizes = sorted({largest, largest // 2 if largest >= 4 else largest, 2 * largest if microbatches > 1 else largest})

    def sample(count: int) -> object:
        return train.example(count)[0]

    built = build_layers(model, training.seed, sample, [batch_size // microbatches, sizes[-1]])
    layers = []
    for cost in profile_layers(
        built,
        sample(sizes[-1]),
        sizes,
        threads,
        lambda parameters: make_optimizer(training.optimizer, training.optimizer_settings, parameters),
        f"{training.optimizer} {sorted(training.optimizer_settings.items())}",
        cache,
    ):
        layers.append(cost)
        phase(f"measuring the model: layer {len(layers)}, {cost.name}")
    return Work(tuple(layers), batch_size, microbatches, batches.steps_per_epoch)


def with_master_here(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The master is this process: what it holds by now (data, the model's builder) it will hold then."""
    extra = max(0.0, float(peak_rss_bytes() - PROCESS_BYTES))
    return (replace(devices[0], extra_bytes=extra), *devices[1:])


def options(config: RunConfig, work: Work, nodes: int, keep_all: bool = False) -> PlanOptions:
    """As the run's settings have it."""
    cuts = config.ring.cuts
    return PlanOptions(
        work.batch_size,
        work.microbatches,
        config.ring.window,
        config.ring.schedule,
        config.training.clip_norm is not None,
        keep_all=keep_all,
        protect=config.keep.protect,
        cuts=None if cuts is None else tuple(parse_cuts(cuts, len(work.layers), nodes)),
    )
