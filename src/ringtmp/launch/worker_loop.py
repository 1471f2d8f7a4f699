"""The life of a node other than the master, in a process of its own: work until told to stop, then say goodbye."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from ringtmp.launch.watchdog import Watchdog
from ringtmp.plan.route import MASTER
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.runtime.worker import Worker
from ringtmp.strategies.registry import member
from ringtmp.strategies.ring.device_trials import Answers
from ringtmp.wire.address import Address
from ringtmp.wire.messages import Failed

WAIT_S = 0.2
FAREWELL_LIMIT_S = 1.0


def work(endpoint: Endpoint, master: Address, alone: Callable[[], bool] = lambda: False) -> int:
    """The exit code. `alone`: there is nobody left to work for."""
    worker = Worker(endpoint, master, member, Answers())
    code = 0
    try:
        watchdog = Watchdog(lambda: worker.step)
        while worker.stopped is None:
            with watchdog:
                worked = worker.turn()
            if not worked:
                if alone():
                    return 1
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
