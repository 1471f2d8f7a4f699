"""`ringtmp`, and python -m ringtmp. Ctrl-C is minded before anything that takes time to load."""

from __future__ import annotations

from ringtmp.system.end_with_parent import end_with_parent
from ringtmp.system.signals import held


def main() -> None:
    end_with_parent()
    with held(nothing_started=True):
        from ringtmp.cli import main as run
    run()


if __name__ == "__main__":
    main()
