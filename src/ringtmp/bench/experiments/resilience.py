"""resilience: a worker, a server or the master is taken away while a model is trained.

Time to notice, time until the next step, work done again, accuracy at the end, and whether the weights have the bits of a
run in which nobody was lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Literal

import msgspec

from ringtmp.bench.analysis import page_drawings
from ringtmp.bench.bench_request import Choices
from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.measurement_files import Measured
from ringtmp.bench.programs.node_removal import Removal
from ringtmp.bench.training_runs import common_runs
from ringtmp.bench.training_runs.device_setups import DEVICES, RINGTMP, lab, program
from ringtmp.bench.training_runs.strategy_variants import RING, SERVER, Way, parse
from ringtmp.bench.training_runs.train_commands import Cell, cell, local, train_words
from ringtmp.bench.training_runs.workloads import Workload
from ringtmp.lab.devices_file import toml
from ringtmp.report.page_content import Figure, Holds, Mark, Section, Series, Skipped, Table, Verdict
from ringtmp.units import seconds_text

AIM = "RingTMP is as resilient as a parameter server"
PAUSE_S = 6.0
#: The ring counts as resilient as the server if it trains again within this many times the server's time.
AS_SOON = 2.0
CHECKPOINT_EVERY = "10"
#: Where one of two servers is lost.
SERVED_NODES = 4
What = Literal["process", "device", "pause", "master"]
_TEXT = {
    "process": "{role}'s process killed",
    "device": "{role}'s device gone for good",
    "pause": f"{{role}}'s device away for {PAUSE_S:g} s",
    "master": "the master killed and resumed",
}


class Loss(msgspec.Struct, frozen=True):
    """One way losing one node."""

    way: Way
    nodes: int
    what: What
    node: int
    role: str

    @property
    def text(self) -> str:
        return _TEXT[self.what].format(role=f"{'the' if self.node == 0 else 'a'} {self.role}")


#: Who loses somebody.
_RING, _SERVER, _ALLREDUCE = "ring:protect=auto", "ps:bsp:protect=auto", "allreduce:ring:protect=auto"
_REPLICATED = "ps:bsp:servers=2:replicas=1:protect=auto"


def losses(choices: Choices) -> list[Loss]:
    ring, server, replicated = parse(_RING), parse(_SERVER), parse(_REPLICATED)
    nodes = choices.nodes
    found = [
        Loss(ring, nodes, "device", nodes - 1, "worker"),
        Loss(server, nodes, "device", nodes - 1, "worker"),
        Loss(ring, nodes, "master", 0, "master"),
    ]
    if not choices.quick:
        found.append(Loss(replicated, SERVED_NODES, "process", 1, "server"))
        if _enough(choices):
            found += [Loss(replicated, SERVED_NODES, what, 1, "server") for what in _AWAY]
        found += [Loss(way, nodes, what, nodes - 1, "worker") for way in (ring, server) for what in _SOFT]
        found.append(Loss(server, nodes, "master", 0, "master"))
        found += [Loss(way, nodes, "pause", 0, "master") for way in (ring, server)]
        found += [Loss(parse(_ALLREDUCE), nodes, what, nodes - 1, "worker") for what in _HARD]
    wanted = {way.strategy for way in choices.ways}
    return [each for each in found if each.way.strategy in wanted]


def _enough(choices: Choices) -> bool:
    """Whether two servers with two workers find a device each."""
    return len(choices.place(SERVED_NODES)) == SERVED_NODES


_SOFT: tuple[What, ...] = ("process", "pause")
_HARD: tuple[What, ...] = ("device", "process")
_AWAY: tuple[What, ...] = ("device", "pause")


def job(choices: Choices, loss: Loss) -> Job:
    work = _work(choices, loss.way)
    words = [*train_words(loss.way, work, loss.nodes), "--checkpoint-every", CHECKPOINT_EVERY]
    files, device = {}, ""
    if loss.what in ("device", "pause"):
        devices = choices.place(loss.nodes)
        words = [*lab(choices.emulated, choices.slowed)[len(RINGTMP) :], *words, "--all-devices"]
        # The master is where the file says; where the others are is the order of joining.
        files, device = {DEVICES: toml(devices)}, devices[0].name if loss.node == 0 else ""
    else:
        words += ["--nodes", str(loss.nodes), "--threads", "1"]
    removal = Removal(tuple(words), loss.what, loss.node, work.steps // 2, PAUSE_S, device)
    return Job(
        experiment="resilience",
        workload=f"{work.name} s{work.steps}",
        setting=f"{loss.what} {loss.role} of {loss.nodes}" + ("" if choices.emulated else " processes"),
        case=loss.way.label,
        command=program("programs.node_removal", removal),
        files=files,
        output="told",
        batch_size=work.batch_size,
        warm_up=0,
        options={"nodes": loss.nodes},
    )


def undisturbed(choices: Choices, loss: Loss) -> Cell:
    """The same run with nobody lost. Its weights depend neither on where it runs nor on what is kept for a loss: so it is
    the run of the task, where there is one."""
    plain = next((way for way in choices.ways if _same_weights(way, loss.way)), None)
    if plain is not None and loss.nodes == choices.nodes:
        return cell(choices, plain, _work(choices, loss.way), choices.place(choices.nodes))
    way = msgspec.structs.replace(loss.way, label=f"{loss.way.label} undisturbed")
    return local(way, _work(choices, loss.way), loss.nodes, "undisturbed")


def _same_weights(one: Way, other: Way) -> bool:
    flags = [{key: value for key, value in way.flags.items() if key != "protect"} for way in (one, other)]
    return (one.strategy, one.settings, flags[0]) == (other.strategy, other.settings, flags[1])


def jobs(choices: Choices) -> list[Job]:
    every = losses(choices)
    return [*(job(choices, each) for each in every), *(undisturbed(choices, each).job for each in every)]


def section(choices: Choices, measured: Measured) -> Section:
    every = losses(choices)
    runs = [(each, job(choices, each)) for each in every]
    facts = [(each, disturbed(measured.facts(run))) for each, run in runs]
    rows = [_row(choices, each, found, measured) for each, found in facts if found]
    left = [
        Skipped(f"{each.way.label}: {each.text}", why)
        for each, run in runs
        if (why := measured.problem(run) or _too_soon(measured.facts(run)))
    ]
    left += _skipped(choices)
    columns = ("strategy", "what happened", "noticed after", "trained again after", "steps repeated", "test accuracy",
               "undisturbed", "bits", "outcome")  # fmt: skip
    return Section(
        "resilience",
        "Resilience",
        "Times run from the removal until the master notices, and until the end of the next step. For a killed master they "
        "include starting a new one; where nothing had to restart, they end with the longest pause. "
        f"Medians over repeats. An aim holds where the ring goes on as the server does, trains again within {AS_SOON:g} times "
        "its time, and keeps the bits where the server does. Processes and the master are removed on plain processes "
        "of this machine, without links; devices in the lab.",
        tuple(_verdicts(choices, facts, measured)),
        tuple(each for each in (_figure(each, found) for each, found in facts) if each is not None),
        (Table("What a loss costs", columns, tuple(rows)),),
        tuple(left),
    )


def _work(choices: Choices, way: Way) -> Workload:
    """The task, at the rate of the plain way that trains alike."""
    plain = next((each for each in choices.ways if each.strategy == way.strategy and each.like_one_process), way)
    return common_runs.tuned(choices, plain)


def _number(facts: Sequence[Any], key: str) -> float | None:
    """Median over repeats; None where any has none."""
    values = [each.get(key) for each in facts]
    return None if not values or any(value is None for value in values) else float(median(values))


def disturbed(facts: Sequence[Any]) -> list[Any]:
    """A run in which nobody was removed says nothing of it."""
    return [each for each in facts if each.get("removed")]


def _too_soon(facts: Sequence[Any]) -> str | None:
    early = [each for each in facts if not each.get("removed")]
    why = next((f": {each['error']}" for each in early if each.get("error")), "")
    return f"{len(early)} of {len(facts)} runs never came to the removal{why}" if early else None


def survived(facts: Sequence[Any]) -> bool:
    return all(each.get("code") == 0 and each.get("removed") for each in facts)


def same_bits(facts: Sequence[Any], reference: Sequence[Any]) -> bool | None:
    """None where there is nothing to compare with."""
    wanted = {each.get("weights_sha256") for each in reference}
    if not facts or len(wanted) != 1 or None in wanted:
        return None
    return {each.get("weights_sha256") for each in facts} == wanted


def _row(choices: Choices, loss: Loss, facts: Sequence[Any], measured: Measured) -> tuple[str, ...]:
    reference = measured.facts(undisturbed(choices, loss).job)
    notice, again, repeated = (_number(facts, key) for key in ("notice_s", "again_s", "repeated"))
    accuracy, before = _number(facts, "accuracy"), _number(reference, "accuracy")
    bits = same_bits(facts, reference)
    failed = [each for each in facts if each.get("code") != 0]
    outcome = f"failed: {failed[0].get('error')}" if failed else "went on"
    return (
        loss.way.label,
        loss.text,
        seconds_text(notice) if notice is not None else "by resuming" if loss.what == "master" else "no new start",
        seconds_text(again) if again is not None else "never",
        f"{repeated:.0f}" if repeated is not None else "",
        f"{accuracy:.1%}" if accuracy is not None else "",
        f"{before:.1%}" if before is not None else "",
        {None: "", True: "same", False: "other"}[bits],
        outcome,
    )


def _verdicts(choices: Choices, facts: Sequence[tuple[Loss, Sequence[Any]]], measured: Measured) -> list[Verdict]:
    """Per kind of loss: the ring against the parameter server, by whether it went on, with which bits, after how long."""
    found = []
    for text in dict.fromkeys(loss.text for loss, made in facts if made):
        group = [(loss, made) for loss, made in facts if made and loss.text == text]
        parts, alive, again, exact = [], {}, {}, {}
        for loss, made in group:
            reference = measured.facts(undisturbed(choices, loss).job)
            strategy = loss.way.strategy
            alive[strategy], again[strategy] = survived(made), _number(made, "again_s")
            exact[strategy] = same_bits(made, reference)
            ends = {True: "the same bits", False: "other bits", None: "bits unknown"}[exact[strategy]]
            values = sorted(each["again_s"] for each in made if each.get("again_s") is not None)
            spread = f" ({seconds_text(values[0])}–{seconds_text(values[-1])})" if len(values) > 1 else ""
            after = again[strategy]
            time = f"trains again after {seconds_text(after)}{spread}" if after is not None else "never trains again"
            parts.append(f"{loss.way.label} {'goes on' if alive[strategy] else 'ends'}, {time}, {ends}")
        ring_s = again.get(RING)
        number = seconds_text(ring_s) if ring_s is not None else ""
        found.append(Verdict(f"{AIM}: {group[0][0].text}", f"{'; '.join(parts)}.", _holds(alive, again, exact), number))
    return found


def _holds(alive: dict[str, bool], again: dict[str, float | None], exact: dict[str, bool | None]) -> Holds:
    """As resilient: goes on where the other does, trains again within AS_SOON times its time, and keeps the bits if it does."""
    if RING not in alive or SERVER not in alive:
        return "no" if alive.get(RING) is False else "open"
    if alive[RING] != alive[SERVER]:
        return "yes" if alive[RING] else "no"
    ring_s, server_s = (math.inf if again[way] is None else again[way] or 0.0 for way in (RING, SERVER))
    worse = exact[SERVER] is True and exact[RING] is False
    return "yes" if alive[RING] and ring_s <= AS_SOON * server_s and not worse else "mixed"


def _figure(loss: Loss, facts: Sequence[Any]) -> Figure | None:
    """Steps per second around the loss, first repeat."""
    line = facts[0].get("timeline") if facts else None
    if not line or len(line) < 3:
        return None
    times = [at for at, _ in line]
    middles = tuple((a + b) / 2 for a, b in pairwise(times))
    speeds = tuple(1 / max(1e-6, b - a) for a, b in pairwise(times))
    name = page_drawings.slug(f"{loss.way.label}-{loss.what}-{loss.role}")
    return Figure(
        f"around-{name}", f"Steps per second around the loss: {loss.way.label}, {loss.text}", "lines",
        "seconds since the removal", "steps per second", (Series(loss.way.label, middles, speeds),),
        marks=(Mark(0.0, "removed"),), caption="First repeat; a gap in speed is time in which nothing was learned.",
    )  # fmt: skip


def _skipped(choices: Choices) -> list[Skipped]:
    found = [
        Skipped(
            "wires, staleness, async and ssp", "a loss is tried with the plain ring, ps:bsp and allreduce:ring alone"
        )
    ]
    if choices.quick:
        found.append(
            Skipped(
                "a device away for a while, a server's process killed, other strategies",
                "small sizes; ringtmp bench resilience has them",
            )
        )
    found.append(
        Skipped("ps:bsp: its only server removed", "the server is the master; see the master killed and resumed")
    )
    if not choices.quick and not _enough(choices):
        found.append(Skipped("a server's device gone or away", f"{SERVED_NODES} devices are needed for it"))
    found.append(
        Skipped("the master's device gone for good", "the run's directory is on it; see the master killed and resumed")
    )
    return found
