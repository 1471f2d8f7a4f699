"""A compute process: one node of one run. Started by its parent with orders on standard input, ends with it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback

import msgspec


class Orders(msgspec.Struct, frozen=True):
    ring: str
    generation: int
    node: int
    address: str
    master_address: str
    threads: int


WAIT_S = 0.2
FAREWELL_LIMIT_S = 2.0


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=Orders)
    threading.Thread(target=_follow_parent, daemon=True).start()

    from ringtmp.plan.route import MASTER
    from ringtmp.resources import set_threads
    from ringtmp.ring.endpoint import Endpoint
    from ringtmp.ring.worker import Worker
    from ringtmp.transport.zeromq import ZeroMQTransport
    from ringtmp.wire.message import Failed

    set_threads(orders.threads)
    endpoint = Endpoint(ZeroMQTransport(orders.node, orders.address), orders.ring, orders.generation)
    worker = Worker(endpoint, orders.master_address)
    code = 0
    try:
        while worker.stopped is None:
            if not worker.turn():
                endpoint.wait(WAIT_S)
    except Exception as error:  # whatever it is, the master must hear of it
        traceback.print_exc()
        endpoint.post(MASTER, Failed(worker.step, f"{type(error).__name__}: {error}", traceback.format_exc()))
        code = 1
    limit = endpoint.clock() + FAREWELL_LIMIT_S
    while not endpoint.flushed() and endpoint.clock() < limit:
        endpoint.collect()
        endpoint.wait(0.02)
    endpoint.close()
    return code


def _follow_parent() -> None:
    """The pipe closes when the parent is gone or wants us gone. The moment's grace lets a farewell through."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    threading.Event().wait(FAREWELL_LIMIT_S)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
