"""A run's settings as frozen parts, checked in one place before anything starts.

`resolve` fills every default, so that the run directory holds what was really used. A setting that could change the
bits is never a function of the number of nodes, of a device or of timing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from ringtmp.errors import UsageError, unknown
from ringtmp.plan.next_action import Schedule
from ringtmp.wire.protocol import WIRES

DEFAULT_MICROBATCHES = 8
DEFAULT_EPOCHS = 10


Protect = Literal["auto", "memory", "disk", "checkpoint", "off"]
StreamKeep = Literal["memory", "disk", "none"]
Shape = Literal["ring", "v"]
Recompute = Literal["none", "all", "auto"]


class ModelPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str = "mlp"
    settings: dict[str, int | float] = {}


class TrainingPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything here decides the bits."""

    data: str = "digits"
    loss: str = ""  # empty: what fits the data
    epochs: int | None = None
    steps: int | None = None
    batch_size: int = 32
    microbatches: int | Literal["auto"] | None = None  # auto: by the plan, before the first step; then it is a number
    optimizer: str = "adam"
    optimizer_settings: dict[str, Any] = {}
    lr_schedule: dict[str, Any] = {}  # empty: constant
    clip_norm: float | None = None
    seed: int = 0
    threads: int | None = None  # None: 1 on this machine, else the smallest core count that joined
    wire: str = "float32"
    staleness: int = 0
    early_stop: int | None = None  # epochs without a better test loss


class RingPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the ring nothing here changes the bits."""

    strategy: str = "ring"
    strategy_settings: dict[str, Any] = {}
    nodes: int = 3
    all_devices: bool = False  # also those that slow the ring
    cuts: str | None = None
    window: int | None = None
    schedule: Schedule = "1f1b"
    laps: int = 1
    route: Shape = "ring"
    recompute: Recompute = "none"
    rebalance: bool = True  # deal the layers anew when devices are not as fast as planned


class KeepPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    checkpoint_every: int | None = None  # steps; None: at the end of epochs, at most every 30 s
    detailed_steps: int = 32  # steps whose every span is recorded
    protect: Protect = "auto"  # what a lost node's layers are made again from
    notice_s: float = 3.0  # a silent or stopped node is taken for lost after this
    stream_keep: StreamKeep = "memory"  # where a stream's batches since the last checkpoint are


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: ModelPart = ModelPart()
    training: TrainingPart = TrainingPart()
    ring: RingPart = RingPart()
    keep: KeepPart = KeepPart()


def resolve(config: RunConfig) -> RunConfig:
    """The same settings with defaults filled in. Refuses what cannot be."""
    try:  # from Python anything may come
        config = msgspec.convert(msgspec.to_builtins(config), RunConfig, strict=True)
    except (msgspec.ValidationError, TypeError) as error:
        raise refused(error) from error
    from ringtmp.runtime.update_rules import checked_optimizer, checked_schedule
    from ringtmp.strategies import registry

    config = registry.parse(config.ring.strategy).applied_to(config)
    training, ring = config.training, config.ring
    if training.wire not in WIRES:
        raise unknown("wire format", training.wire, WIRES)
    strategy, settings = registry.of(ring)
    settings.check(ring.nodes, training.wire)
    _check_pipeline_only(config, strategy.splits_layers, registry.splitting_layers)
    for name, value, least in (
        ("--nodes", ring.nodes, 1),
        ("--batch-size", training.batch_size, 1),
        ("--microbatches", training.microbatches, 1),
        ("--window", ring.window, 1),
        ("--laps", ring.laps, 1),
        ("--threads", training.threads, 1),
        ("--epochs", training.epochs, 1),
        ("--steps", training.steps, 1),
        ("--checkpoint-every", config.keep.checkpoint_every, 1),
        ("--early-stop", training.early_stop, 1),
    ):
        if isinstance(value, int) and value < least:
            raise UsageError(f"{name} {value} must be at least {least}")
    if ring.route == "v" and ring.laps > 1:
        raise UsageError("--route v goes out and back once: leave out --laps")
    if not 1 <= config.keep.notice_s <= 3600:  # signs of life come about twice a second
        raise UsageError(f"--notice {config.keep.notice_s:g} must be from 1 to 3600 seconds")
    if training.staleness not in (0, 1):
        raise UsageError(f"--staleness {training.staleness} is not supported: use 0 or 1")
    if not -(2**62) < training.seed < 2**62:
        raise UsageError(f"--seed {training.seed} is too large")
    if training.clip_norm is not None and not (training.clip_norm > 0 and math.isfinite(training.clip_norm)):
        raise UsageError(f"--clip-norm {training.clip_norm} must be a positive number")
    if training.epochs is not None and training.steps is not None:
        raise UsageError("give --epochs or --steps, not both")
    checked_schedule(training.lr_schedule, total_steps=1)  # the real total is known with the data
    auto = training.microbatches == "auto"
    if auto and not strategy.splits_layers:
        raise UsageError(
            f"--microbatches auto goes with --strategy {registry.splitting_layers()}: with {ring.strategy} give a number"
        )
    microbatches = usual_microbatches(training)
    if ring.schedule == "gpipe" and ring.window is not None and ring.window < microbatches and not auto:
        raise UsageError(
            f"--window {ring.window} is too small for gpipe, which keeps all {microbatches} microbatches in flight: leave "
            "it out, or use --schedule 1f1b"
        )
    workers = len(strategy.roles(settings, ring.nodes).workers)
    if not strategy.splits_layers and microbatches < workers:
        raise UsageError(
            f"{microbatches} microbatches cannot feed {workers} workers: use --microbatches {workers} or more"
            + ("" if training.batch_size >= workers else f", and a --batch-size of at least {workers}")
        )
    training = msgspec.structs.replace(
        training,
        epochs=training.epochs if training.steps or training.epochs else DEFAULT_EPOCHS,
        microbatches="auto" if auto else microbatches,
        optimizer_settings=checked_optimizer(training.optimizer, training.optimizer_settings),
    )
    return msgspec.structs.replace(config, training=training, ring=ring)


def refused(error: Exception, where: str = "") -> UsageError:
    """What msgspec says of a value, with the setting's own name and, of a choice, the choices."""
    found = re.fullmatch(r"(.*) - at `\$\.(\w+)\.(\w+)(.*)`", str(error))
    if found is None:
        return UsageError(f"{error}{where}")
    what, part, field, deeper = found.groups()
    wrong = re.fullmatch(r"Invalid enum value '?(.*?)'?", what)
    kinds = {each.name: type(each.default) for each in msgspec.structs.fields(RunConfig)}
    choices = get_args(get_type_hints(kinds[part])[field])
    if wrong is not None and all(isinstance(each, str) for each in choices):
        return unknown(field.replace("_", "-"), wrong[1], choices)
    return UsageError(f"{part}.{field}{deeper}: {what[0].lower()}{what[1:]}{where}")


def usual_microbatches(training: TrainingPart) -> int:
    """The number that was given, else the usual one; never more than there are samples."""
    given = training.microbatches
    return min(given if isinstance(given, int) else DEFAULT_MICROBATCHES, training.batch_size)


#: What has a meaning only where layers are split over nodes, and the part it lies in.
PIPELINE_SETTINGS = {
    "cuts": "ring", "window": "ring", "laps": "ring", "route": "ring", "recompute": "ring", "schedule": "ring",
    "staleness": "training",
}  # fmt: skip


def _check_pipeline_only(config: RunConfig, splits_layers: bool, with_strategies: Callable[[], str]) -> None:
    for key, part in PIPELINE_SETTINGS.items():
        if not splits_layers and getattr(getattr(config, part), key) != getattr(getattr(RunConfig(), part), key):
            raise UsageError(
                f"--{key} goes with --strategy {with_strategies()}: with {config.ring.strategy} every worker has the whole "
                "model"
            )


#: What `--resume` may change: none of it changes the bits of the steps to come.
RESUMABLE = (
    "epochs",
    "steps",
    "nodes",
    "all_devices",
    "cuts",
    "window",
    "schedule",
    "laps",
    "route",
    "checkpoint_every",
    "detailed_steps",
    "rebalance",
    "protect",
    "notice_s",
    "stream_keep",
)


def merge_for_resume(saved: RunConfig, given: dict[str, Any]) -> RunConfig:
    """The saved settings with what the user gave anew; refuses what would change the bits."""
    changed: dict[str, dict[str, Any]] = {part: {} for part in ("model", "training", "ring", "keep")}
    owners = {field.name: name for name in changed for field in msgspec.structs.fields(getattr(saved, name))}
    for key, value in given.items():
        if key not in owners:
            raise unknown("setting to change on resume", key, RESUMABLE)
        part = owners[key]
        again = key == "data" and saved.training.data == "given"  # nobody can name what Python gave
        if key not in RESUMABLE and not again and getattr(getattr(saved, part), key) != value:
            raise UsageError(
                f"--resume cannot change {key.replace('_', '-')} (it is {getattr(getattr(saved, part), key)!r} in that "
                f"run): it may change {', '.join(each.replace('_', '-') for each in RESUMABLE)}"
            )
        changed[part][key] = value
    if "epochs" in changed["training"]:
        changed["training"].setdefault("steps", None)
    if "steps" in changed["training"] and changed["training"]["steps"]:
        changed["training"]["epochs"] = None
    if {"nodes", "laps", "route"} & set(changed["ring"]):
        changed["ring"].setdefault("cuts", None)
        changed["ring"].setdefault("window", None)
    return msgspec.structs.replace(
        saved, **{part: msgspec.structs.replace(getattr(saved, part), **values) for part, values in changed.items()}
    )


# -- settings as text ---------------------------------------------------------------------------------------------------


def parse_pairs(flag: str, items: Iterable[str]) -> dict[str, Any]:
    """('width=256', 'dropout=0.1') -> {'width': 256, 'dropout': 0.1}"""
    pairs: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise UsageError(f"{flag} {item!r}: write it as key=value")
        pairs[key.strip()] = _number(value.strip())
    return pairs


def parse_schedule(text: str) -> dict[str, Any]:
    """'cosine:warmup=10,floor=0.1' -> {'kind': 'cosine', 'warmup': 10, 'floor': 0.1}"""
    kind, _, rest = text.partition(":")
    return {"kind": kind, **parse_pairs("--lr-schedule", rest.split(",") if rest else ())}


def _number(text: str) -> Any:
    if text.lower() in ("true", "yes"):
        return True
    if text.lower() in ("false", "no"):
        return False
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
