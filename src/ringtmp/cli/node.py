"""ringtmp node"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from ringtmp.errors import UsageError

if TYPE_CHECKING:
    from ringtmp.launch.join_token import Token


@click.command("node")
@click.option("--join", metavar="TOKEN|-|@FILE", help="The token the master printed (or RINGTMP_TOKEN).")
@click.option("--ring", help="Without a token: join the ring of this name.  [the one that is found]")
@click.option("--no-discovery", is_flag=True, help="Do not look for rings on the network: a token is needed.")
@click.option("--name", help="Name of this device: 1 to 32 of a-z, 0-9 and '-'.  [the host name]")
@click.option("--listen", metavar="ADDRESS", help="Address for neighbours.  [the one that reaches the master]")
@click.option("--threads", type=click.IntRange(1, 1024), metavar="N", help="Lend at most N cores.  [all]")
@click.option(
    "--memory", "memory_mb", type=click.IntRange(1), metavar="MB", help="Lend at most MB MiB.  [all free memory]"
)
@click.option(
    "--device", type=click.Choice(["cpu", "cuda", "mps", "auto"]), default="cpu", show_default=True,
    help="Where this device computes.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Serve one run, then exit.")
@click.option(
    "--install", is_flag=True, help="Serve after every start of this device, too (a systemd unit of the user)."
)
@click.option("--uninstall", is_flag=True, help="Undo --install.")
def command(
    join: str | None, ring: str | None, no_discovery: bool, name: str | None, listen: str | None, threads: int | None,
    memory_mb: int | None, device: str, once: bool, install: bool, uninstall: bool,
) -> None:  # fmt: skip
    """Join a ring and serve its runs until Ctrl-C.

    Without a token it looks for rings on the local network and asks for the code that the master shows. Needs no settings, no
    copy of the model and no data. The key pair of this device is made on first use and kept in ~/.config/ringtmp, or in
    RINGTMP_CONFIG.
    """
    import msgspec

    from ringtmp.launch import agent, device_facts, device_names, key_store, system_service

    if uninstall:
        _tell_all(system_service.uninstall())
        return
    if install and once:
        raise UsageError("--install serves run after run: leave out --once")
    if name is not None:
        device_names.checked_name("device", name)
    given = _token(join, ring, no_discovery, listen)
    host, _, port = given.address.rpartition(":")
    address = device_facts.parse_listen(listen, 1)[0] if listen else device_facts.address_towards(host, int(port))
    found = device_facts.device_facts(name)
    mine = msgspec.structs.replace(
        found,
        address=address,
        cores=min(found.cores, threads or found.cores),
        memory_bytes=min(found.memory_bytes, (memory_mb or 10**9) * 2**20),
    )
    own = key_store.identity()
    hub = agent.join(given, own, mine)
    if install:
        options = {"--name": name, "--listen": listen, "--threads": threads, "--memory": memory_mb, "--device": device}
        words = [word for option, value in options.items() if value is not None for word in (option, str(value))]
        _tell_all(system_service.install(given, words))
        return
    _say(f"joined ring {given.ring} at {given.address} as {mine.name}; links on {address}; Ctrl-C leaves")

    serving = agent.Agent(given, hub, own, mine, address, _say, memory_bytes=(memory_mb or 0) * 2**20, device=device)
    with serving.leaves_on_signals():
        try:
            serving.run(once)
        finally:
            serving.close()


def _token(join: str | None, ring: str | None, no_discovery: bool, listen: str | None) -> Token:
    """The one that was given, or the one that pairing gives."""
    from ringtmp.launch import announce, join_token, key_store, pair_device

    if join is not None or os.environ.get("RINGTMP_TOKEN") or no_discovery:
        if ring is not None:
            raise UsageError("--ring is for joining without a token: a token says which ring it is for")
        return join_token.given(join)
    if not announce.available():
        raise UsageError(
            "no join token: give --join TOKEN, --join - (standard input), --join @FILE or RINGTMP_TOKEN; to find rings on "
            "the network instead, pip install 'ringtmp[discovery]'"
        )
    _say("no token: looking for rings on this network")
    found = pair_device.choose(announce.look(hosts=[listen] if listen else None), ring, _ask, _say)
    return pair_device.pair_with(found, key_store.identity(), _ask, _say)


def _ask(question: str) -> str:
    """On stderr, so that it is seen where output goes elsewhere."""
    print(f"ringtmp node: {question}: ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer:
        raise UsageError(f"{question}: there is nobody to ask; join with a token instead (--join)")
    return answer


def _say(text: str) -> None:
    from ringtmp.untrusted import printable

    print(f"ringtmp node: {printable(text)}", file=sys.stderr, flush=True)


def _tell_all(lines: list[str]) -> None:
    for line in lines:
        _say(line)
