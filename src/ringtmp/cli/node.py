"""ringtmp node"""

from __future__ import annotations

import sys

import click


@click.command("node")
@click.option("--join", metavar="TOKEN|-|@FILE", help="The token the master printed (or RINGTMP_TOKEN).")
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
def command(
    join: str | None,
    name: str | None,
    listen: str | None,
    threads: int | None,
    memory_mb: int | None,
    device: str,
    once: bool,
) -> None:
    """Join a ring and serve its runs until Ctrl-C.

    Needs no settings, no copy of the model and no data. The key pair of this device is made on first use and kept in
    ~/.config/ringtmp, or in RINGTMP_CONFIG.
    """
    import msgspec

    from ringtmp.launch import agent, device_facts, join_token, key_store, names

    given = join_token.given(join)
    if name is not None:
        names.checked_name("device", name)
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
    _say(f"joined ring {given.ring} at {given.address} as {mine.name}; links on {address}; Ctrl-C leaves")

    serving = agent.Agent(given, hub, own, mine, address, _say, memory_bytes=(memory_mb or 0) * 2**20, device=device)
    with serving.leaves_on_signals():
        try:
            serving.run(once)
        finally:
            serving.close()


def _say(text: str) -> None:
    from ringtmp.untrusted import printable

    print(f"ringtmp node: {printable(text)}", file=sys.stderr, flush=True)
