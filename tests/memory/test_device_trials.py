"""What is found out of devices before a plan: pace and quota, memory, and lines by latency and rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as Folder
from typing import cast

import pytest
import torch

from ringtmp.errors import ProtocolError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from ringtmp.metrics.event_log import EventLog
from ringtmp.model import portable_layer
from ringtmp.model.export import Exporter
from ringtmp.plan.devices import (
    NETWORK_MESSAGE_CPU_S,
    Device,
    LayerCost,
    Measured,
    Path,
    Paths,
    Quota,
    latency_between,
    rate_between,
)
from ringtmp.plan.memory_forecast import PROCESS_BYTES
from ringtmp.runtime.base_leader import Start
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.runtime.snapshot_store import SnapshotStore
from ringtmp.strategies.ring import device_trials
from ringtmp.strategies.ring.device_trials import Answers, DeviceTrials
from ringtmp.strategies.ring.link_trials import (
    LINES_S,
    MIDDLE_BYTES,
    MOST_BYTES,
    MOST_ROUNDS,
    PING_CPU_S,
    SMALL_BYTES,
    Attempt,
    Line,
    Lines,
    disjoint,
    neighbours_of,
    rounds_of,
)  # fmt: skip
from ringtmp.strategies.ring.trial_results import SILENT_BYTES_PER_S, Seen, described, doubtful, settled
from ringtmp.wire.messages import Crossing, Echo, Echoed, Sample, Timed, Tried

MIB = 2**20


@pytest.mark.parametrize(("head_bytes", "chosen"), [(device_trials.WORKING_BYTES + 1, 1), (2**20, 2)])
def test_a_head_too_large_to_be_had_twice_is_no_sample(head_bytes: int, chosen: int) -> None:
    """The master of a ring that heals holds its own head beside the sample."""
    linear, _ = Exporter().export("x", torch.nn.Linear(4, 4), torch.ones(3, 4))
    costs = [
        LayerCost(name, (Measured(2, seconds, seconds, 64, 32),), size, 0, 0)
        for name, seconds, size in (("embed", 0.1, 64), ("block", 0.2, 64), ("head", 0.9, head_bytes))
    ]
    crossing = Crossing("float32", (4,), True)
    found = device_trials.sample_of([linear] * 3, costs, lambda training, value: crossing, 2, 3)
    assert found is not None
    assert found[0] == chosen


@pytest.mark.long
def test_frozen_layers_that_a_device_still_holds_are_not_counted_twice() -> None:
    """A ring that heals plans with their weights again: a master that had room for them before has it still."""
    linear, _ = Exporter().export("x", torch.nn.Linear(4, 4), torch.ones(3, 4))
    sample = Sample(portable_layer.encode(linear), (Crossing("float32", (4,), True),), 2, 1, 1)
    store = SnapshotStore()
    store.keep_frozen(3, {"table": torch.ones(2**22)})
    assert store.frozen_bytes == 2**24
    plain, less = device_trials.timed(sample), device_trials.timed(sample, store.frozen_bytes)
    assert plain.rss_bytes - less.rss_bytes > 2**23, "but for what comes and goes meanwhile"


def test_a_quota_is_told_apart_from_a_slow_processor() -> None:
    told = [Timed(0.01, 300 * MIB, 900 * MIB), Timed(0.02, 250 * MIB, 0, 0.5, 0.01), Timed(0.02, 230 * MIB, 0)]
    there = [Device(name) for name in "abc"]
    (master, shared, slow), _ = described(there, [0, 1, 2], Seen(dict(enumerate(told)), {}, {}), 0.01, 1)
    assert (master.speed, master.quota) == (1.0, None)
    assert (shared.speed, shared.quota) == (1.0, Quota(0.005, 0.01)), "full speed, half of the time"
    assert (slow.speed, slow.quota) == (0.5, None)
    assert shared.pace == slow.pace == 0.5
    assert (master.extra_bytes, master.memory_bytes) == (300 * MIB - PROCESS_BYTES, 900 * MIB)
    assert shared.link.message_cpu_s == NETWORK_MESSAGE_CPU_S


def test_devices_of_one_quota_that_hardly_differ_are_taken_to_be_alike() -> None:
    told = [Timed(seconds, PROCESS_BYTES, 2**30, 0.5, 0.01) for seconds in (0.95, 1.0, 1.1, 1.3)]
    told.append(Timed(1.0, PROCESS_BYTES, 2**30, 0.45, 0.01))
    found, _ = described([Device(name) for name in "abcde"], range(5), Seen(dict(enumerate(told)), {}, {}), 1.0, 1)
    middle = 1.0
    assert [each.pace for each in found] == pytest.approx([1 / middle, 1 / middle, 1 / middle, 1 / 1.3, 1.0])


def test_latencies_of_both_ends_add_up_and_an_untried_line_is_as_the_slowest() -> None:
    told = Timed(1.0, PROCESS_BYTES, 2**30)
    lines = {1: Line(100.0, 50.0, 0.004), 2: Line(900.0, 900.0, 0.010)}
    looked = Seen(dict.fromkeys(range(4), told), lines, {})
    found, _ = described([Device(name) for name in "abcd"], range(4), looked, 1.0, 1)
    assert [each.link.latency_s for each in found] == pytest.approx([0.002, 0.002, 0.008, 0.002])
    assert found[0].link.latency_s + found[2].link.latency_s == pytest.approx(0.010), "as it was measured"
    assert (found[1].link.down_bytes_per_s, found[1].link.up_bytes_per_s) == (100.0, 50.0)
    assert found[3].link.up_bytes_per_s == 50.0
    assert found[0].link.up_bytes_per_s == 900.0, "the master's own line is no slower than what came over it"


class Paper:
    """An endpoint whose lines are on paper: what goes there and back takes as long as their rates say."""

    def __init__(self, down: float, up: float, latency_s: float, burst: int = 0) -> None:
        self._crossing = (down, up, latency_s, burst)
        self.now = 0.0
        self.larges = 0
        self.hiccup, self.hiccup_s = 0, 0.0
        self._answers: list[Mail] = []

    def clock(self) -> float:
        return self.now

    def post(self, peer: int, message: Echo, tensors: list[torch.Tensor | None]) -> None:
        down, up, latency_s, burst = self._crossing
        there = sum(each.nbytes for each in tensors if each is not None)
        took = 2 * (latency_s + PING_CPU_S) + max(0, there - burst) / down + max(0, message.back - burst) / up
        self.larges += there > SMALL_BYTES
        took += self.hiccup_s if there > SMALL_BYTES and self.larges == self.hiccup else 0.0
        self._answers.append(Mail(peer, Echoed(message.number), [], 0, self.now + took, self.now + took))

    def answer(self) -> Mail:
        mail = self._answers.pop(0)
        self.now = mail.arrived_at
        return mail


def tried(paper: Paper, others: Sequence[int] = (1,)) -> list[Line]:
    def until(node: int, true: Callable[[], bool], what: str, limit_s: float) -> None:
        while not true():
            assert lines.heard(paper.answer())

    lines = Lines(cast(Endpoint, paper), until)
    return list(lines.tried(others).values())


@pytest.mark.parametrize(
    ("down", "up", "latency_s", "burst"),
    [
        (1.2e6, 1.2e6, 0.0, 15_140),
        (1.2e7, 6e6, 0.005, 15_140),
        (1.2e7, 1.2e7, 0.0, 68_000),
        (1.2e8, 1.2e8, 0.02, 250_000),
    ],
)
def test_rate_each_way_and_latency_are_found_behind_a_burst(
    down: float, up: float, latency_s: float, burst: int
) -> None:
    """A shaped line lets 2 ms worth through at once, ten frames or a segment at least: none of it shows in what is found."""
    paper = Paper(down, up, latency_s, burst)
    (line,) = tried(paper)
    error = 0.01 if burst < MIDDLE_BYTES[1] else 0.05
    assert line.down_bytes_per_s == pytest.approx(down, rel=error)
    assert line.up_bytes_per_s == pytest.approx(up, rel=error)
    assert line.latency_s == pytest.approx(latency_s, abs=1e-6)
    assert paper.now - 2 * 15 * latency_s < 0.35, "all lines of a ring in under two seconds"


def test_a_lost_packet_does_not_make_a_line_slow() -> None:
    for which in (1, 2):
        paper = Paper(1.2e7, 1.2e7, 0.0, burst=15_140)
        paper.hiccup_s, paper.hiccup = 0.21, which
        (line,) = tried(paper)
        assert line.down_bytes_per_s == pytest.approx(1.2e7, rel=0.01)


def test_lines_are_tried_for_a_second_and_a_half_and_no_longer() -> None:
    assert 1 <= len(tried(Paper(1.2e5, 1.2e5, 0.05), range(1, 9))) < 8
    usual = Paper(1.2e6, 1.2e6, 0.001)
    assert len(tried(usual, range(1, 6))) == 5, "five lines of 10 Mbit/s"
    assert usual.now < 2 * LINES_S


def test_an_answer_to_an_attempt_that_was_given_up_is_passed_over() -> None:
    paper = Paper(1.2e6, 1.2e6, 0.0)
    Attempt(cast(Endpoint, paper), 1)
    late = paper.answer()
    attempt = Attempt(cast(Endpoint, paper), 1)
    attempt.heard(late, cast(Echoed, late.message))
    while attempt.line is None:  # a late one taken for the first of these would leave one over
        mail = paper.answer()
        attempt.heard(mail, cast(Echoed, mail.message))
    assert attempt.line.down_bytes_per_s == pytest.approx(1.2e6, rel=0.01)
    with pytest.raises(IndexError):
        paper.answer()


def test_where_the_order_is_given_only_neighbours_are_tried_and_silent_ones_together() -> None:
    assert neighbours_of([1, 2, 3, 4, 5]) == [[(1, 2), (3, 4)], [(2, 3), (4, 5)]]
    assert neighbours_of([1, 2]) == [[(1, 2)]]
    assert neighbours_of([1]) == []
    assert disjoint([(1, 2), (2, 3), (3, 4)]) == [[(1, 2), (3, 4)], [(2, 3)]]


@pytest.mark.parametrize("nodes", range(12))
def test_in_a_round_nobody_is_in_two_pairs_and_up_to_eight_all_meet_once(nodes: int) -> None:
    rounds = rounds_of(range(1, nodes + 1))
    assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in rounds)
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met))
    assert len(rounds) <= MOST_ROUNDS
    if nodes <= MOST_ROUNDS + 1:
        assert len(met) == nodes * (nodes - 1) // 2


def seen(pairs: Mapping[tuple[int, int], Line | None], lines: Sequence[Line], told: Timed | None = None) -> Seen:
    """A master with a line to each of the others."""
    everyone = dict.fromkeys(range(len(lines) + 1), told or Timed(1.0, PROCESS_BYTES, 2**30))
    return Seen(everyone, dict(enumerate(lines, start=1)), pairs)


def found_of(looked: Seen) -> tuple[tuple[Device, ...], Paths]:
    numbers = sorted(looked.told)
    return described([Device("mabcdefg"[node]) for node in numbers], numbers, looked, 1.0, 1)


FAST = Line(1e7, 1e7, 0.002)


def test_a_pair_that_is_as_its_lines_say_has_no_path_of_its_own() -> None:
    devices, paths = found_of(seen({(1, 2): Line(8e6, 1.2e7, 0.0025)}, [FAST, FAST]))
    assert paths == {}
    assert devices[1].link.up_bytes_per_s == FAST.up_bytes_per_s
    once = {(1, 2): Line(8e6, 1.2e7, 0.0025)}
    assert doubtful({1: FAST, 2: FAST}, once) == []
    assert settled({1: FAST, 2: FAST}, once, {}) == once


def test_a_pair_that_is_slower_than_its_lines_has_a_path_of_its_own() -> None:
    pair = {(1, 2): Line(1e6, 9e6, 0.002)}
    devices, paths = found_of(seen(pair, [FAST, FAST]))
    assert paths == {("a", "b"): Path(1e6, pytest.approx(0.002))}, "one way"
    assert (rate_between(devices[1], devices[2], paths), rate_between(devices[2], devices[1], paths)) == (1e6, 1e7)


def test_a_slow_pair_has_a_second_try_and_without_one_says_nothing() -> None:
    lines = {1: FAST, 2: FAST}
    once: dict[tuple[int, int], Line | None] = {(1, 2): Line(1e6, 9e6, 0.002)}
    assert doubtful(lines, once) == [(1, 2)]
    assert settled(lines, once, {}) == {}, "there was no time"
    assert settled(lines, once, {(1, 2): Line(9e6, 8e6, 0.001)}) == {(1, 2): Line(9e6, 9e6, 0.001)}, "it was held up"
    assert settled(lines, once, {(1, 2): None}) == {(1, 2): Line(1e6, 9e6, 0.002)}


def test_a_pair_that_is_silent_twice_is_planned_as_a_very_slow_one() -> None:
    lines, once = {1: FAST, 2: FAST}, {(1, 2): None}
    assert doubtful(lines, once) == [(1, 2)]
    assert settled(lines, once, {}) == once, "there was no time for a second try"
    far = Line(9e6, 9e6, 0.050)
    assert settled(lines, once, {(1, 2): far}) == {(1, 2): far}, "with the latency it has"
    pairs = settled(lines, once, {(1, 2): None})
    _, paths = found_of(seen(pairs, [FAST, FAST]))
    assert set(paths) == {("a", "b"), ("b", "a")}
    assert {path.bytes_per_s for path in paths.values()} == {SILENT_BYTES_PER_S}


def test_that_two_are_near_each_other_says_nothing_of_a_third_that_was_not_tried() -> None:
    far = Line(1e6, 2e6, 0.020)
    devices, paths = found_of(seen({(1, 2): Line(9e7, 9e7, 0.0), (3, 4): Line(9e7, 9e7, 0.0)}, [far] * 4))
    _, a, b, c, _ = devices
    assert rate_between(a, b, paths) == 9e7
    assert (rate_between(b, c, paths), rate_between(c, b, paths)) == (1e6, 1e6)


@pytest.mark.parametrize("told", [(0.0, 1e6, 0.0), (1e6, math.nan, 0.0), (math.inf, 1e6, 0.0), (1e6, 1e6, -1.0)])
def test_a_line_that_cannot_be_is_refused(told: tuple[float, float, float]) -> None:
    lines = Lines(cast(Endpoint, Paper(1.0, 1.0, 0.0)), lambda node, true, what, limit_s: None)
    with pytest.raises(ProtocolError, match="found a line to node 2"):
        lines.heard(Mail(1, Tried(2, *told), [], 0, 0.0, 0.0))


def test_an_attempt_asks_nothing_more_after_its_limit() -> None:
    paper = Paper(1e4, 1e4, 0.0)  # a small message takes three seconds
    attempt = Attempt(cast(Endpoint, paper), 1, limit_s=1.0)
    while paper.now < 1:
        mail = paper.answer()
        attempt.heard(mail, cast(Echoed, mail.message))
    assert attempt.line is None
    with pytest.raises(IndexError):
        paper.answer()


def test_two_that_are_near_each_other_and_far_from_the_master_are_known_to_be() -> None:
    near = Line(9e7, 9e7, 0.0)
    far = Line(1e6, 2e6, 0.020)
    devices, paths = found_of(seen({(1, 2): near}, [far, far]))
    master, a, b = devices
    assert rate_between(a, b, paths) == rate_between(b, a, paths) == 9e7
    assert (rate_between(master, a, paths), rate_between(b, master, paths)) == (1e6, 2e6), "as they were tried"
    assert latency_between(a, b, paths) == 0.0
    assert latency_between(master, a, paths) == pytest.approx(0.020)


def test_what_processors_hold_up_is_not_a_slow_line() -> None:
    quick = Line(2e10, 2e10, 0.0)
    _, paths = found_of(seen({(1, 2): Line(4.1e7, 1e9, 0.0)}, [quick, quick]))
    assert paths == {}


def test_a_scout_tries_every_line_and_those_between_the_others(
    tmp_path: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_trials, "timed", lambda sample, frozen_bytes: Timed(1.0, PROCESS_BYTES, 2**30))
    log = EventLog(tmp_path / "events.jsonl")
    pool = InMemoryPool(4)
    endpoint = pool.start("ring", 0)
    try:
        looked = DeviceTrials(Start(endpoint, pool, log)).look(
            pool.addresses(), Sample(b"", (), 1), apart=[frozenset((1, 3))]
        )
    finally:
        endpoint.close()
        log.close()
    assert sorted(looked.told) == [0, 1, 2, 3]
    assert sorted(looked.lines) == [1, 2, 3]
    assert sorted(map(sorted, looked.pairs)) == [[1, 2], [2, 3]], "not those that cannot reach each other"
    written = [each for each in events.read(tmp_path / "events.jsonl") if isinstance(each, events.LineTried)]
    assert len(written) == 5


@pytest.mark.parametrize(("hiccups", "expected_s"), [(1, [1.0, 1.0, 1.0, 1.0]), (2, [1.0, 1.0, 1.0, 2.0])])
def test_a_device_that_looks_slow_once_has_another_try_and_one_that_is_slow_stays_so(
    hiccups: int, expected_s: list[float], tmp_path: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that believes a moment's noise moves layers away from a device that is as good as the others."""
    ran: dict[int, int] = {}
    pool = InMemoryPool(4)
    endpoint = pool.start("ring", 0)
    answer = Answers.__call__
    at = [0]  # whoever is asked now; the master asks itself

    def timed(sample: Sample, frozen_bytes: int) -> Timed:
        ran[at[0]] = ran.get(at[0], 0) + 1
        slow = at[0] == 3 and ran[at[0]] <= hiccups
        return Timed(2.0 if slow else 1.0, PROCESS_BYTES, 2**30)

    def asked(self: Answers, endpoint: Endpoint, mail: Mail) -> bool:
        at[0] = endpoint.node
        try:
            return answer(self, endpoint, mail)
        finally:
            at[0] = 0

    monkeypatch.setattr(device_trials, "timed", timed)
    monkeypatch.setattr(Answers, "__call__", asked)
    log = EventLog(tmp_path / "events.jsonl")
    try:
        looked = DeviceTrials(Start(endpoint, pool, log)).look(pool.addresses(), Sample(b"", (), 1))
    finally:
        endpoint.close()
        log.close()
    assert [looked.told[node].seconds for node in range(4)] == expected_s
    assert ran == dict.fromkeys(range(4), 2), "everybody again, under the same load, and no third time"


class _Mailbox:
    def __init__(self) -> None:
        self.sent: list[int] = []

    def post(self, peer: int, message: Echoed, tensors: list[torch.Tensor | None]) -> None:
        self.sent.append(sum(each.nbytes for each in tensors if each is not None))


def test_a_node_sends_back_what_a_fast_line_is_tried_with_and_not_a_byte_more() -> None:
    most, box = MOST_BYTES, _Mailbox()
    there, answer = cast(Endpoint, box), Answers()
    assert answer(there, Mail(0, Echo(1, most), [], 0, 0.0, 0.0))
    assert answer(there, Mail(0, Echo(2, 0), [], 0, 0.0, 0.0))
    assert box.sent == [most, 0]
    with pytest.raises(ProtocolError, match="asks for"):
        answer(there, Mail(0, Echo(3, most + 1), [], 0, 0.0, 0.0))
