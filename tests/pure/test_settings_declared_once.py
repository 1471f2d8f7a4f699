"""A setting is declared once: options, environment, files, keywords, ranges, help and docs all follow from it."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import click
import msgspec
import pytest
from click.testing import CliRunner

from ringtmp.api import Ring, named_model
from ringtmp.cli.options import GROUPS, RunCommand, as_option, flags, run_options
from ringtmp.cli.settings import build
from ringtmp.config import SETTINGS, ModelPart, RunConfig, Setting, checked, replaced, value_of
from ringtmp.config.keyword_arguments import checked_keywords, taken_by
from ringtmp.config.setting_declaration import Declaration, settings_of
from ringtmp.data import source_registry
from ringtmp.errors import UsageError
from ringtmp.run.check_settings import resolve
from ringtmp.runtime.losses import loss_named

ROOT = Path(__file__).parents[2]
OPTIONS = {option.name: option for options in GROUPS.values() for option in options}
#: A value other than the default for each kind of setting: as text for an option, and as Python has it.
OTHER: dict[str, tuple[str, Any]] = {
    "batch_size": ("48", 48), "microbatches": ("auto", "auto"), "clip_norm": ("0.5", 0.5), "wire": ("int8", "int8"),
    "optimizer_settings": ("momentum=0.9", {"momentum": 0.9}), "settings": ("depth=8", {"depth": 8}),
    "lr_schedule": ("cosine:warmup=3", {"kind": "cosine", "warmup": 3}), "schedule": ("gpipe", "gpipe"),
    "strategy_settings": ("servers=2", {"servers": 2}), "notice_s": ("7.5", 7.5), "name": ("gpt", "gpt"),
    "all_devices": ("", True), "cuts": ("0-1,2", "0-1,2"),
    "blocks": ("model.layers.*,head", "model.layers.*,head"),
}  # fmt: skip


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("settings_tables", ROOT / "scripts/write_settings_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_and_types_that_are_made_from_the_declarations_are_current(script: ModuleType) -> None:
    for path, text in script.files().items():
        assert (ROOT / path).read_text() == text, f"{path}: run python scripts/write_settings_tables.py"
    written = "".join(script.files().values())
    assert all(f"`{setting.name}`" in written for setting in SETTINGS.values())


def _read(args: list[str], file: Path | None = None, env: dict[str, str] | None = None) -> RunConfig:
    """What a command with the options of a run makes of them."""
    found: list[RunConfig] = []

    @run_options
    @click.command("train", cls=RunCommand)
    def command(config: Path | None, **given: Any) -> None:
        found.append(build(file, flags(given)))

    done = CliRunner().invoke(command, args, env=env, auto_envvar_prefix="RINGTMP_TRAIN")
    assert done.exception is None, done.exception
    return found[0]


@pytest.mark.parametrize("name", OTHER)
def test_option_environment_file_and_python_mean_the_same(name: str, tmp_path: Path) -> None:
    setting, (text, value) = SETTINGS[name], OTHER[name]
    expected = replaced(RunConfig(), {name: value})
    assert value_of(expected, name) != setting.default
    assert _read([setting.option, *([text] if text else [])]) == expected
    assert _read([], env={f"RINGTMP_TRAIN_{setting.parameter.upper()}": text or "1"}) == expected
    inline = (
        "{" + ", ".join(f"{key} = {each!r}" for key, each in value.items()) + "}" if isinstance(value, dict) else ""
    )
    toml = inline or ("true" if value is True else repr(value))
    (tmp_path / "run.toml").write_text(f"[{setting.part}]\n{name} = {toml}\n")
    assert _read([], tmp_path / "run.toml") == expected


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.name)
def test_every_setting_has_its_help_its_default_and_its_place(setting: Setting) -> None:
    assert setting.help.endswith(".")
    checked(replaced(RunConfig(), {setting.name: setting.default}))
    if setting.option:
        text = OPTIONS[setting.parameter].help or ""
        assert text.startswith(setting.help)
        assert f"[{setting.default_text}]" in text or not setting.default_text
    if setting.choices:
        assert setting.default in setting.choices
        assert all(choice in setting.help for choice in setting.choices)


@pytest.mark.parametrize(
    "setting", [each for each in SETTINGS.values() if each.range_text], ids=lambda setting: setting.name
)
def test_a_value_beyond_its_range_is_refused_with_the_range(setting: Setting) -> None:
    said = setting.said
    beyond = [said.above] if said.above is not None else [said.least - 1] if said.least is not None else []
    beyond += [said.most + 1] if said.most is not None else []
    for value in map(setting.kinds[0], beyond):
        with pytest.raises(UsageError, match=f"{setting.title} {value} must be {setting.range_text}"):
            resolve(replaced(RunConfig(), {setting.name: value}))


class Extra(msgspec.Struct, frozen=True):
    """A part of the settings with one that does not exist: all it takes to add one."""

    pace_s: Annotated[float, Declaration("Seconds between beats.", "Training", least=1, most=9, option="pace")] = 3.5
    colour: Annotated[Literal["red", "blue"], Declaration("Colour of the beat: {choices}.", "Training")] = "blue"


def test_a_new_setting_is_one_declaration() -> None:
    pace, colour = settings_of({"extra": Extra}).values()
    option, other = as_option(pace), as_option(colour)
    assert (option.opts, option.help) == (["--pace"], "Seconds between beats.  [3.5]")
    assert (other.opts, other.help) == (["--colour"], "Colour of the beat: red or blue.  [blue]")
    with pytest.raises(UsageError, match="--pace 9.5 must be from 1 to 9"):
        pace.check(9.5)
    assert pace.resumable
    assert (pace.keyword, pace.keyword_of) == ("pace_s", "Ring")


def test_numbers_that_are_none_are_refused() -> None:
    for name, value in (("clip_norm", float("nan")), ("clip_norm", float("inf")), ("notice_s", float("nan"))):
        with pytest.raises(UsageError, match="must be"):
            resolve(replaced(RunConfig(), {name: value}))


def test_help_of_python_shows_every_setting_with_its_default() -> None:
    for call, function in (("Ring", Ring.__init__), ("fit", Ring.fit)):
        shown = inspect.signature(function).parameters
        for keyword, setting in taken_by(call).items():  # type: ignore[arg-type]
            assert shown[keyword].default == setting.default
        assert not any(each.kind is each.VAR_KEYWORD for each in shown.values())


@pytest.mark.parametrize(
    ("call", "given", "says"),
    [
        ("Ring", {"epochs": 3}, r"epochs is an argument of fit: write Ring\(\.\.\.\)\.fit\(\.\.\., epochs=\.\.\.\)"),
        (
            "Ring",
            {"tau": 4},
            "Ring has no argument 'tau': if it is a setting of the strategy, write settings={'tau': 4};",
        ),
        ("Ring", {"strategy_settings": {"tau": 4}}, "Ring has no argument 'strategy_settings': did you mean settings?"),
        ("Ring", {"scedule": "gpipe"}, "Ring has no argument 'scedule': did you mean schedule?"),
        ("fit", {"laps": 2}, r"laps is an argument of Ring: write Ring\(laps=\.\.\.\)\.fit"),
    ],
)
def test_a_keyword_in_the_wrong_place_is_told_where_it_belongs(call: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        checked_keywords(call, Ring.__init__ if call == "Ring" else Ring.fit, given)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[training]\nnodes = 3\n", r"nodes is not a setting in \[training\] of .*: write it as nodes in \[ring\]"),
        ("[keep]\nnotice = 3\n", r"notice is not a setting in \[keep\] of .*: write it as notice_s in \[keep\]"),
        ("[model]\nmodel = 'gpt'\n", r"write it as name in \[model\]"),
        ("[ring]\nnodse = 3\n", r"unknown setting in \[ring\] of .* 'nodse': did you mean 'nodes'"),
        ("[ring]\nnodes = 'three'\n", r"ring.nodes must be a whole number, not text \(.*run.toml\)"),
        (
            "[model]\nsettings = { depth = 'x' }\n",
            r"model.settings\[...\] must be a whole number or a number, not text",
        ),
    ],
)
def test_a_settings_file_that_is_wrong_says_what_to_write(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UsageError, match=says):
        build(tmp_path / "run.toml", {})


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("optimizer", lambda: resolve(replaced(RunConfig(), {"optimizer": "?"}))),
        ("lr_schedule", lambda: resolve(replaced(RunConfig(), {"lr_schedule": {"kind": "?"}}))),
        ("loss", lambda: loss_named("?")),
        ("name", lambda: named_model(ModelPart("?"), source_registry.load("digits", 0, {})[0])),
    ],
)
def test_the_help_names_everything_there_is(name: str, asked: Any) -> None:
    with pytest.raises(UsageError) as refused:
        asked()
    known = str(refused.value).partition("choose from ")[2].split(", ")
    assert len(known) > 1
    assert [each for each in known if each not in SETTINGS[name].help] == []


#: The fields of settings files and run directories of before settings were declared like this.
BEFORE = {
    "model": "name settings",
    "training": "data loss epochs steps batch_size microbatches optimizer optimizer_settings lr_schedule clip_norm seed "
    "threads wire staleness early_stop",
    "ring": "strategy strategy_settings nodes all_devices cuts window schedule laps route recompute rebalance",
    "keep": "checkpoint_every detailed_steps protect notice_s stream_keep",
}


def test_settings_files_and_run_directories_of_before_are_still_read() -> None:
    assert {(part, name) for part, names in BEFORE.items() for name in names.split()} <= {
        (setting.part, setting.name) for setting in SETTINGS.values()
    }
