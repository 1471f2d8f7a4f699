"""What is found out of devices before a plan: pace and quota, memory, and lines by latency and rate."""

from __future__ import annotations

import pytest
import torch

from ringtmp.errors import ProtocolError
from ringtmp.plan.device import NETWORK_MESSAGE_CPU_S, Device, Quota
from ringtmp.plan.memory import PROCESS_BYTES
from ringtmp.ring.endpoint import Mail
from ringtmp.ring.lines import LARGE_BYTES, LINES_S, PING_CPU_S, SMALL_BYTES, Line, Lines, large_bytes
from ringtmp.ring.scout import Seen, answer, described
from ringtmp.wire.message import Echo, Timed

MIB = 2**20


def test_a_quota_is_told_apart_from_a_slow_processor() -> None:
    told = [Timed(0.01, 300 * MIB, 900 * MIB), Timed(0.02, 250 * MIB, 0, 0.5, 0.01), Timed(0.02, 230 * MIB, 0)]
    there = [Device(name) for name in "abc"]
    master, shared, slow = described(there, [Seen(each) for each in told], 0.01, 1)
    assert (master.speed, master.quota) == (1.0, None)
    assert (shared.speed, shared.quota) == (1.0, Quota(0.005, 0.01)), "full speed, half of the time"
    assert (slow.speed, slow.quota) == (0.5, None)
    assert shared.pace == slow.pace == 0.5
    assert (master.extra_bytes, master.memory_bytes) == (300 * MIB - PROCESS_BYTES, 900 * MIB)
    assert shared.link.message_cpu_s == NETWORK_MESSAGE_CPU_S


def test_devices_of_one_quota_that_hardly_differ_are_taken_to_be_alike() -> None:
    told = [Timed(seconds, PROCESS_BYTES, 2**30, 0.5, 0.01) for seconds in (0.95, 1.0, 1.1, 1.3)]
    told.append(Timed(1.0, PROCESS_BYTES, 2**30, 0.45, 0.01))
    found = described([Device(name) for name in "abcde"], [Seen(each) for each in told], 1.0, 1)
    middle = 1.0
    assert [each.pace for each in found] == pytest.approx([1 / middle, 1 / middle, 1 / middle, 1 / 1.3, 1.0])


def test_latencies_of_both_ends_add_up_and_an_untried_line_is_as_the_slowest() -> None:
    told = Timed(1.0, PROCESS_BYTES, 2**30)
    seen = [Seen(told), Seen(told, Line(100.0, 50.0, 0.004)), Seen(told, Line(900.0, 900.0, 0.010)), Seen(told)]
    found = described([Device(name) for name in "abcd"], seen, 1.0, 1)
    assert [each.link.latency_s for each in found] == pytest.approx([0.002, 0.002, 0.008, 0.002])
    assert found[0].link.latency_s + found[2].link.latency_s == pytest.approx(0.010), "as it was measured"
    assert (found[1].link.down_bytes_per_s, found[1].link.up_bytes_per_s) == (100.0, 50.0)
    assert found[3].link.up_bytes_per_s == 50.0
    assert found[0].link.up_bytes_per_s == 900.0, "the master's own line is no slower than what came over it"


def test_a_slow_line_gets_less_to_carry() -> None:
    assert large_bytes(32 * 1024 / 1.25e6) == LARGE_BYTES[0], "10 Mbit/s: 64 KiB, 52 ms"
    assert large_bytes(32 * 1024 / 12.5e6) == 500_000
    assert large_bytes(0.0) == LARGE_BYTES[1]


class Shaped(Lines):
    """A line on paper: what goes there and back takes as long as its rates say."""

    def __init__(self, down: float, up: float, latency_s: float, burst: int) -> None:
        self._crossing = (down, up, latency_s, burst)
        self.spent_s = 0.0

    def _around_s(self, node: int, there: int, back: int) -> float:
        down, up, latency_s, burst = self._crossing
        took = 2 * (latency_s + PING_CPU_S) + max(0, there - burst) / down + max(0, back - burst) / up
        self.spent_s += took
        return took


class _Clock:
    def __init__(self, scout: Shaped) -> None:
        self._scout = scout

    def clock(self) -> float:
        return self._scout.spent_s


@pytest.mark.parametrize(("down", "up", "latency_s"), [(1.2e6, 1.2e6, 0.0), (1.2e7, 6e6, 0.005), (1.2e8, 1.2e8, 0.02)])
def test_rate_each_way_and_latency_are_found_behind_a_burst(down: float, up: float, latency_s: float) -> None:
    """A shaped line lets 2 ms worth through at once, ten frames at least: neither shows in what is found."""
    scout = Shaped(down, up, latency_s, burst=15_140)
    scout._endpoint = _Clock(scout)  # type: ignore[assignment]
    (line,) = scout.tried([1]).values()
    assert line.down_bytes_per_s == pytest.approx(down, rel=0.01)
    assert line.up_bytes_per_s == pytest.approx(up, rel=0.01)
    assert line.latency_s == pytest.approx(latency_s, abs=1e-6)


def test_a_lost_packet_does_not_make_a_line_slow() -> None:
    class Hiccup(Shaped):
        larges = 0

        def _around_s(self, node: int, there: int, back: int) -> float:
            self.larges += there > SMALL_BYTES
            stalled = 0.21 if there > SMALL_BYTES and self.larges == 1 else 0.0
            return super()._around_s(node, there, back) + stalled

    scout = Hiccup(1.2e6, 1.2e6, 0.0, burst=15_140)
    scout._endpoint = _Clock(scout)  # type: ignore[assignment]
    (line,) = scout.tried([1]).values()
    assert line.down_bytes_per_s == pytest.approx(1.2e6, rel=0.01)


def test_lines_are_tried_for_a_second_and_a_half_and_no_longer() -> None:
    slow = Shaped(1.2e5, 1.2e5, 0.05, 0)
    slow._endpoint = _Clock(slow)  # type: ignore[assignment]
    assert 1 <= len(slow.tried(range(1, 9))) < 8
    usual = Shaped(1.2e6, 1.2e6, 0.001, 0)
    usual._endpoint = _Clock(usual)  # type: ignore[assignment]
    assert len(usual.tried(range(1, 6))) == 5, "five lines of 10 Mbit/s"
    assert usual.spent_s < 2 * LINES_S


class _Mailbox:
    def __init__(self) -> None:
        self.sent: list[int] = []

    def post(self, peer: int, message: Echo, tensors: list[torch.Tensor | None]) -> None:
        self.sent.append(sum(each.nbytes for each in tensors if each is not None))


def test_a_node_sends_back_what_a_fast_line_is_tried_with_and_not_a_byte_more() -> None:
    most, box = SMALL_BYTES + large_bytes(0.0), _Mailbox()
    assert answer(box, Mail(0, Echo(most), [], 0, 0.0, 0.0))  # type: ignore[arg-type]
    assert answer(box, Mail(0, Echo(0), [], 0, 0.0, 0.0))  # type: ignore[arg-type]
    assert box.sent == [most, 0]
    with pytest.raises(ProtocolError, match="asks for"):
        answer(box, Mail(0, Echo(most + 1), [], 0, 0.0, 0.0))  # type: ignore[arg-type]
