"""A compute process: one node of one run, in one generation. Its parent gives orders on standard input; it ends with it.

Over TCP it makes link keys of its own, says on standard output where it listens, and waits for the word where the
master is; the keys of its neighbours come later, from the master, over the encrypted link.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ringtmp.wire.address import Address

if TYPE_CHECKING:
    from ringtmp.runtime.snapshot_store import SnapshotStore


class Orders(msgspec.Struct, frozen=True):
    ring: str
    generation: int
    node: int
    endpoints: tuple[str, str, str]
    master: Address
    threads: int
    secure: bool = False
    memory_bytes: int = 0  # what this device lends; 0: what is free
    snapshots: str = ""  # a folder for snapshots; whoever gives the orders removes it
    device: str = "cpu"  # where it computes, as --device says
    log: str = ""  # a file to write to from here on; empty: as it was started


class Bound(msgspec.Struct, frozen=True):
    """The first line a compute process writes when it is secure."""

    address: Address


#: On standard input, before it is closed: leave your snapshots in their folder.
LEAVE = b"leave\n"
#: On the command line: load everything before orders come.
SPARE = "spare"
#: What a spare one says when it has only to be told its orders.
LOADED = b"loaded\n"
GRACE_S = 1.0


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if SPARE in sys.argv[1:]:
        _load()
        with contextlib.suppress(OSError):  # its orders may be there already: nobody listens
            os.write(sys.stdout.fileno(), LOADED)
    line = sys.stdin.buffer.readline()
    if not line:
        return 0  # a spare one that was not needed: its parent is gone
    orders = msgspec.json.decode(line, type=Orders)
    if orders.log:
        _write_to(orders.log)
    stores: list[SnapshotStore] = []
    threading.Thread(target=_follow_parent, args=(stores,), daemon=True).start()

    from ringtmp.system.resources import raise_file_limit
    from ringtmp.transport.encryption import new_key_pair
    from ringtmp.transport.slow_link import slowed
    from ringtmp.transport.zeromq import ZeroMQTransport

    raise_file_limit()
    transport = ZeroMQTransport(orders.node, orders.endpoints, new_key_pair() if orders.secure else None)
    if orders.secure:
        sys.stdout.buffer.write(msgspec.json.encode(Bound(transport.address)) + b"\n")
        sys.stdout.buffer.flush()

    _load()
    from ringtmp.launch.worker_loop import work
    from ringtmp.runtime import compute_device
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.runtime.snapshot_store import SnapshotStore
    from ringtmp.system.resources import free_memory_bytes, limit_memory, set_threads

    set_threads(orders.threads)
    compute_device.use(compute_device.find(orders.device, orders.node))
    if orders.secure:
        limit_memory(orders.memory_bytes or free_memory_bytes())
    # On a device that joined there may be what a process before this one has left.
    snapshots = SnapshotStore(Path(orders.snapshots), taken_up=orders.secure) if orders.snapshots else SnapshotStore()
    if orders.secure:
        stores.append(snapshots)
    endpoint = Endpoint(
        slowed(transport), orders.ring, orders.generation, limit_bytes=orders.memory_bytes, snapshots=snapshots
    )
    return work(endpoint, orders.master)


def _load() -> None:
    """Torch above all: two seconds on a fast machine."""
    from ringtmp.system.resources import loading

    with loading():
        import ringtmp.launch.worker_loop
        import ringtmp.transport.zeromq  # noqa: F401
    gc.freeze()  # all of it stays as long as the process


def _write_to(log: str) -> None:
    try:
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError:  # costs the log, not the run
        file = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def _follow_parent(stores: list[SnapshotStore]) -> None:
    """The pipe closes when the parent is gone or wants us gone. The moment's grace lets a farewell through."""
    said = b""
    while more := os.read(sys.stdin.fileno(), len(LEAVE)):
        said = (said + more)[-len(LEAVE) :]
    if said != LEAVE:
        threading.Event().wait(GRACE_S)
    for each in stores if said == LEAVE else ():
        with contextlib.suppress(OSError):  # no room: the run goes on from its checkpoint
            each.leave()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
