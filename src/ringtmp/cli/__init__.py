"""The command line: one small file per verb. Nothing here imports torch before a verb runs."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import Any

import click

from ringtmp import __version__
from ringtmp.errors import RingError, UsageError
from ringtmp.system.platforms import require_supported
from ringtmp.untrusted import printable

_VERBS = {
    "train": "Train a model on a ring.",
    "plan": "Show what a run would do, without starting it.",
    "node": "Lend this device to a ring.",
    "ring": "Manage the tokens and devices of your rings.",
    "lab": "Run a ring on emulated devices on this machine.",
    "bench": "Measure the ring against other ways to train.",
    "evaluate": "Print the loss and accuracy of a run's newest checkpoint.",
    "predict": "Predict from a file with a run's newest checkpoint.",
    "generate": "Write a text on with a run's newest checkpoint.",
    "export": "Write a run's weights to files that need no ringtmp.",
    "watch": "Show runs in a browser, while they last or afterwards.",
    "report": "Write a page with charts of a run.",
    "compare": "Say which of several runs was better and why.",
    "trace": "Write a run's timeline for Perfetto or Chrome.",
    "strategies": "List the ways to train and their settings.",
    "doctor": "Check whether this device is ready for a ring.",
    "env": "Print what a bug report needs.",
}


class _Verbs(click.Group):
    """Loads a verb's file only when it is used, so that --help answers at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _VERBS:
            return None
        command: click.Command = importlib.import_module(f"ringtmp.cli.{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(_VERBS.items()))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        from ringtmp.errors import unknown

        if args and not args[0].startswith("-") and args[0] not in _VERBS:
            raise unknown("verb", args[0], _VERBS)
        return super().resolve_command(ctx, args)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "RINGTMP"})
@click.version_option(__version__, prog_name="ringtmp")
def ringtmp() -> None:
    """Train one neural network on a ring of small computers, with the bits of a single process."""


def main() -> None:
    """Exit codes: 0 done, 1 failed, 2 wrong usage, 3 does not fit, 4 lost a node, 130 interrupted."""
    try:
        require_supported()
        ringtmp.main(standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Abort:
        _end("interrupted", 130)
    except click.ClickException as error:
        _end(error.format_message(), UsageError.exit_code)
    except RingError as error:
        _end(str(error), error.exit_code)
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except BrokenPipeError:
        _forget_output()
        sys.exit(RingError.exit_code)
    except Exception as error:
        text = _of_the_system(error)
        if text is None:
            raise
        _end(text, RingError.exit_code)


def _end(text: str, code: int) -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _forget_output()
    print(f"ringtmp: {printable(text)}", file=sys.stderr)
    sys.exit(code)


def _forget_output() -> None:
    """What nobody takes: Python would try once more at the end, and complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


#: How the C library, the linker, Python and torch say that there is no memory.
_NO_MEMORY = ("allocate memory", "not enough memory", "failed to map segment", "start new thread")


def _address_space_is_limited() -> bool:
    import resource

    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def _of_the_system(error: Exception) -> str | None:
    """What the machine refused, in a sentence; None if it is none of that, but a mistake of ours."""
    from ringtmp.system.resources import out_of_files

    if (shortage := out_of_files(error)) is not None:
        return shortage
    said = str(error)
    # Out of address space a library may fail to load, or the interpreter lose the error on its way.
    lost = isinstance(error, SystemError | ImportError) and _address_space_is_limited()
    if isinstance(error, MemoryError) or lost or any(words in said for words in _NO_MEMORY):
        detail = f": {said.splitlines()[0]}" if said else ""
        return f"too little memory for this process (ulimit -v, the container's limit, or the machine's own){detail}"
    if isinstance(error, OSError) and error.errno is not None:
        what = f"{error.filename}: " if error.filename else "cannot write the output or a file of the run: "
        return f"{what}{os.strerror(error.errno)}"
    if isinstance(error, UnicodeEncodeError):
        return f"the output cannot be written in {error.encoding}: set PYTHONUTF8=1"
    return None
