"""ringtmp watch"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("watch")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to serve on.  [8650, or the next that is free]")
@click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="ADDRESS",
    help="Address of this machine to serve on; any other than its own loopback is encrypted.",
)  # fmt: skip
@click.option("--act/--no-act", default=None, help="Whether an address to act is given out.  [on this machine only]")
@click.option(
    "--view",
    type=click.Choice(["page", "ring"]),
    default="page",
    show_default=True,
    help="A page for browsers, or the ring here in the terminal.",
)
@click.option("--open", "open_browser", is_flag=True, help="Open the page in a browser on this machine.")
@click.option("--beside", is_flag=True, hidden=True, help="End a moment after standard input does.")
def command(
    runs: tuple[Path, ...], port: int | None, host: str, act: bool | None, view: str, open_browser: bool, beside: bool
) -> None:
    """Show RUN in a browser: the ring, who works and who waits, the loss, what happened. While the run goes on the page follows
    it; when it has ended the page replays it. Several runs stand side by side on one time axis.

    The printed addresses have secrets in them: one to look, one to act (stop, checkpoint, release a device). On another
    address than this machine's own the page is encrypted with a certificate made for it, and is to look at only, unless
    --act is given.
    """
    if view == "ring":
        _in_terminal(runs)
        return

    from ringtmp.dashboard.beside_training import Ending
    from ringtmp.dashboard.find_runs import checked_runs
    from ringtmp.dashboard.listen_until_stopped import Addresses, Place, require_web, serve

    require_web()

    def announce(found: Addresses) -> None:
        print("\n".join(found.lines()) + ("\n" if beside else ""), flush=True)
        if open_browser:
            _open(found.look)

    serve(list(runs) if beside else checked_runs(runs), Place(host, port, act), announce, Ending() if beside else None)


def _in_terminal(runs: tuple[Path, ...]) -> None:
    import sys

    from ringtmp.dashboard.find_runs import checked_runs
    from ringtmp.dashboard.terminal_view import watch
    from ringtmp.errors import UsageError

    if len(runs) > 1:
        raise UsageError("a terminal shows one run: leave out the others, or --view ring")
    watch(checked_runs(runs)[0], sys.stdout)


def _open(address: str) -> None:
    """In a browser with a window. One that runs in the terminal would keep the page's server waiting, and cannot draw it."""
    import sys
    import webbrowser

    try:
        browser = webbrowser.get()
        opened = type(browser) is not webbrowser.GenericBrowser and browser.open(address)
    except webbrowser.Error:
        opened = False
    if not opened:
        print("there is no browser here: open the address yourself, on this machine", file=sys.stderr)
