"""`ringtmp train --supervised`: the options as words again, for the master that this process starts and starts again."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ringtmp.config import RunConfig
from ringtmp.dashboard.beside_training import page_beside
from ringtmp.errors import UsageError
from ringtmp.launch.rank_environment import Rank
from ringtmp.launch.supervise import RESTARTS, SUPERVISED, Begun, Supervisor, command, goes_on
from ringtmp.system.files import default_run_dir
from ringtmp.untrusted import printable

_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
#: What this process sees to itself.
_OURS = ("supervised", "restarts", "silent_after", "dashboard", "dashboard_port")
#: What a run's directory does not hold: it is said again whenever its master is started again.
_SAID_AGAIN = ("listen", "ring_name", "start_with", "wait_s", "discovery", "qr", "home_listen", "home_join", "homes", "logs",
               "as_json", "quiet")  # fmt: skip
#: Cuts and window are dropped from a run's settings where the number of nodes is given again.
_SAID_WITH_NODES = ("cuts", "window")
#: A device that is gone for good is not waited for without a limit.
_START_WITH, _WAIT_S = 2, 60


def is_supervised() -> bool:
    """Whether this process is a master that somebody starts again."""
    return os.environ.get(SUPERVISED) == str(os.getppid())


def restarts_allowed(supervised: bool, restarts: int | None, silent_after_s: float | None, rank: Rank | None) -> int:
    if supervised and rank is not None:
        raise UsageError("--supervised is for a master of its own: torchrun --max-restarts N starts ranks again")
    if not supervised and (restarts is not None or silent_after_s is not None):
        raise UsageError(f"{'--restarts' if restarts is not None else '--silent-after'} goes with --supervised")
    return RESTARTS if restarts is None else restarts


def supervise(config: RunConfig, chosen: dict[str, Any], restarts: int, page: list[str] | None) -> None:
    """Ends with the master's exit code. `page`: options of the live page, which is served once for all masters."""
    given = click.get_current_context().params
    if config.training.data == "-":
        raise UsageError(
            "--data - cannot be --supervised: what a killed master had read from standard input cannot be read again; use a "
            "file or a factory"
        )
    run = given["resume"] or given["run_dir"] or default_run_dir()
    begun = _begun(run, config, chosen)
    if given["resume"] is None and goes_on(run, begun.words):
        _say(f"going on with {run}")
    with ExitStack() as beside:
        if page is not None:
            beside.enter_context(page_beside(run, page, _say))
        silent_after_s = given["silent_after"]
        code = Supervisor(run, begun, restarts, _say, command(), silent_after_s=silent_after_s).to_the_end()
    sys.exit(code)


def _begun(run: Path, config: RunConfig, chosen: dict[str, Any]) -> Begun:
    context = click.get_current_context()
    words = _words(lambda name: name not in _OURS and (name not in ("epochs", "steps") or name in chosen))
    again = [f"--resume={run}", *_words(lambda name: name in _SAID_AGAIN)]
    nodes = config.ring.nodes
    if context.params["resume"] is not None:
        return Begun(tuple(words), tuple(words), tuple(words))
    if context.params["listen"] is not None:
        again += [f"--nodes={nodes}", *_words(lambda name: name in _SAID_WITH_NODES)]
        if context.params["start_with"] is None and nodes > _START_WITH:
            again += [f"--start-with={_START_WITH}", f"--wait={_WAIT_S}"]
    first = words if context.params["run_dir"] is not None else [f"--run-dir={run}", *words]
    return Begun(tuple(words), tuple(again if goes_on(run, words) else first), tuple(again))


def _words(wanted: Callable[[str], bool]) -> list[str]:
    """What was given, on the command line or in the environment, as words of a command line."""
    context, found = click.get_current_context(), list[str]()
    for each in context.command.params:
        name = str(each.name)
        if context.get_parameter_source(name) not in _GIVEN or not wanted(name):
            continue
        value = context.params[name]
        if isinstance(each, click.Argument):
            found.append(str(value))
            continue
        option = max(each.opts, key=len)
        if isinstance(value, bool):
            found += [option] if value else each.secondary_opts[:1]
        else:
            found += [f"{option}={one}" for one in (value if isinstance(value, tuple) else (value,))]
    return found


def _say(text: str) -> None:
    print(f"ringtmp: {printable(text)}", file=sys.stderr, flush=True)
