"""A key-value store: what is pushed arrives once, clocks keep their bound, rules travel as data, bytes are as counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ringtmp import KeyValueStore
from ringtmp.errors import RingError, UsageError, WaitTimeout


def store(tables: dict[str, torch.Tensor], **settings: Any) -> KeyValueStore:
    return KeyValueStore(tables, **{"where": "memory", "servers": 3, "workers": 2, "limit_s": 30.0, **settings})


def test_rows_and_whole_tables_are_pushed_and_pulled_over_several_servers() -> None:
    start = torch.arange(20.0).reshape(10, 2)
    with store({"values": start, "counts": torch.zeros(4, dtype=torch.int64)}, staleness=None) as kv:
        worker = kv.worker(1)
        assert torch.equal(worker.pull("values"), start)
        assert torch.equal(worker.pull("values", [9, 0, 9]), start[[9, 0, 9]])
        worker.push("values", torch.ones(3, 2), [9, 0, 9])
        worker.push("values", torch.full((10, 2), 10.0))
        worker.push("counts", torch.tensor([5]), [3])
        expected = start + 10
        expected[0] += 1
        expected[9] += 2
        assert torch.equal(kv.read("values"), expected)
        assert kv.worker(0).pull("counts").tolist() == [0, 0, 0, 5]
        assert worker.pull("values", []).shape == (0, 2)


def test_what_is_pushed_may_be_changed_at_once() -> None:
    with store({"values": torch.zeros(6)}, staleness=None) as kv:
        update, rows = torch.ones(6), torch.arange(6)
        kv.worker(0).push("values", update)
        kv.worker(0).push("values", update, rows)
        update.zero_()
        rows.zero_()
        assert kv.read("values").tolist() == [2.0] * 6


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_without_staleness_bits_do_not_depend_on_who_came_first_and_nobody_sees_half_a_clock(
    order: tuple[int, ...],
) -> None:
    updates = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    with store({"value": torch.tensor([0.5])}, workers=3) as kv:
        for worker in order:
            kv.worker(worker).push("value", updates[worker])
            assert kv.worker(worker).pull("value").item() == 0.5
        for worker in order:
            assert kv.read("value").item() == 0.5
            kv.worker(worker).clock()
        expected = torch.tensor([0.5])
        for update in updates:
            expected = expected + update
        assert torch.equal(kv.worker(0).pull("value"), expected)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_worker_that_is_too_far_ahead_waits_for_the_slowest_and_says_whom_it_waited_for(staleness: int) -> None:
    with store({"value": torch.zeros(4)}, staleness=staleness, limit_s=0.2) as kv:
        fast = kv.worker(1)
        for clock in range(staleness + 1):
            fast.pull("value")
            assert fast.clock() == clock + 1
        with pytest.raises(WaitTimeout, match=f"worker 1 at clock {staleness + 1} waited .* worker 0 is at clock 0"):
            fast.pull("value")
        kv.worker(0).push("value", torch.ones(4))
        kv.worker(0).clock()
        assert fast.pull("value").tolist() == [1.0] * 4, "what was in time is there"
    with store({"value": torch.zeros(4)}, staleness=None) as kv:
        for _ in range(5):
            kv.worker(1).clock()
        assert kv.worker(1).pull("value").tolist() == [0.0] * 4


def test_threads_of_workers_keep_the_bound_and_lose_nothing() -> None:
    seen: list[tuple[int, int]] = []
    with store({"sum": torch.zeros(5, dtype=torch.int64)}, workers=3, staleness=1) as kv:

        def work(number: int) -> None:
            worker = kv.worker(number)
            for step in range(8):
                seen.append((step, int(worker.pull("sum").min())))
                worker.push("sum", torch.ones(5, dtype=torch.int64))
                worker.clock()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
        assert kv.read("sum").tolist() == [24] * 5
    assert len(seen) == 24
    assert all(value >= 3 * (step - 1) for step, value in seen), "updates of a clock it was promised are missing"


def adagrad(rows: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """Of a row (value, sum of squares) and an update (gradient, nothing)."""
    gradient = update[:, :1]
    squares = rows[:, 1:] + gradient * gradient
    return torch.cat([rows[:, :1] - 0.1 * gradient / (squares.sqrt() + 1e-8), squares], 1)


def test_a_rule_of_ones_own_runs_on_the_servers_with_the_bits_it_has_here() -> None:
    start = torch.randn(7, 2, generator=torch.Generator().manual_seed(0)).abs()
    with store({"w": start, "other": torch.zeros(2)}, rules={"w": adagrad}, staleness=None) as kv:
        update = torch.randn(3, 2, generator=torch.Generator().manual_seed(1))
        rows = [6, 0, 3]
        kv.worker(0).push("w", update, rows)
        kv.worker(0).push("other", torch.ones(2))
        expected = start.clone()
        expected[rows] = adagrad(start[rows], update)
        kv.worker(0).push("w", torch.ones(7, 2))
        assert torch.equal(kv.read("w"), adagrad(expected, torch.ones(7, 2)))
        assert kv.read("other").tolist() == [1.0, 1.0]
        with pytest.raises(UsageError, match="occurs twice"):
            kv.worker(0).push("w", torch.ones(2, 2), [1, 1])


CONSTANT = torch.ones(3)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (lambda rows, update: torch.linalg.eigvals(rows.reshape(-1, 3, 1) @ update.reshape(-1, 1, 3)).real, "linalg_eig"),
        (lambda rows, update: rows.sum(0), "must make rows like those it is given, float32 of shape"),
        (lambda rows, update: (rows + update).double(), "float64"),
        (lambda rows, update: rows + torch.rand_like(update), "draws random numbers"),
        (lambda rows, update: rows + CONSTANT, "brings a tensor of its own"),
        (lambda rows, update: rows + update - rows.mean(0, keepdim=True), "something else of one row when others come with it"),
        (lambda rows, update: rows if float(update.sum()) > 0 else update, "A rule must be a fixed sequence"),
    ],
)  # fmt: skip
def test_a_rule_that_cannot_travel_is_refused_before_anything_starts(
    rule: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeyValueStore, "_started", lambda *any: pytest.fail("servers were started"))
    with pytest.raises(RingError, match=said):
        store({"w": torch.zeros(8, 3)}, rules={"w": rule})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"servers": 0}, "servers=0 must be a whole number from 1 to 1000"),
        ({"workers": 0}, "workers=0 must be a whole number from 1"),
        ({"staleness": -1}, "staleness=-1 must be a whole number from 0"),
        ({"staleness": 1.5}, "staleness=1.5"),
        ({"where": "cloud"}, "processes"),
        ({"limit_s": 0}, "above 0"),
        ({"rules": {"wrong": adagrad}}, "table 'wrong'"),
        ({"limit_s": "1"}, "must be a number of seconds"),
        ({"rules": [1]}, "by table"),
        ({"tables": {}}, "needs tables by name"),
        ({"tables": [1]}, "needs tables by name"),
        ({"tables": {3: torch.zeros(2)}}, "needs tables by name"),
        ({"tables": {"w": [1, 2]}}, "must be a dense tensor"),
        ({"tables": {"w": torch.eye(3).to_sparse()}}, "must be a dense tensor"),
        ({"tables": {"w": torch.zeros(3, device="meta")}}, "must be a dense tensor"),
        ({"tables": {"w": torch.zeros(3, dtype=torch.bool)}}, "float32, float64, int32, int64"),
        ({"tables": {"w": torch.zeros(0, 3)}}, "a row and a value"),
    ],
)
def test_settings_out_of_range_are_refused_with_the_range(settings: dict[str, Any], said: str) -> None:
    tables = settings.pop("tables", {"w": torch.zeros(3)})
    with pytest.raises(UsageError, match=said):
        store(tables, **settings)


def test_wrong_words_are_refused_and_the_store_goes_on() -> None:
    kv = store({"w": torch.zeros(3, 2)})
    with kv:
        worker = kv.worker(0)
        for wrong, said in (
            (lambda: worker.pull("v"), "table 'v'"),
            (lambda: worker.pull("w", [3]), "from 0 to 2"),
            (lambda: worker.pull("w", [0.5]), "whole numbers"),
            (lambda: worker.pull("w", torch.tensor([True, False, True])), r"of a mask take mask.nonzero\(\)"),
            (lambda: worker.pull("w", "ab"), "whole numbers"),
            (lambda: worker.pull("w", [2**70]), "whole numbers"),
            (lambda: worker.pull(["w"]), "named by a text"),
            (lambda: worker.push("w", [[1, 2]], [1]), "must be a tensor, not list"),
            (lambda: kv.worker("0"), "workers 0 to 1"),
            (lambda: worker.push("w", torch.zeros(2, 2)), r"float32 of shape \(3, 2\), not float32 of shape \(2, 2\)"),
            (lambda: worker.push("w", torch.zeros(1, 2).long(), [1]), "not int64"),
            (lambda: kv.worker(2), "workers 0 to 1"),
        ):
            with pytest.raises(UsageError, match=said):
                wrong()
        assert worker.pull("w").sum() == 0
    kv.close()
    with pytest.raises(RingError, match="the store is closed"):
        worker.pull("w")


def test_it_sends_what_its_formula_says() -> None:
    """A row up: its values and 8 bytes for its number; a row down: 8 up and its values; whole tables without numbers."""
    with store({"w": torch.zeros(1000, 50)}, workers=1, staleness=None) as kv:
        assert kv.bytes_sent == 1000 * 50 * 4, "first rows"
        rows = torch.arange(0, 1000, 4)
        for _ in range(3):
            kv.worker(0).pull("w", rows)
            kv.worker(0).push("w", torch.ones(250, 50), rows)
            kv.worker(0).pull("w")
            kv.worker(0).clock()
        sent, received = 4 * 50_000 + 3 * 250 * (8 + 8 + 200), 3 * (250 * 200 + 4 * 50_000)
        assert abs(kv.bytes_sent - sent) <= 0.02 * sent
        assert abs(kv.bytes_received - received) <= 0.02 * received


def test_a_lost_server_is_named() -> None:
    with store({"w": torch.zeros(6)}) as kv:
        kv._leader._node_pool.kill(2)  # type: ignore[attr-defined]
        with pytest.raises(RingError, match="node 2 was killed"):
            kv.worker(0).pull("w")
