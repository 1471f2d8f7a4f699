"""Where the other home is, as the command line or Python says it, becomes a line that is opened when the run begins."""

from __future__ import annotations

from collections.abc import Callable

from ringtmp.errors import UsageError
from ringtmp.launch.device_facts import parse_listen
from ringtmp.launch.device_names import checked_name
from ringtmp.run.meet_home import Line
from ringtmp.run.what_to_train import OpenLine

USUAL_NAME = "homes"


def line_to_home(listen: str | None, join: str | None, name: str = USUAL_NAME) -> OpenLine | None:
    """None: there is one home. `listen`: ADDRESS[:PORT]; `join`: a token, `-` or @FILE; `name` of the ring of homes."""
    if listen is not None and join is not None:
        raise UsageError("--home-listen and --home-join: one home listens, the other joins; give one of them")
    if listen is not None:
        from ringtmp.launch.key_store import Rings
        from ringtmp.launch.line_to_home import DEFAULT_PORT, ListeningHome

        host, port = parse_listen(listen, DEFAULT_PORT, "--home-listen")
        ring = checked_name("ring of homes", name)
        return lambda tell: ListeningHome(Rings(), ring, host, port, tell)
    if join is not None:
        from ringtmp.launch import join_token
        from ringtmp.launch.line_to_home import JoiningHome

        token = join_token.given(join)

        def joined(tell: Callable[[str], None]) -> Line:
            return JoiningHome(token, tell)

        return joined
    return None
