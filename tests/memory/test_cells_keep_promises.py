"""Modules cut into cells keep what lists of layers are promised: healing, resuming, routes, schedules, every setting."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from begun_runs import BATCH, PARTS, RATE, STEPS, Begun
from ringtmp import api
from ringtmp.config import KeepPart, RingPart, RunConfig, TrainingPart
from ringtmp.launch.ring_in_one_process import InMemoryPool
from test_healing import Death, Mortal
from test_rebalancing import Throttled, throttled  # noqa: F401

NAMES = ("unet", "tied")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda name: Begun(tmp_path_factory.mktemp(name), name))


@pytest.fixture(scope="module")
def plain(begun: Any) -> Any:
    return cache(lambda name, *more: begun(name).plain_digest(**dict(more)))


def cut_at(begun: Begun, *shares: float) -> str:
    """Cuts at these shares of the cells."""
    ends = [0, *(round(len(begun.layers) * share) for share in shares), len(begun.layers)]
    return ",".join(f"{first}-{stop - 1}" for first, stop in pairwise(ends))


#: Settings of the ring; settings of training; what the plain loop is told.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gpipe": ({"schedule": "gpipe"}, {}, {}),
    "zero-bubble": ({"schedule": "zero-bubble"}, {}, {}),
    "laps": ({"laps": 2}, {}, {}),
    "v": ({"route": "v"}, {}, {}),
    "v, zero-bubble": ({"route": "v", "schedule": "zero-bubble"}, {"clip_norm": 0.3}, {"clip_norm": 0.3}),
    "recompute all": ({"recompute": "all"}, {}, {}),
    "recompute all, laps": ({"recompute": "all", "laps": 2}, {}, {}),
    "recompute auto": ({"recompute": "auto"}, {}, {}),
    "clipped": ({}, {"clip_norm": 0.3}, {"clip_norm": 0.3}),
    "delayed": ({}, {"staleness": 1}, {"delayed": True}),
    "delayed, v, clipped": (
        {"route": "v", "schedule": "zero-bubble"}, {"staleness": 1, "clip_norm": 0.3}, {"delayed": True, "clip_norm": 0.3},
    ),
    "window of one": ({"window": 1}, {}, {}),
    "two microbatches": ({}, {"microbatches": 2}, {"microbatches": 2}),
}  # fmt: skip


QUICK = {("tied", "delayed, v, clipped")}


def _tier(number: int, way: str) -> pytest.MarkDecorator:
    """Every way with one model in `make long`, with the other at night."""
    return pytest.mark.nightly if (list(WAYS).index(way) + number) % 2 else pytest.mark.long


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=[] if (name, way) in QUICK else _tier(number, way))
        for number, name in enumerate(NAMES)
        for way in WAYS
    ],
)
def test_every_way_to_run_the_ring_gives_the_bits_of_eager(name: str, way: str, begun: Any, plain: Any) -> None:
    ring, training, told = WAYS[way]
    expected = plain(name, *told.items())
    assert begun(name).run(InMemoryPool(3), ring, **training).summary.weights_sha256 == expected
    pool = Mortal(3, Death(1, 2, 3), Death(2, 4, 1))
    hit = begun(name).run(pool, ring, **training).summary
    assert hit.weights_sha256 == expected
    assert [each.lost for each in hit.recoveries] == [(1,), (2,)]


@pytest.mark.parametrize("name", NAMES)
def test_a_last_visit_with_the_loss_alone(name: str, begun: Any, plain: Any) -> None:
    half = len(begun(name).layers) // 2
    last = len(begun(name).layers) - 1
    ring = {"cuts": f"0-{half},{half + 1}-{last},-"}
    hit = begun(name).run(Mortal(2, Death(1, 2, 3)), ring).summary
    assert hit.weights_sha256 == plain(name)
    assert len(hit.recoveries) == 1


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_run_stopped_and_gone_on_with_on_other_nodes_and_routes_keeps_its_bits(
    name: str, begun: Any, plain: Any
) -> None:
    """The edges are others in each part."""
    here = begun(name)
    first = here.run(InMemoryPool(3), steps=2)
    here.resume(first.run_dir, InMemoryPool(4), steps=3, nodes=4)
    here.resume(first.run_dir, InMemoryPool(2), steps=4, nodes=2, route="v", schedule="zero-bubble")
    here.resume(first.run_dir, InMemoryPool(1), steps=5, nodes=1, route="ring")
    cuts = cut_at(here, 0.2, 0.5, 0.9)
    last = here.resume(first.run_dir, InMemoryPool(3), steps=STEPS, nodes=3, cuts=cuts, recompute="all")
    assert last.summary.weights_sha256 == plain(name)


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(each, marks=pytest.mark.long) for each in NAMES[1:])])
@pytest.mark.parametrize("wire", ["bfloat16", pytest.param("int8", marks=pytest.mark.long)])
def test_a_lossy_wire_learns_and_heals_with_its_own_bits(name: str, wire: str, begun: Any, plain: Any) -> None:
    """Tokens cross as they are: rounded they would be other tokens."""
    ring = {"cuts": cut_at(begun(name), 0.25, 0.5, 0.75)}
    calm = begun(name).run(InMemoryPool(3), ring, wire=wire).summary
    hit = begun(name).run(Mortal(3, Death(1, 3, 2)), ring, wire=wire).summary
    assert hit.weights_sha256 == calm.weights_sha256 != plain(name)
    assert len(hit.recoveries) == 1
    exact = begun(name).plain()[1]
    assert calm.loss.first == pytest.approx(exact[0], rel=0.05)
    assert calm.loss.last == pytest.approx(exact[-1], rel=0.2)


@pytest.mark.parametrize(
    "protect", ["disk", *(pytest.param(each, marks=pytest.mark.long) for each in ("memory", "checkpoint"))]
)
def test_a_lost_node_comes_back_from_any_copy(protect: Any, begun: Any, plain: Any) -> None:
    keep = KeepPart(protect=protect, checkpoint_every=3)
    hit = begun("unet").run(Mortal(4, Death(2, 4, 2), Death(1, 0, 2, 2)), keep=keep).summary
    assert hit.weights_sha256 == plain("unet")
    assert {node for each in hit.recoveries for node in each.lost} == {1, 2}


def test_microbatches_chosen_by_the_plan_give_the_bits_of_that_number(begun: Any, tmp_path: Path) -> None:
    here = begun("unet")
    training = TrainingPart(
        data="given", steps=2, batch_size=BATCH, microbatches="auto", loss="cross_entropy", optimizer="adamw",
        optimizer_settings={"lr": RATE},
    )  # fmt: skip
    config, watcher = RunConfig(training=training, ring=RingPart(nodes=2)), api.Watcher()
    done = api.start(
        config, here.model, here.data(), None, run_dir=tmp_path / "run", watcher=watcher, pool=InMemoryPool(2)
    ).summary
    assert done.microbatches_chosen
    assert done.weights_sha256 == here.plain_digest(steps=2, microbatches=done.microbatches)


@pytest.mark.long  # test_rebalancing has the quick ones; here the edges change with the cuts
def test_cells_move_when_a_node_is_slow_and_the_bits_stay(
    throttled: Throttled,  # noqa: F811
    begun: Any,
    tmp_path: Path,
) -> None:
    here, steps = begun("unet"), 40
    training = TrainingPart(
        data="given", steps=steps, batch_size=BATCH, microbatches=PARTS, loss="cross_entropy", optimizer="adamw",
        optimizer_settings={"lr": RATE},
    )  # fmt: skip
    config, watcher = RunConfig(training=training, ring=RingPart(nodes=3)), api.Watcher()
    done = api.start(
        config, here.model, here.data(), None, run_dir=tmp_path / "run", watcher=watcher, pool=throttled
    ).summary
    assert len(throttled.layers) > 1, "nothing moved"
    assert done.weights_sha256 == here.plain_digest(steps=steps)
