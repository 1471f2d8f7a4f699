"""ringtmp ring"""

from __future__ import annotations

import click

from ringtmp.errors import UsageError

_RING = click.option("--ring", default="home", show_default=True, help="Name of the ring.")


@click.group("ring")
def command() -> None:
    """Manage the tokens and devices of the rings that have this machine as master."""


@command.command()
@_RING
@click.option(
    "--uses", default=1, show_default=True, type=click.IntRange(1, 1000), help="How many devices may join with it."
)
@click.option("--qr", is_flag=True, help="Show the line for a device as a QR code, too.")
@click.option(
    "--address", metavar="ADDRESS:PORT",
    help="Where the master will listen, if it has not yet: the ring is made. For a home, --ring homes and the port of "
    "--home-listen.",
)  # fmt: skip
def token(ring: str, uses: int, qr: bool, address: str | None) -> None:
    """Print a new token that is valid for an hour. The master must be waiting (ringtmp train --listen) when it is used."""
    from ringtmp.launch import join_token as tokens
    from ringtmp.launch.key_store import Rings

    rings = Rings()
    if address is not None:
        host, _, port = address.rpartition(":")
        if not (host and port.isdigit() and 1 <= int(port) <= 65000):
            raise UsageError(f"--address {address!r} is not ADDRESS:PORT with a port from 1 to 65000")
        rings.open(ring, create=True)
        rings.set_address(ring, address)
    file = rings.open(ring)
    if not file.address:
        raise UsageError(f"no master has used ring {ring} yet: run ringtmp train --listen ADDRESS first")
    line = tokens.encode(tokens.Token(ring, file.address, file.public, rings.new_secret(ring, uses)))
    print(line)
    if qr:
        from ringtmp.launch.ways_to_join import qr_code

        print(qr_code(f"ringtmp node --join {line}"))


@command.command("list")
@click.option("--ring", help="List only this ring.")
def list_(ring: str | None) -> None:
    """List the rings and the devices admitted to them."""
    from ringtmp.launch.key_store import Rings

    rings = Rings()
    for name in [ring] if ring else rings.names():
        file = rings.open(name)
        print(
            f"{name}  {file.address or 'has never listened'}  {len(file.nodes)} admitted, {len(file.revoked)} revoked"
        )
        for node in file.nodes:
            print(f"  {node.name}  {node.key}")


@command.command()
@click.argument("node")
@_RING
def release(node: str, ring: str) -> None:
    """Take NODE (a name or key) out of the current run at the end of a step. It stays admitted."""
    from ringtmp.launch.key_store import Rings

    found = Rings().release(ring, node)
    print(f"{found.name} ({found.key}) is released from the run of ring {ring}")


@command.command()
@click.argument("node")
@_RING
def revoke(node: str, ring: str) -> None:
    """Shut NODE (a name or key) out for good. A run that it is part of notices within a second."""
    from ringtmp.launch.key_store import Rings

    found = Rings().revoke(ring, node)
    print(f"{found.name} ({found.key}) is out of ring {ring}")
