"""The table of published systems in docs/strategies.md, as `ringtmp strategies --markdown` prints it.

python scripts/write_systems_table.py        writes it into the page; test_published_systems.py checks that it is current
"""

from __future__ import annotations

from pathlib import Path

from ringtmp.strategies import published_systems, registry

PAGE = Path(__file__).parent.parent / "docs" / "strategies.md"
BEGIN, END = "<!-- made by scripts/write_systems_table.py -->\n", "<!-- end -->\n"


def page(text: str) -> str:
    """The page with the table as it should be; strategies of installed packages are not in it."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + published_systems.markdown(published_systems.all_rows(registry.OURS.values())) + END + after


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
