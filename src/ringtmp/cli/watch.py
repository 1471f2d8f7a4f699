"""ringtmp watch"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("watch")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to serve on.  [8650, or the next that is free]")
@click.option("--open", "open_browser", is_flag=True, help="Open the page in a browser on this machine.")
def command(runs: tuple[Path, ...], port: int | None, open_browser: bool) -> None:
    """Show RUN in a browser: the ring, who works and who waits, the loss, what happened. While the run goes on the page follows
    it; when it has ended the page replays it. Several runs stand side by side on one time axis.

    The page is for this machine only. The printed addresses have secrets in them: one to look, one to act.
    """
    from ringtmp.dashboard.serve import Addresses, Place, require_web, serve
    from ringtmp.dashboard.which_runs import checked_runs

    require_web()

    def announce(found: Addresses) -> None:
        for line in found.lines():
            print(line, flush=True)
        if open_browser:
            _open(found.look)

    serve(checked_runs(runs), Place(port=port), announce)


def _open(address: str) -> None:
    import sys
    import webbrowser

    if not webbrowser.open(address):
        print("there is no browser here: open the address yourself, on this machine", file=sys.stderr)
