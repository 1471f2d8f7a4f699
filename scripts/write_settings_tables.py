"""Write what follows from the declarations of the settings: the tables in docs/ and the types of Python's keywords.

python scripts/write_settings_tables.py            writes them
python scripts/write_settings_tables.py --check    exit code 1 if one is not current
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from ringtmp.config import SETTINGS, Setting
from ringtmp.config.keyword_arguments import Call, taken_by
from ringtmp.config.setting_declaration import listed

ROOT = Path(__file__).resolve().parent.parent
KEYWORDS = "src/ringtmp/config/keyword_types.py"


def settings_page() -> str:
    """For docs/settings.md: a table per section, and the environment."""
    blocks = []
    for part in dict.fromkeys(setting.part for setting in SETTINGS.values()):
        rows = [_row(setting) for setting in SETTINGS.values() if setting.part == part]
        blocks += [f"**`[{part}]`**", _table(("field", "option", "meaning", "default", "bits", "resume"), rows)]
    odd = [
        f"`{setting.option}` is `RINGTMP_TRAIN_{setting.parameter.upper()}`"
        for setting in SETTINGS.values()
        if setting.option and setting.parameter != setting.option[2:].replace("-", "_")
    ]
    return "\n\n".join([*blocks, textwrap.fill(f"In the environment {listed(tuple(odd), 'and')}.", 120)])


def resumable() -> str:
    """For docs/runs.md: what --resume may change."""
    names = [setting.option if setting.default is not True else f"--[no-]{setting.option[2:]}"
             for setting in SETTINGS.values() if setting.resumable and setting.option]  # fmt: skip
    half = (len(names) + 1) // 2
    return "\n".join("    " + "  ".join(part) for part in (names[:half], names[half:]))


def keywords(call: Call) -> Callable[[], str]:
    """For docs/api.md: the settings a call takes."""

    def table() -> str:
        rows = [
            (f"`{name}`", _meaning(setting), _default(setting), _yes(setting.said.bits))
            for name, setting in sorted(taken_by(call).items(), key=lambda each: each[1].said.keyword_of != "")
        ]
        return _table(("argument", "meaning", "default", "bits"), rows)

    return table


def keyword_types() -> str:
    """A TypedDict for the keywords of each call, for type checkers and editors."""
    lines = [
        '"""Types of settings given by keyword, written by scripts/write_settings_tables.py: change settings.py instead."""',
        "",
        "from __future__ import annotations",
        "",
        "from collections.abc import Mapping",
        "from typing import Any, Literal, TypedDict",
    ]
    calls: tuple[tuple[Call, str], ...] = (("Ring", "RingKeywords"), ("fit", "FitKeywords"))
    for call, name in calls:
        lines += ["", "", f"class {name}(TypedDict, total=False):"]
        # The first argument of Ring is the number of nodes, so it is no keyword of these.
        taken = {key: setting for key, setting in taken_by(call).items() if key != "nodes"}
        lines += [f"    {key}: {_kind(setting.kind)}" for key, setting in taken.items()]
    return "\n".join(lines) + "\n"


def _row(setting: Setting) -> tuple[str, ...]:
    return (
        f"`{setting.name}`",
        f"`{setting.option}`" if setting.option else "",
        _meaning(setting),
        _default(setting),
        _yes(setting.said.bits),
        _yes(setting.resumable),
    )


def _meaning(setting: Setting) -> str:
    allowed = f" Must be {setting.range_text}." if setting.range_text and setting.name != "seed" else ""
    return setting.help + allowed


def _default(setting: Setting) -> str:
    text = setting.default_text
    return f"`{text}`" if text and text == str(setting.default) else text


def _yes(flag: bool) -> str:
    return "yes" if flag else ""


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    texts = ("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return "\n".join(texts).replace("  |", " |")


def _kind(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(f'{each!r}' for each in get_args(kind))}]".replace("'", '"')
    if get_origin(kind) is dict:
        return "Mapping[str, Any] | None"
    if get_args(kind):
        return " | ".join(_kind(each) for each in get_args(kind))
    return "None" if kind is type(None) else str(kind.__name__)


#: What stands between `<!-- settings: NAME -->` and `<!-- end -->` in a page.
BLOCKS: dict[str, Callable[[], str]] = {
    "all": settings_page, "resumable": resumable, "Ring": keywords("Ring"), "fit": keywords("fit"),
}  # fmt: skip
PAGES = ("docs/settings.md", "docs/api.md", "docs/runs.md")


def current(page: str) -> str:
    """The page with its blocks made anew."""
    text = (ROOT / page).read_text()
    for name, block in BLOCKS.items():
        before, mark, rest = text.partition(f"<!-- settings: {name} -->\n")
        if mark:
            text = before + mark + block() + "\n" + rest[rest.index("<!-- end -->") :]
    return text


def files() -> dict[str, str]:
    """Everything that is written, by path."""
    return {KEYWORDS: keyword_types(), **{page: current(page) for page in PAGES}}


def main() -> int:
    stale = [path for path, text in files().items() if not (ROOT / path).exists() or (ROOT / path).read_text() != text]
    for path in stale:
        if "--check" in sys.argv:
            print(f"{path} is not current: run python scripts/write_settings_tables.py", file=sys.stderr)
        else:
            (ROOT / path).write_text(files()[path])
            print(path)
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
