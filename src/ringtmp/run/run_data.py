"""A run's data and loss once more, by what its settings say of them."""

from __future__ import annotations

from collections.abc import Callable

from ringtmp.config import RunConfig, replaced
from ringtmp.data.drop_unused_inputs import leave_out, names_of
from ringtmp.data.source_registry import is_text
from ringtmp.data.tables_and_streams import Source, with_loss
from ringtmp.errors import UsageError
from ringtmp.run.text_settings import named_data
from ringtmp.runtime.losses import LossFunction, loss_named
from ringtmp.runtime.run_directory import RunDirectory


def named_again(
    config: RunConfig, phase: Callable[[str], None] = lambda text: None
) -> tuple[Source, Source | None]:  # fmt: skip
    if config.training.data == "given":
        raise UsageError(
            "this run was trained on data given from Python: use Ring(...).resume(RUN, data) or Ring(...).evaluate(RUN, data), "
            "or name it with --data FILE.py:factory"
        )
    return named_data(config, phase=phase)[1]


def with_data(config: RunConfig, name: str) -> RunConfig:
    """Other data than a run was trained on. What it says of reading text means nothing where this is none."""
    about_text = {} if is_text(name) else {"tokenizer": None, "context": None, "attention_mask": False}
    return replaced(config, {"data": name, **about_text})


def without_left_out(
    config: RunConfig, train: Source, test: Source | None, needed: bool = True
) -> tuple[Source, Source | None]:
    names = names_of(config.training.leave_out)
    return leave_out(train, names, needed), None if test is None else leave_out(test, names, needed)


def labels_as(loss: str, train: Source, test: Source | None) -> tuple[Source, Source | None]:
    """Labels that come among the inputs stay there for a loss that the model computes, and are targets otherwise."""
    return with_loss(train, loss)[0], None if test is None else with_loss(test, loss)[0]


def loss_again(run: RunDirectory, name: str) -> LossFunction:
    if name == "callable":
        raise UsageError(f"the run {run.path} was trained with a loss of your own: give it again")
    return loss_named(name)
