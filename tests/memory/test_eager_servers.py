"""Eager servers (Petuum): parameters are sent when the slowest worker has come a step further, and nobody asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtmp.errors import ProtocolError, UsageError
from ringtmp.metrics import events
from ringtmp.runtime.mailbox import Mail
from ringtmp.strategies import registry
from ringtmp.strategies.data_parallel.parameter_keys import Key
from ringtmp.strategies.ps.client import Client
from ringtmp.strategies.ps.server import Server
from ringtmp.wire.messages import Pull, Pulled, Push
from test_every_strategy import train
from test_healing import Death, Mortal
from test_strategies import logged


@pytest.mark.parametrize(
    "rest",
    [
        "",
        ":servers=workers",
        pytest.param(":quorum=1", marks=pytest.mark.long),
        pytest.param(":wire=int8", marks=pytest.mark.long),
    ],
)
def test_strictly_in_step_nothing_changes_but_who_begins(
    rest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Pull] = []
    ask = Client._ask

    def seen(self: Client, key: object, step: int, exact: bool = False) -> None:
        asked.append(Pull(0, step, exact))
        ask(self, key, step, exact)  # type: ignore[arg-type]

    monkeypatch.setattr(Client, "_ask", seen)
    plain = train(f"ps:bsp{rest}", tmp_path / "plain", 8).summary
    assert {each.step for each in asked} == set(range(9))
    asked.clear()
    eager = train(f"ps:bsp:eager=true{rest}", tmp_path / "eager", 8).summary
    assert {each.step for each in asked if not each.exact} == {0}, "the first parameters alone"
    if "quorum" not in rest:
        assert eager.weights_sha256 == plain.weights_sha256
        assert eager.bytes_total == pytest.approx(plain.bytes_total, rel=0.02)


def test_no_worker_is_further_ahead_than_its_bound_and_it_learns(tmp_path: Path) -> None:
    done = train("ps:ssp:2:eager=true", tmp_path, 40)
    read = [(each.step, each.oldest) for each in logged(done, events.NodeStep) if each.oldest is not None]
    assert len(read) >= 40
    assert all(oldest >= step - 2 for step, oldest in read)
    assert done.summary.loss.last < done.summary.loss.first / 2


def test_what_comes_unasked_answers_no_question_for_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers ask for the parameters of step 8, to evaluate with, while gradients of the 6th are on their way to the server.
    With a bound of 2, what comes by itself after those is for step 8, too."""
    held: list[tuple[Server, Mail]] = []
    let: set[int] = set()
    handle, ask, take = Server.handle, Client._ask, Client.pulled

    def waiting(self: Server, mail: Mail) -> bool:
        if isinstance(mail.message, Push) and mail.message.step >= 5 and mail.message.step not in let:
            held.append((self, mail))
            return True
        return handle(self, mail)

    def come(step: int) -> None:
        let.add(step)
        for each in [each for each in held if each[1].message.step == step]:  # type: ignore[attr-defined]
            held.remove(each)
            handle(*each)

    def asked(self: Client, key: Key, step: int, exact: bool = False) -> None:
        ask(self, key, step, exact)
        if exact:
            come(5)

    def pulled(self: Client, message: Pulled, mail: Mail) -> None:
        take(self, message, mail)
        if message.oldest > 5:
            come(message.oldest)

    for where, name, instead in ((Server, "handle", waiting), (Client, "_ask", asked), (Client, "pulled", pulled)):
        monkeypatch.setattr(where, name, instead)
    train("ps:ssp:2:eager=true", tmp_path, 8)
    assert let >= {5, 6, 7}
    assert not held


def test_a_server_that_dies_is_followed_by_one_that_sends_all_it_has(tmp_path: Path) -> None:
    name = "ps:bsp:servers=2:replicas=1:eager=true"
    calm = train(name, tmp_path / "calm", 8).summary
    hit = train(name, tmp_path / "hit", 8, Mortal(3, Death(1, 3))).summary
    assert [each.source for each in hit.recoveries] == ["replica"]
    assert hit.weights_sha256 == calm.weights_sha256


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ps:async:eager=true", "needs consistency=bsp or ssp:S with fetch=all, not async"),
        ("ps:ssp:inf:eager=true", "not ssp:inf"),
        ("ps:value:0.1:eager=true", "not value:0.1"),
        ("ps:asp:0.1:eager=true", "not asp:0.1"),
        ("ps:bsp:eager=true:fetch=layerwise", "with fetch=layerwise"),
    ],
)
def test_where_there_is_no_slowest_worker_to_wait_for_it_is_refused(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        registry.parse(name)


def test_what_nobody_asked_for_is_an_offence_unless_servers_are_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []
    take = Client.pulled

    def twice(self: Client, message: Pulled, mail: object) -> None:
        take(self, message, mail)  # type: ignore[arg-type]
        if message.step == 2 and not refused:
            try:
                take(self, Pulled(message.key, 900, 2), mail)  # type: ignore[arg-type]
            except ProtocolError as error:
                refused.append(str(error))

    monkeypatch.setattr(Client, "pulled", twice)
    for name in ("ps:bsp", "ps:bsp:eager=true"):
        refused.clear()
        train(name, tmp_path / name.replace(":", "-"), 4)
        assert "which nobody asked for" in refused[0]
