"""Sentences that name settings as the command line does, for somebody who calls from Python: `--nodes 3` is `nodes=3`.

Errors are raised far below, where nobody knows who asked. They spell a setting in one way, as its option, and are put into
the caller's spelling in one place, where `Ring` hands them on. Only options that are declared are changed, and none in a
line to be typed in a shell (`ringtmp train --resume RUN`).
"""

from __future__ import annotations

import re

from ringtmp.config.build import SETTINGS
from ringtmp.config.setting_declaration import Setting

#: What is no setting of a run, or has another name in Python: without and with a value.
_OTHERS = {
    "--resume": ("resume", "resume({})"), "--run-dir": ("run_dir=", "run_dir={}"), "--listen": ("listen=", "listen={}"),
    "--lr": ("lr", "lr={}"), "--data": ("train_data=", "train_data={}"), "--opt": ("optimizer=", "{} of optimizer="),
}  # fmt: skip
_COMMAND = r"ringtmp [a-z]+(?: --?[a-z-]+| [A-Z@]\S*| \S*[/.:]\S*)*"
_OPTION = r"(?<![\w-])(?P<option>--[a-z][a-z-]*)(?: (?P<value>'[^']*'|[^\s,;:()]+(?:[,:][^\s,;:()]+)*))?"
_FIELD = rf"\b(?:{'|'.join(sorted({each.part for each in SETTINGS.values()}))})\.(?P<field>\w+)\b"
_ANY = re.compile(f"{_COMMAND}|{_OPTION}|{_FIELD}")
_BY_OPTION = {setting.option: setting for setting in SETTINGS.values() if setting.option}
_NEGATED = {f"--no-{option.removeprefix('--')}": setting for option, setting in _BY_OPTION.items()}


def as_keywords(text: str) -> str:
    return _ANY.sub(_respelled, text)


def _respelled(found: re.Match[str]) -> str:
    option, value, field = found["option"], found["value"], found["field"]
    if field in SETTINGS:
        return f"{SETTINGS[field].keyword}="
    if option is None:
        return found[0]
    end = "" if value is None else found[0][found.end("option") - found.start() :]
    if option in _OTHERS:
        bare, called = _OTHERS[option]
        return called.format(_shown(value)) if value is not None and _is_value(value) else f"{bare}{end}"
    setting = _BY_OPTION.get(option) or _NEGATED.get(option)
    if setting is None or (setting.part == "model" and setting.name != "name"):  # which Python has no word for
        return found[0]
    if setting.kinds == (bool,):
        return f"{setting.keyword}={option in _BY_OPTION}{end}"
    keyword = "model" if setting.part == "model" else setting.keyword
    if value is not None and value.isupper():  # what stands for a value
        return f"{keyword}={value}"
    told = found.string[found.end() :].startswith(": ")  # of this value: no word of the sentence ends so
    if value is None or not (_is_value(value) or _is_name(setting, value) or told):
        return f"{keyword}={end}"
    name, equals, inner = value.partition("=")
    if isinstance(setting.default, dict) and equals:
        return f"{keyword}={{{name!r}: {_shown(inner)}}}"
    return f"{keyword}={_shown(value)}"


def _is_value(word: str) -> bool:
    """Rather than the next word of the sentence."""
    return re.search(r"[\d'/._=*|:,]", word.rstrip(".")) is not None


def _is_name(setting: Setting, word: str) -> bool:
    """One of its choices; a setting that usually has a name is always followed by one."""
    return word in (*setting.choices, "auto") or (isinstance(setting.default, str) and setting.default != "")


def _shown(value: str) -> str:
    number = re.fullmatch(r"-?\d+(\.\d+)?", value) is not None
    return value if number or value.startswith("'") else repr(value)
