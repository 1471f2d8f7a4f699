"""Teams of workers before a parameter server: what is added up inside is pushed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ringtmp import api
from ringtmp.errors import ProtocolError, UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.runtime.mailbox import Mail
from ringtmp.strategies import registry
from ringtmp.strategies.base import Sizes
from ringtmp.strategies.ps.member import PsMember
from ringtmp.strategies.ps.settings import fitted
from ringtmp.strategies.ps.teams import heads, team_of, teams_of
from ringtmp.wire.messages import Enlist, Push
from test_healing import Death, Mortal
from test_strategies import Case, sizes, train, weights
from test_who_may_send_what import NEAR, RECIPE, at


def team_case(teams: int | None, **settings: Any) -> Case:
    return Case("ps", 5, settings if teams is None else {"teams": teams, **settings})


def test_teams_are_as_even_as_can_be_and_the_first_is_the_head() -> None:
    assert teams_of((2, 3, 4, 5, 6), 2) == ((2, 3), (4, 5, 6))
    assert teams_of((2, 3), None) == ((2,), (3,))
    assert heads(teams_of((2, 3, 4, 5, 6), 2)) == (2, 4)
    assert team_of(6, teams_of((2, 3, 4, 5, 6), 2)) == (4, 5, 6)


def test_one_team_and_teams_of_one_have_the_bits_of_bsp_and_two_agree_to_rounding(tmp_path: Path) -> None:
    plain, one, two, each = (
        train(team_case(teams), tmp_path / str(teams), seed=teams or 0, steps=10) for teams in (None, 1, 2, 4)
    )
    assert one.summary.weights_sha256 == plain.summary.weights_sha256 == each.summary.weights_sha256
    assert float((weights(two) - weights(plain)).norm() / weights(plain).norm()) < 1e-5


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


def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(tmp_path: Path) -> None:
    whole = train(team_case(2), tmp_path / "whole", steps=8)
    train(team_case(2), tmp_path / "half", steps=4)
    rest = api.resume(tmp_path / "half/run", {"steps": 8}, None, None, watcher=api.Watcher(), pool=InMemoryPool(5))
    assert rest.summary.weights_sha256 == whole.summary.weights_sha256


def test_fewer_workers_than_teams_are_a_team_each() -> None:
    assert fitted({"teams": 3}, 3)["teams"] == 2


@pytest.mark.parametrize(
    ("settings", "wire", "said"),
    [
        ({"teams": 0}, "float32", "from 1 to the number of workers"),
        ({"teams": 5}, "float32", "teams=5 must be from 1 to 4"),
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
