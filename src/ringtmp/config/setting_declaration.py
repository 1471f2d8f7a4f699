"""How a setting is declared, and a setting with everything that follows from its declaration."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from ringtmp.errors import UsageError, unknown


@dataclass(frozen=True)
class Declaration:
    """What is said of a field beside its type and default, in `Annotated[type, Declaration(...)]`."""

    help: str  # {choices} stands for the values it may have
    group: str = ""  # the heading in --help; empty: no option, for settings files and Python only
    least: float | None = None
    most: float | None = None
    above: float | None = None
    choices: Collection[str] = ()  # of a text; a Literal has its own
    usual: str = ""  # what happens where the default is no value
    bits: bool = False  # another value gives other weights
    resume: bool | None = None  # a resumed run may change it; None: if it changes no bits
    split: bool = False  # has a meaning only where layers are split over nodes
    option: str = ""  # the option's name, if not the field's
    variable: str = ""  # the end of its environment variable in small letters, if not the option's
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None  # from the option's text
    keyword: str = ""  # the name in Python, if not the field's
    keyword_of: Literal["Ring", "fit", ""] = ""  # who takes it; empty: Ring what is of the ring, fit the rest
    own: bool = False  # fit has an argument of its own that says more than the setting can


@dataclass(frozen=True)
class Setting:
    """A field of a part of RunConfig with its declaration."""

    part: str
    name: str
    kind: Any
    default: Any
    said: Declaration

    @property
    def option(self) -> str:
        """--batch-size"""
        return f"--{(self.said.option or self.name).replace('_', '-')}" if self.said.group else ""

    @property
    def parameter(self) -> str:
        """What click calls the option, and in capitals the end of its environment variable."""
        return self.said.variable or self.said.option or self.name

    @property
    def title(self) -> str:
        """What errors call it."""
        return self.option or f"{self.part}.{self.name}"

    @property
    def resumable(self) -> bool:
        return not self.said.bits if self.said.resume is None else self.said.resume

    @property
    def keyword(self) -> str:
        return self.said.keyword or self.name

    @property
    def keyword_of(self) -> str:
        """Which call takes it as a plain keyword: Ring, fit or none."""
        if self.said.own or self.part == "model":
            return ""
        return self.said.keyword_of or ("fit" if self.part in ("training", "keep") else "Ring")

    @cached_property
    def kinds(self) -> tuple[Any, ...]:
        """int | None -> (int,)"""
        found = get_args(self.kind) if get_origin(self.kind) not in (None, dict, Literal) else (self.kind,)
        return tuple(each for each in found if each is not type(None))

    @property
    def choices(self) -> tuple[str, ...]:
        literal = get_args(self.kinds[0]) if get_origin(self.kinds[0]) is Literal else ()
        return tuple(self.said.choices) or literal

    @property
    def help(self) -> str:
        return self.said.help.format(choices=listed(self.choices, "or"))

    @property
    def default_text(self) -> str:
        """What applies where nothing is given; empty: nothing worth a word."""
        if self.default is None or self.default == "" or self.default == {}:
            return self.said.usual
        if isinstance(self.default, bool):
            return "yes" if self.default else ""
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def range_text(self) -> str:
        """'at least 1', '0 or 1', 'from 1 to 3600'"""
        least, most = self.said.least, self.said.most
        if self.said.above is not None:
            return f"above {self.said.above:g}"
        if least is None:
            return ""
        if most is None:
            return f"at least {least:g}"
        return f"{least:g} or {most:g}" if most == least + 1 else f"from {least} to {most}"

    def check(self, value: Any) -> None:
        """Refuses what is out of range or none of the choices; the type is right."""
        if isinstance(value, str) and self.said.choices and value not in self.said.choices:
            raise unknown(self.name.replace("_", "-"), value, self.said.choices)
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.range_text:
            return
        said = self.said
        low = value > said.above if said.above is not None else said.least is None or value >= said.least
        if not (low and (said.most is None or value <= said.most) and math.isfinite(value)):
            raise UsageError(f"{self.title} {value} must be {self.range_text}")


def listed(words: tuple[str, ...], last: str) -> str:
    """'a, b or c'"""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def settings_of(parts: dict[str, type[msgspec.Struct]]) -> dict[str, Setting]:
    """The settings that structs declare, by field name; no two have the same."""
    found: dict[str, Setting] = {}
    for part, kind in parts.items():
        hints = get_type_hints(kind, include_extras=True)
        for field in msgspec.structs.fields(kind):
            default = {} if field.default is msgspec.NODEFAULT else field.default
            plain, said = get_args(hints[field.name])
            assert field.name not in found, f"two settings are called {field.name}"
            found[field.name] = Setting(part, field.name, plain, default, said)
    return found
