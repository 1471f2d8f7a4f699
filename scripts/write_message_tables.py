"""The tables of docs/security.md that say who may say what, made from the classes of the messages.

python scripts/write_message_tables.py        writes them into the page; test_who_may_send_what.py checks that they are current
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from ringtmp.launch import agent_messages
from ringtmp.wire.messages import MESSAGES
from ringtmp.wire.who_may_send import Phase, Who

PAGE = Path(__file__).parent.parent / "docs" / "security.md"
BEGIN, END = "<!-- made by scripts/write_message_tables.py -->\n", "<!-- end -->\n"


def tables() -> str:
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for kind in MESSAGES:
        rule = kind.RULE
        when = (
            "always"
            if rule.when == ~Phase(0)
            else ", ".join((each.name or "").lower() for each in Phase if each & rule.when)
        )
        key = (_words(rule.by), _words(rule.to), when, rule.channel.name.lower())
        rows.setdefault(key, []).append(f"`{kind.__name__}`")
    text = "| by | to | when | channel | messages |\n|---|---|---|---|---|\n"
    for key, names in sorted(rows.items()):
        text += f"| {' | '.join(key)} | {', '.join(sorted(names))} |\n"
    text += "\nAgents and the master, before and beside a run:\n\n| by, to | messages |\n|---|---|\n"
    for at in agent_messages.Heard:
        kinds = (*get_args(agent_messages.FromAgent), *get_args(agent_messages.FromMaster))
        text += f"| {at.value} | {', '.join(f'`{kind.__name__}`' for kind in kinds if at in kind.AT)} |\n"
    return text


def _words(group: tuple[Who, ...]) -> str:
    return "anyone" if set(group) == {Who.MASTER, Who.NODE} else " or ".join(who.value for who in group)


def page(text: str) -> str:
    """The page with the tables as they should be."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + tables() + END + after


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
