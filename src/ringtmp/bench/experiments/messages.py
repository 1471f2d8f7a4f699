"""messages: the one-way latency of a small tensor between two processes.

Node to node over encrypted TCP, bare ZeroMQ sockets with the same encryption, and Gloo unencrypted, in turns. One-way latency
is half a round trip. The table has the median, minimum and maximum of the rounds' medians.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from ringtmp.bench.bench_request import Choices
from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.measurement_files import Measured
from ringtmp.bench.programs import message_round_trip
from ringtmp.bench.training_runs.device_setups import program
from ringtmp.report.page_content import Section, Table


def jobs(choices: Choices) -> list[Job]:
    exchange = message_round_trip.Exchange(choices.size_bytes, choices.count, choices.rounds)
    return [
        Job(
            experiment="messages",
            workload=f"{choices.size_bytes} bytes",
            setting="two processes",
            case=f"{choices.rounds} rounds of {choices.count}",
            command=program("programs.message_round_trip", exchange),
            files={},
            output="told",
            batch_size=1,
            warm_up=0,
        )
    ]


def results(choices: Choices, measured: Measured) -> dict[str, Any]:
    """Seconds one way, a value per round."""
    taken = [each for job in jobs(choices) for each in measured.results(job)]
    one_way_s = {
        "node to node, encrypted": [second for each in taken for second in each.step_s],
        "bare ZeroMQ, encrypted": [second for each in taken for second in each.facts["bare_s"]],
        "Gloo, in the clear": [second for each in taken for second in each.facts["gloo_s"]],
    }
    return {"size_bytes": choices.size_bytes, "count": choices.count, "one_way_s": one_way_s}


def section(choices: Choices, measured: Measured) -> Section:
    rows = tuple(
        (name, *(f"{1e6 * value(seconds):.0f} us" for value in (median, min, max)))
        for name, seconds in results(choices, measured)["one_way_s"].items()
        if seconds
    )
    title = f"{choices.size_bytes} bytes, one way, {choices.rounds} rounds of {choices.count}"
    table = Table(title, ("path", "median", "minimum", "maximum"), rows)
    missing = measured.missing(jobs(choices))
    return Section("messages", "Messages", (__doc__ or "").partition("\n\n")[2].strip(), (), (), (table,), missing)
