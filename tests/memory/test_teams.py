"""Teams of workers before a parameter server: what is added up inside is pushed once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from costs import devices, layers
from crooked import Crooked, Tensors
from ringtmp import api
from ringtmp.errors import ProtocolError, UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.plan.planner import PlanOptions
from ringtmp.runtime.mailbox import Mail
from ringtmp.strategies import registry
from ringtmp.strategies.base import Sizes, Task
from ringtmp.strategies.ps.member import PsMember
from ringtmp.strategies.ps.settings import fitted
from ringtmp.strategies.ps.teams import Teams, split
from ringtmp.wire.messages import Enlist, Message, Push, Work
from test_healing import Death, Mortal
from test_strategies import Case, sizes, train, weights
from test_who_may_send_what import NEAR, RECIPE, at


def team_case(teams: int | None, **settings: Any) -> Case:
    return Case("ps", 5, settings if teams is None else {"teams": teams, **settings})


def test_teams_are_as_even_as_can_be_and_the_first_is_the_head() -> None:
    assert split((2, 3, 4, 5, 6), 2) == ((2, 3), (4, 5, 6))
    assert Teams.of((2, 3, 4, 5, 6), (2,)).top == (2, 4)
    assert Teams.of((2, 3, 4, 5, 6), (2,)).team(6) == (4, 5, 6)
    alone = Teams.of((2, 3), ())
    assert (alone.top, alone.heads, alone.above(3), alone.below(2)) == ((2, 3), (), None, ())


def test_heads_of_teams_form_teams_again() -> None:
    teams = Teams.of((1, 2, 3, 4, 5, 6, 7, 8, 9), (4, 2))
    assert teams.stages == (((1, 2), (3, 4), (5, 6), (7, 8, 9)), ((1, 3), (5, 7)))
    assert (teams.top, teams.heads) == ((1, 5), (1, 3, 5, 7))
    assert [teams.above(worker) for worker in teams.workers] == [None, 1, 1, 3, None, 5, 5, 7, 7]
    assert [teams.below(worker) for worker in (1, 3, 5, 9)] == [(2, 3), (4,), (6, 7), ()]
    assert [teams.beneath(worker) for worker in (1, 5, 7, 8)] == [(1, 2, 3, 4), (5, 6, 7, 8, 9), (7, 8, 9), (8,)]


def test_one_team_and_teams_of_one_have_the_bits_of_bsp_and_two_agree_to_rounding(tmp_path: Path) -> None:
    plain, one, two, each = (
        train(team_case(teams), tmp_path / str(teams), seed=teams or 0, steps=10) for teams in (None, 1, 2, 4)
    )
    assert one.summary.weights_sha256 == plain.summary.weights_sha256 == each.summary.weights_sha256
    assert float((weights(two) - weights(plain)).norm() / weights(plain).norm()) < 1e-5


@pytest.mark.parametrize(
    ("nodes", "settings"),
    [
        (6, {"teams": "3/2"}),
        pytest.param(6, {"teams": "4/2/1", "consistency": "ssp:0"}, marks=pytest.mark.long),
        pytest.param(5, {"teams": 2, "team_sum": "all-reduce"}, marks=pytest.mark.long),
        (6, {"teams": "2/1", "team_sum": "all-reduce"}),
    ],
)
def test_stages_and_sums_around_a_ring_agree_with_bsp_to_rounding_in_any_order_of_delivery(
    nodes: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    descent: dict[str, Any] = {
        "steps": 10,
        "optimizer": "sgd",
        "optimizer_settings": {"lr": 0.1},
    }  # Adam sees no factor
    plain = train(Case("ps", nodes), tmp_path / "plain", **descent)
    one, other = (train(Case("ps", nodes, settings), tmp_path / str(seed), seed=seed, **descent) for seed in (1, 2))
    assert one.summary.weights_sha256 == other.summary.weights_sha256
    assert float((weights(one) - weights(plain)).norm() / weights(plain).norm()) < 1e-5


@pytest.mark.parametrize("wire", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("settings", "models"),
    [  # that each node sends in a step, by hand: to whoever is above, around the ring, to those below
        ({"teams": "3/2"}, [2, 1, 1 + 2, 1, 1 + 1, 1]),
        pytest.param(
            {"teams": 2, "team_sum": "all-reduce"},
            [2, 1 + 1 + 1, 1, 4 / 3 + 1 + 2, 4 / 3, 4 / 3],
            marks=pytest.mark.long,
        ),
        ({"teams": "2/1", "team_sum": "all-reduce"}, [1, 1 + 1 + 2, 1, 4 / 3 + 1 + 2, 4 / 3, 4 / 3]),
    ],
)
def test_each_node_sends_what_the_tree_says(
    settings: dict[str, Any], models: list[float], wire: str, tmp_path: Path
) -> None:
    result = train(Case("ps", 6, settings, wire), tmp_path, steps=60)
    strategy, parameters = registry.get("ps"), sum(sizes(result))
    traffic = strategy.traffic(strategy.read(settings), Sizes(parameters, (), 64), 6)
    each_bytes = 4 if wire == "float32" else 2
    sent = [each.bytes_sent / each_bytes / 60 for each in result.summary.per_node]
    assert sent == pytest.approx([parameters * each for each in models], rel=0.02)
    assert sum(sent) == pytest.approx(traffic.total, rel=0.02)
    assert max(sent) == pytest.approx(traffic.busiest, rel=0.02)


def test_on_paper_lines_carry_the_same() -> None:
    task = Task(layers(6, output=1.0, weights=1000), devices(6, rate=100.0), PlanOptions(20, 20))
    strategy = registry.get("ps")
    for settings in ({"teams": "3/2"}, {"teams": 2}, {"teams": "2/1", "team_sum": "all-reduce"}):
        read = strategy.read(settings)
        parameters = sum(layer.gradient_bytes for layer in task.layers) / 4
        found, traffic = strategy.simulate(read, task), strategy.traffic(read, Sizes(parameters, (), 20), 6)
        sent = [each.sent_bytes / 4 for each in found.step.nodes]
        assert sum(sent) == pytest.approx(traffic.total, rel=0.01)
        assert max(sent) == pytest.approx(traffic.busiest, rel=0.01)
        assert 0 < found.step.step_s < math.inf


def test_the_servers_line_carries_a_model_for_each_team_and_all_lines_as_much_as_without(tmp_path: Path) -> None:
    result = train(team_case(2), tmp_path, steps=60)
    strategy = registry.get("ps")
    parameters = sum(sizes(result))
    traffic = strategy.traffic(strategy.read({"teams": 2}), Sizes(parameters, (), 64), 5)
    sent = [each.bytes_sent / 4 / 60 for each in result.summary.per_node]
    assert sum(sent) == pytest.approx(traffic.total, rel=0.02) == pytest.approx(8 * parameters, rel=0.02)
    assert sent[0] == pytest.approx(2 * parameters, rel=0.02), "the server: one model a team"
    assert max(sent) == pytest.approx(traffic.busiest, rel=0.02)
    assert [round(each / parameters, 1) for each in sent] == [2.0, 2.0, 1.0, 2.0, 1.0]


def test_a_lost_worker_is_not_missed_and_a_lost_head_leads_back_to_the_checkpoint(tmp_path: Path) -> None:
    member = train(team_case(2), tmp_path / "member", pool=Mortal(5, Death(2, 4)), steps=10).summary
    assert [each.source for each in member.recoveries] == ["servers"]
    head = train(team_case(2), tmp_path / "head", pool=Mortal(5, Death(3, 4)), steps=10).summary
    assert [each.source for each in head.recoveries] == ["checkpoint"]
    assert member.steps >= 10 <= head.steps


@pytest.mark.parametrize(
    ("settings", "lost", "source"),
    [
        ({"teams": "3/2"}, 5, "servers"),  # the foot of the tree
        pytest.param({"teams": "3/2"}, 4, "checkpoint", marks=pytest.mark.long),  # a head below a head
        ({"teams": 2, "team_sum": "all-reduce"}, 4, "checkpoint"),  # one of a ring
    ],
)
def test_what_lies_below_a_lost_worker_says_how_the_run_heals(
    settings: dict[str, Any], lost: int, source: str, tmp_path: Path
) -> None:
    hit = train(Case("ps", 6, settings), tmp_path, pool=Mortal(6, Death(lost, 4)), steps=10).summary
    assert [each.source for each in hit.recoveries] == [source]
    assert hit.steps == 10
    assert hit.loss.last < hit.loss.first


@pytest.mark.usefixtures("offenders")
@pytest.mark.parametrize(
    ("liar", "share"),
    [(5, 0.5), *(pytest.param(*each, marks=pytest.mark.long) for each in ((3, 0.0), (3, 1.0), (4, 1.0)))],
)
def test_who_says_another_share_than_it_was_dealt_is_out_and_not_its_head(
    liar: int, share: float, tmp_path: Path
) -> None:
    """3 and 5 work below 2 and 4, and those below 1. The server sees sums alone, and would have blamed the head."""

    def lie(peer: int, message: Message, tensors: Tensors) -> tuple[int, Message, Tensors] | None:
        if not isinstance(message, Push) or message.step < 3:
            return None
        return peer, msgspec.structs.replace(message, share=share), tensors

    pool = Crooked(6, liar, lie)
    summary = train(Case("ps", 6, {"teams": "3/1", "consistency": "async"}), tmp_path, pool=pool, steps=10).summary
    assert pool.spoke
    (healed,) = summary.recoveries
    assert healed.lost == (liar,)
    assert f"node {liar} broke the protocol" in healed.reason


def test_shares_that_add_up_to_a_little_more_than_all_cost_nobody_anything(tmp_path: Path) -> None:
    """0.23 + 0.27 + 0.23 + 0.27 is more than 1 in floating point."""
    summary = train(team_case(1), tmp_path, steps=3, batch_size=26).summary
    assert summary.recoveries == ()


@pytest.mark.long  # quick: with bsp, above
@pytest.mark.parametrize("settings", [{"teams": "3/2"}, {"teams": 2, "team_sum": "all-reduce"}], ids=str)
@pytest.mark.parametrize("consistency", ["ssp:1", "async"])
def test_between_teams_nobody_need_wait(settings: dict[str, Any], consistency: str, tmp_path: Path) -> None:
    summary = train(Case("ps", 6, {**settings, "consistency": consistency}), tmp_path, steps=46).summary
    assert summary.loss.last < summary.loss.first / 1.5


@pytest.mark.parametrize(
    "settings",
    [{"teams": 2}, pytest.param({"teams": "2/1", "team_sum": "all-reduce"}, marks=pytest.mark.long)],
    ids=str,
)
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(settings: dict[str, Any], tmp_path: Path) -> None:
    case = Case("ps", 5, settings)
    whole = train(case, tmp_path / "whole", steps=8)
    train(case, tmp_path / "half", steps=4)
    rest = api.resume(tmp_path / "half/run", {"steps": 8}, None, None, watcher=api.Watcher(), pool=InMemoryPool(5))
    assert rest.summary.weights_sha256 == whole.summary.weights_sha256


def test_fewer_workers_than_teams_are_a_team_each() -> None:
    assert fitted({"teams": 3}, 3)["teams"] == 2
    assert fitted({"teams": "4/3/1"}, 3)["teams"] == "2/2/1"


@pytest.mark.parametrize(
    ("settings", "wire", "said"),
    [
        ({"teams": 0}, "float32", "from 1 to the number of workers"),
        ({"teams": 5}, "float32", "teams=5 must be from 1 to 4"),
        ({"teams": "5/2"}, "float32", "teams=5/2 must be from 1 to 4"),
        ({"teams": "2/3"}, "float32", "at most as many teams as the one before"),
        ({"teams": "2/0"}, "float32", "from 1 to the number of workers"),
        ({"teams": "two"}, "float32", "a number of teams, or one for each stage as in 4/2"),
        ({"team_sum": "all-reduce"}, "float32", "needs teams=T"),
        ({"teams": 2, "team_sum": "ring"}, "float32", "team_sum.*all-reduce"),
        ({"teams": 2, "servers": "workers"}, "float32", "use servers=1 or more"),
        ({"teams": 2, "consistency": "asp:0.1"}, "float32", "teams need consistency=bsp, ssp:S or async"),
        ({"teams": 2, "quorum": 2, "eager": True}, "float32", "teams=2 and quorum and eager do not go together"),
        ({"teams": 2}, "int8", "rounded by int8 twice"),
        ({"enough": 0.0, "consistency": "async"}, "float32", "above 0 and at most 1"),
        ({"enough": 1.5, "consistency": "async"}, "float32", "above 0 and at most 1"),
        ({"enough": 0.5, "consistency": "ssp:2"}, "float32", "needs consistency=async"),
    ],
)
def test_bad_settings_are_refused_with_the_valid_range(settings: dict[str, Any], wire: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        registry.get("ps").read(settings).check(5, wire)


def test_a_head_keeps_no_gradient_of_a_step_that_is_over_or_that_nobody_can_have_reached() -> None:
    head = at(1, None)
    settings = {"consistency": "async", "servers": 1, "teams": 1}
    member = registry.member(head, Enlist("ps", settings, 3, RECIPE, "float32", "mse", (4,), 5, NEAR, 0))
    assert isinstance(member, PsMember)

    def pushed(worker: int, step: int) -> None:
        member.handle(Mail(worker, Push(0, step, 0.5, False), [torch.ones(16)], 64, 0.0, 0.0))

    for step in (5, 6, 7):
        member.handle(Mail(0, Work(step, True, False, 2, 0, (), "train", microbatches=2), [], 0, 0.0, 0.0))
    for step in (4, 7, 9_000):
        with pytest.raises(ProtocolError, match="out of turn"):
            pushed(2, step)
    pushed(2, 5)
    pushed(1, 5)
    with pytest.raises(ProtocolError, match="out of turn"):
        pushed(2, 5)
    pushed(2, 6)
    pushed(2, 7)
    with pytest.raises(ProtocolError, match="of step 7 twice"):
        pushed(2, 7)
