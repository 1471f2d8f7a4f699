"""Two homes: rings with data of their own that meet after every so many steps, here through memory and a thread each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from oracle import plain_loop, state_sha256
from ringtmp import api
from ringtmp.api import Watcher, start
from ringtmp.config import KeepPart, RingPart, RunConfig, TrainingPart
from ringtmp.data.batches import TrainingBatches
from ringtmp.data.tables_and_streams import tensors
from ringtmp.errors import NodeLost, UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from ringtmp.run import meet_home, other_home
from ringtmp.run.check_settings import resolve
from ringtmp.run.what_to_train import OpenLine
from ringtmp.runtime.losses import cross_entropy
from two_homes import MemoryLine, joined, pair, the_others_turn, together

WIDTHS = 4 * (6 * 16 + 16 + 16 * 16 + 16 + 16 * 3 + 3)


def data(home: int) -> Any:
    generator = torch.Generator().manual_seed(4 + home)
    labels = torch.arange(60) % 3
    inputs = torch.randn(60, 6, generator=generator) + 3 * nn.functional.one_hot(labels, 6)
    return tensors("t", inputs, labels)


def model(seed: int = 2) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def config(steps: int, local_steps: int = 3, nodes: int = 3, **ring: Any) -> RunConfig:
    optimizer = {"optimizer": ring.pop("optimizer", "adamw"), "optimizer_settings": {"lr": 0.01}}
    return RunConfig(
        training=TrainingPart(data="given", batch_size=16, microbatches=4, steps=steps, **optimizer),
        ring=RingPart(nodes=nodes, schedule="1f1b", local_steps=local_steps, **ring),
        keep=KeepPart(),
    )


class Leaving(Watcher):
    """Goes away after so many steps: as a master that is killed, it says nothing to the other home."""

    def __init__(self, after: int, line: MemoryLine | None = None) -> None:
        self.after, self.line = after, line

    def step(self, done: int, total: int | None, event: events.StepDone, idle: float) -> None:
        if done == self.after:
            if self.line is not None:
                self.line.close()
            raise Gone


class Gone(Exception):  # noqa: N818
    pass


def home(
    folder: Path, line: MemoryLine, settings: RunConfig, watcher: Watcher | None = None, first: nn.Module | None = None
) -> Callable[[], api.Result]:
    opened: OpenLine = lambda tell: line  # noqa: E731
    return lambda: start(
        settings, first or model(), (data(line.home), None), None, run_dir=folder, watcher=watcher or Watcher(),
        pool=InMemoryPool(settings.ring.nodes), line=opened,
    )  # fmt: skip


def again(folder: Path, line: MemoryLine, nodes: int = 3, **changes: Any) -> Callable[[], api.Result]:
    return lambda: api.resume(
        folder, {"nodes": nodes, **changes}, (data(line.home), None), None, watcher=Watcher(), pool=InMemoryPool(nodes),
        line=lambda tell: line,
    )  # fmt: skip


def digests(*results: Any) -> list[str]:
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return [each.summary.weights_sha256 for each in results]


def meetings(folder: Path) -> list[events.HomesMet]:
    return [each for each in events.read(folder / "events.jsonl") if isinstance(each, events.HomesMet)]


def oracle(settings: RunConfig, optimizer: Callable[[Any], torch.optim.Optimizer], homes: int = 2) -> str:
    """Two plain loops and the published outer step between them."""
    steps, every = settings.training.steps or 0, settings.ring.local_steps or 0
    lr, momentum = settings.ring.outer_lr, settings.ring.outer_momentum
    models = [model() for _ in range(homes)]
    kept = [optimizer(each.parameters()) for each in models]
    batches = [TrainingBatches(data(at), 16, 4, 0) for at in range(homes)]
    begun = [each.detach().clone() for each in models[0].parameters()]
    velocity = [torch.zeros_like(each) for each in begun]
    for first in range(0, steps, every):
        for at, each in enumerate(models):
            given = []
            for step in range(first, min(first + every, steps)):
                batch = batches[at].batch(step)
                assert batch is not None
                given.append((torch.cat(list(batch.inputs)), torch.cat(list(batch.targets))))
            plain_loop(each, given, 4, cross_entropy, lambda parameters, at=at: kept[at])  # type: ignore[misc]
        with torch.no_grad():
            for number, theta in enumerate(begun):
                own = [list(each.parameters())[number] for each in models]
                mean = (own[0] + own[1]) * 0.5 if homes == 2 else own[0].clone()
                change = theta - mean
                velocity[number] = velocity[number] * momentum + change
                step_made = (velocity[number] * momentum + change) * lr
                begun[number] = mean + (change - step_made)
                for each in own:
                    each.copy_(begun[number])
    return state_sha256(models[0])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def test_both_homes_end_with_the_bits_of_two_plain_loops_and_an_outer_nesterov_step(tmp_path: Path) -> None:
    settings, (first, second) = config(steps=7), pair()
    found = together(home(tmp_path / "a", first, settings), home(tmp_path / "b", second, settings))
    one, other = digests(*found)
    assert one == other == oracle(settings, adamw)
    for folder in (tmp_path / "a", tmp_path / "b"):
        met = meetings(folder)
        assert [(each.kind, each.step, each.round) for each in met] == [
            ("exchanged", 3, 1), ("exchanged", 6, 2), ("exchanged", 7, 3),
        ]  # fmt: skip
        assert [each.sent_bytes for each in met] == [WIDTHS] * 3, "a home sends every parameter once an exchange"
        assert [each.received_bytes for each in met] == [WIDTHS] * 3
    assert found[0].summary.exactness == "replay"


def test_homes_with_other_numbers_of_nodes_and_first_weights_end_with_the_bits_of_the_one_that_listens(
    tmp_path: Path,
) -> None:
    settings, (first, second) = config(steps=6), pair()
    other = config(steps=6, nodes=1)
    found = together(
        home(tmp_path / "a", first, settings), home(tmp_path / "b", second, other, first=model(seed=9))
    )  # fmt: skip
    one, two = digests(*found)
    assert one == two == oracle(settings, adamw)
    assert [each.kind for each in meetings(tmp_path / "b")] == ["adopted", "exchanged", "exchanged"]


def test_homes_of_groups_end_with_the_bits_of_homes_without(tmp_path: Path) -> None:
    """Their members have the weights of before the outer step in hand, of the same step: those must not come back."""
    found = []
    for name, more in (("plain", {}), ("groups", {"groups": "2"})):
        settings, (first, second) = config(steps=4, local_steps=2, **more), pair()
        settings = msgspec.structs.replace(settings, training=msgspec.structs.replace(settings.training, sum_tree=2))
        homes = (home(tmp_path / name / str(line.home), line, settings) for line in (first, second))
        found += digests(*together(*homes))
    assert len(set(found)) == 1, found


@pytest.mark.long
def test_after_every_step_with_plain_descent_and_no_momentum_it_is_averaging_to_the_bit(tmp_path: Path) -> None:
    settings = config(steps=4, local_steps=1, outer_lr=1.0, outer_momentum=0.0, optimizer="sgd")
    first, second = pair()
    found = together(home(tmp_path / "a", first, settings), home(tmp_path / "b", second, settings))
    models = [model(), model()]
    batches = [TrainingBatches(data(at), 16, 4, 0) for at in range(2)]
    for step in range(4):
        for at, each in enumerate(models):
            batch = batches[at].batch(step)
            assert batch is not None
            given = [(torch.cat(list(batch.inputs)), torch.cat(list(batch.targets)))]
            plain_loop(each, given, 4, cross_entropy, lambda every: torch.optim.SGD(every, lr=0.01, fused=True))
        with torch.no_grad():
            for pairs in zip(*(each.parameters() for each in models), strict=True):
                mean = (pairs[0] + pairs[1]) / 2
                for each in pairs:
                    each.copy_(mean)
    assert digests(*found) == [state_sha256(models[0])] * 2


@pytest.mark.long
def test_lost_pieces_and_signs_of_life_are_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meet_home, "ASK_AGAIN_S", 0.2)
    monkeypatch.setattr(meet_home, "LAST_WORD_S", 2.0)
    count = [0]

    def drops(message: object) -> bool:
        count[0] += 1
        return count[0] % 3 == 0

    settings, (first, second) = config(steps=3), pair(drops=drops)
    found = together(home(tmp_path / "a", first, settings), home(tmp_path / "b", second, settings))
    assert digests(*found) == [oracle(settings, adamw)] * 2


@pytest.mark.parametrize(
    "after",
    [*(pytest.param(each, marks=pytest.mark.long) for each in (2, 3)), 5],
    ids=lambda after: f"after step {after}",
)
def test_a_home_that_is_gone_comes_back_and_both_end_with_the_bits_of_an_undisturbed_run(
    tmp_path: Path, after: int
) -> None:
    """The other waits. What it had asked for at the moment of the loss is asked for again."""
    settings, (first, second) = config(steps=7, home_wait_s=60.0), pair()

    def goes_and_comes() -> api.Result:
        with pytest.raises(Gone):
            home(tmp_path / "b", second, settings, Leaving(after, second))()
        back = MemoryLine(1)
        joined(first, back)
        return again(tmp_path / "b", back)()

    found = together(home(tmp_path / "a", first, settings), goes_and_comes)
    assert digests(*found) == [oracle(settings, adamw)] * 2


@pytest.mark.long
def test_one_that_comes_back_while_the_other_is_at_its_steps_makes_its_own_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for a word that the other says at its exchange alone, and gave up where a round is longer than --home-wait."""
    monkeypatch.setattr(other_home, "WORD_S", 0.5)
    settings, (first, second), at_work = config(steps=7, home_wait_s=60.0), pair(), threading.Event()

    class Held(Watcher):
        def step(self, done: int, total: int | None, event: events.StepDone, idle: float) -> None:
            if done == 5:
                with the_others_turn():
                    assert at_work.wait(60), "the other made no step"

    class AtWork(Watcher):
        def step(self, done: int, total: int | None, event: events.StepDone, idle: float) -> None:
            at_work.set()

    def goes_and_comes() -> api.Result:
        with pytest.raises(Gone):
            home(tmp_path / "b", second, settings, Leaving(4, second))()
        back = MemoryLine(1)
        joined(first, back)
        return api.resume(
            tmp_path / "b", {"nodes": 3}, (data(1), None), None, watcher=AtWork(), pool=InMemoryPool(3),
            line=lambda tell: back,
        )  # fmt: skip

    found = together(home(tmp_path / "a", first, settings, Held()), goes_and_comes)
    assert digests(*found) == [oracle(settings, adamw)] * 2


@pytest.mark.long
def test_the_other_goes_on_alone_and_who_comes_back_takes_over_what_it_has(tmp_path: Path) -> None:
    settings, (first, second) = config(steps=30, home_wait_s=1.0, home_alone="go-on"), pair()
    back = MemoryLine(1)

    class Holding(Watcher):
        """Lets the other come back only after some rounds alone, and stays until it has."""

        def step(self, done: int, total: int | None, event: events.StepDone, idle: float) -> None:
            if done == 15:
                joined(first, back)
                assert back.spoken(60), "it would be done with all steps before the other has even begun"

    def goes_and_comes() -> api.Result:
        with pytest.raises(Gone):
            home(tmp_path / "b", second, settings, Leaving(5, second))()
        while first.other is not back:
            back.receive(0.05)
        return again(tmp_path / "b", back)()

    found = together(home(tmp_path / "a", first, settings, Holding()), goes_and_comes)
    one, other = digests(*found)
    assert one == other
    kinds = [each.kind for each in meetings(tmp_path / "a")]
    assert kinds[0] == kinds[-1] == "exchanged", kinds
    assert kinds.count("alone") >= 3, kinds
    assert "adopted" in [each.kind for each in meetings(tmp_path / "b")]
    assert any("going on alone" in text for text in found[0].summary.warnings)


@pytest.mark.long
def test_a_home_whose_other_never_comes_ends_with_a_word_or_trains_alone(tmp_path: Path) -> None:
    wait = config(steps=3, home_wait_s=1.0)
    [lost] = together(home(tmp_path / "a", MemoryLine(0), wait))
    assert isinstance(lost, NodeLost)
    assert "the other home was not reached for 1 s" in str(lost)
    assert "--home-alone go-on" in str(lost)
    alone = config(steps=3, home_wait_s=1.0, home_alone="go-on")
    [found] = together(home(tmp_path / "b", MemoryLine(0), alone))
    assert digests(found) == [oracle(alone, adamw, homes=1)]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"steps": 9}, "--steps is 7 here and 9 there"),
        pytest.param({"local_steps": 4}, "--local-steps is 3 here and 4 there", marks=pytest.mark.long),
        pytest.param({"outer_lr": 1.0}, "--outer-lr is 0.7 here and 1.0 there", marks=pytest.mark.long),
        pytest.param({"outer_momentum": 0.5}, "--outer-momentum is 0.9 here and 0.5 there", marks=pytest.mark.long),
    ],
)
def test_homes_that_want_different_things_are_told_so_before_the_first_step(
    tmp_path: Path, change: dict[str, Any], word: str
) -> None:
    first, second = pair()
    found = together(
        home(tmp_path / "a", first, config(steps=7)), home(tmp_path / "b", second, config(**{"steps": 7, **change}))
    )
    assert isinstance(found[0], UsageError)
    assert word in str(found[0])
    assert isinstance(found[1], UsageError)
    assert not [each for each in events.read(tmp_path / "a" / "events.jsonl") if isinstance(each, events.StepDone)]


@pytest.mark.long
def test_homes_with_other_models_are_told_so(tmp_path: Path) -> None:
    first, second = pair()
    wide = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
    found = together(home(tmp_path / "a", first, config(3)), home(tmp_path / "b", second, config(3), first=wide))
    assert all(isinstance(each, UsageError) and "models are not the same" in str(each) for each in found), found


@pytest.mark.parametrize(
    ("ring", "training", "word"),
    [
        ({"local_steps": 0}, {}, "--local-steps 0 must be from 1 to 1000000000"),
        ({"local_steps": 2**70}, {}, "must be from 1 to 1000000000"),
        ({"local_steps": 3, "outer_lr": 0.0}, {}, "--outer-lr 0.0 must be above 0"),
        ({"local_steps": 3, "outer_momentum": 1.0}, {}, "--outer-momentum 1.0 must be from 0 to 0.999"),
        ({"local_steps": 3, "home_wait_s": 0.5}, {}, "--home-wait 0.5 must be from 1 to 604800"),
        ({"outer_lr": 0.5}, {}, "--outer-lr goes with --local-steps"),
        ({"local_steps": 3, "strategy": "averaging"}, {}, "--local-steps works with --strategy ring only"),
        ({"local_steps": 3, "strategy": "auto"}, {}, "a home is a whole ring, not auto"),
        ({"local_steps": 3}, {"staleness": 1}, "--staleness 1"),
        ({"local_steps": 3}, {"early_stop": 2}, "--early-stop"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_the_range(
    ring: dict[str, Any], training: dict[str, Any], word: str
) -> None:
    with pytest.raises(UsageError) as refused:
        resolve(RunConfig(training=TrainingPart(**training), ring=RingPart(**ring)))
    assert word in str(refused.value)


def test_two_homes_need_a_way_to_each_other_and_one_home_needs_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs another home"):
        start(config(3), model(), (data(0), None), run_dir=tmp_path / "a", pool=InMemoryPool(3))
    plain, line = RunConfig(training=TrainingPart(data="given", steps=3), ring=RingPart(nodes=1)), MemoryLine(0)
    with pytest.raises(UsageError, match="need --local-steps"):
        start(plain, model(), (data(0), None), run_dir=tmp_path / "a", pool=InMemoryPool(1), line=lambda tell: line)
