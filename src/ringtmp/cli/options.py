"""Options that say what to train and how, made from the declarations of the settings: for every verb that needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ringtmp.config import SETTINGS, Setting, parse_pairs
from ringtmp.config.settings import GROUPS as TITLES
from ringtmp.errors import UsageError, nearest
from ringtmp.runtime.optimizers import OPTIMIZERS


class _Count(click.ParamType[int | str]):
    """A number, or 'auto'."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "auto":
            return "auto"
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor 'auto'", param, ctx)


def as_option(setting: Setting) -> click.Option:
    name, kind, more = setting.option, setting.kinds[0], dict[str, Any](metavar=setting.said.metavar)
    said = [setting.help, f" [{setting.default_text}]" if setting.default_text else ""]
    if kind is bool:
        name, more = f"{name}/--no-{name[2:]}" if setting.default else name, {"is_flag": True, "default": None}
    elif setting.default == {} and setting.said.parse is None:
        said[1], more = "Repeatable.", {"multiple": True, "metavar": "KEY=VALUE"}
    else:
        more["type"] = _Count() if len(setting.kinds) > 1 else kind if kind in (int, float) else str
    return click.Option([name, setting.parameter], help=" ".join(said).strip(), **more)


def _groups() -> dict[str, list[click.Option]]:
    """Every option that becomes a setting of the run, under the heading it has in --help."""
    groups: dict[str, list[click.Option]] = {title: [] for title in TITLES}
    for setting in sorted(SETTINGS.values(), key=lambda each: each.part == "training"):  # what is of the ring first
        if not setting.option:
            continue
        group = groups[setting.said.group]
        if setting.name == "optimizer_settings":
            usual = ", ".join(f"{name} {rule.settings['lr'].default:g}" for name, rule in OPTIMIZERS.items())
            group.append(click.Option(["--lr"], type=float, help=f"Learning rate, short for --opt lr=RATE.  [{usual}]"))
        group.append(as_option(setting))
    return groups


GROUPS = _groups()

#: What people call an option elsewhere.
_ELSEWHERE = {
    "--learning-rate": "--lr", "--batch": "--batch-size", "--bs": "--batch-size", "--workers": "--nodes",
    "--num-nodes": "--nodes", "--world-size": "--nodes", "--processes": "--nodes", "--dataset": "--data",
    "--optim": "--optimizer", "--num-epochs": "--epochs", "--max-steps": "--steps", "--iterations": "--steps",
    "--output": "--run-dir", "--out": "--run-dir", "--output-dir": "--run-dir", "--random-seed": "--seed",
    "--momentum": "--opt momentum=…", "--weight-decay": "--opt weight_decay=…", "--grad-clip": "--clip-norm",
    "--width": "--set width=…", "--depth": "--set depth=…", "--dropout": "--set dropout=…", "--dtype": "--wire",
}  # fmt: skip


class RunCommand(click.Command):
    """A verb with the options of a run: --help shows them in groups, and an unknown option gets the one that was meant."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = {name for each in self.params if isinstance(each, click.Option) for name in each.opts}
            meant = _ELSEWHERE.get(error.option_name)
            if meant is None or meant.split()[0] not in known:
                meant = nearest(error.option_name, known)
            hint = f"did you mean {meant}? " if meant else ""
            raise UsageError(f"no option {error.option_name}: {hint}see ringtmp {self.name} --help") from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        group_of = {option.name: title for title, options in GROUPS.items() for option in options}
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in (*GROUPS, _REST)}
        for each in self.get_params(ctx):
            if (record := each.get_help_record(ctx)) is not None:
                option, text = record
                sections[group_of.get(each.name, _REST)].append((option, text.replace("[default: ", "[")))
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


_REST = "This command"


def run_options(command: click.Command) -> click.Command:
    """Adds CONFIG and every option that becomes a setting of the run; the verb's own options stay below."""
    config = click.Argument(["config"], required=False, type=click.Path(path_type=Path))
    command.params = [config, *(option for options in GROUPS.values() for option in options), *command.params]
    return command


def flags(given: dict[str, Any]) -> dict[str, Any]:
    """What a user gave, by the names of the settings' fields; `given` has what `run_options` declared, less CONFIG."""
    found: dict[str, Any] = {}
    for setting in SETTINGS.values():
        value = given.get(setting.parameter)
        if isinstance(value, tuple):
            value = parse_pairs(setting.option, value) or None
        elif value is not None and setting.said.parse is not None:
            value = setting.said.parse(value)
        if value is not None:
            found[setting.name] = value
    if given["lr"] is not None:
        found["optimizer_settings"] = {**found.get("optimizer_settings", {}), "lr": given["lr"]}
    if {"epochs", "steps"} <= found.keys():
        _command_line_wins(found)
    return found


def _command_line_wins(found: dict[str, Any]) -> None:
    """Of epochs and steps, the one on the command line takes the place of the other in the environment."""
    source = click.get_current_context().get_parameter_source
    typed = {name: source(name) is ParameterSource.COMMANDLINE for name in ("epochs", "steps")}
    if typed["epochs"] != typed["steps"]:
        del found["steps" if typed["epochs"] else "epochs"]
