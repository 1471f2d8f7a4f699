"""Two homes as two masters in processes of their own, over TCP with a token: in either order, killed, kept out."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from commands import CLI, wait_for_step
from ringtmp.errors import UsageError
from ringtmp.launch.join_token import Token, decode
from ringtmp.launch.key_store import Rings
from ringtmp.launch.line_to_home import JoiningHome, ListeningHome
from ringtmp.metrics import events
from ringtmp.wire.home_messages import Differ, encode
from test_join_security import free_port

#: mlp of the digits: three linear layers.
DIGITS = ("--data", "digits", "--json", "--quiet", "--nodes", 1, "--batch-size", 32)


class Homes:
    """Two homes, each with a configuration of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.token = self.said("a", "ring", "token", "--ring", "homes", "--address", f"127.0.0.1:{self.port}").strip()

    def environment(self, home: str) -> dict[str, str]:
        return {**os.environ, "RINGTMP_CONFIG": str(self.folder / f"config-{home}")}

    def said(self, home: str, *words: object) -> str:
        done = subprocess.run(
            [*CLI, *map(str, words)], cwd=self.folder, env=self.environment(home), capture_output=True, text=True,
            timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def begin(self, home: str, *words: object) -> subprocess.Popen[str]:
        way = ("--home-listen", f"127.0.0.1:{self.port}") if home == "a" else ("--home-join", self.token)
        return subprocess.Popen(
            [*CLI, "train", *way, *map(str, words)], cwd=self.folder, env=self.environment(home), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip


def summary(process: subprocess.Popen[str], limit_s: float = 250) -> dict[str, Any]:
    out, said = process.communicate(timeout=limit_s)
    assert process.returncode == 0, said
    return dict(json.loads(out))


@pytest.mark.timeout(600)
def test_the_one_that_joins_may_come_first_and_both_end_with_the_same_bits(tmp_path: Path) -> None:
    """With other seeds: other first weights and other batches."""
    homes, flags = Homes(tmp_path), (*DIGITS, "--steps", 6, "--local-steps", 4, "--set", "width=16")
    joins = homes.begin("b", *flags, "--seed", 7, "--run-dir", "b")
    listens = homes.begin("a", *flags, "--run-dir", "a")
    one, other = summary(listens), summary(joins)
    assert one["weights_sha256"] == other["weights_sha256"]
    assert one["loss"] != other["loss"]
    met = [each for each in one["meetings"] if each["kind"] == "exchanged"]
    assert [(each["step"], each["round"]) for each in met] == [(4, 1), (6, 2)]
    formula = 4 * one["per_node"][0]["params"]
    assert formula
    for each in met:
        assert each["sent_bytes"] == pytest.approx(formula, rel=0.02)
        assert each["received_bytes"] == pytest.approx(formula, rel=0.02)
    assert [each["kind"] for each in other["meetings"]] == ["adopted", "exchanged", "exchanged"]


def test_a_token_of_another_ring_is_no_way_in_and_what_is_said_without_a_key_is_not_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGTMP_CONFIG", str(tmp_path / "a"))
    told: list[str] = []
    listens = ListeningHome(Rings(), "homes", "127.0.0.1", free_port(), told.append)
    try:
        token = decode(told[0].split()[-1])
        monkeypatch.setenv("RINGTMP_CONFIG", str(tmp_path / "b"))
        stranger = JoiningHome(Token(token.ring, token.address, token.key, bytes(16)), told.append, "stranger")
        try:
            with pytest.raises(UsageError, match="refused: the token's secret is wrong"):
                _talk(listens, stranger)
            assert not stranger.connected
        finally:
            stranger.close()
        friend = JoiningHome(token, told.append, "friend")
        try:
            heard = []
            for _ in range(400):
                friend.send(encode(Differ("hello")))
                heard += listens.receive(0.02)
                friend.receive(0.02)
                if heard:
                    break
            assert [message.why for message, _ in heard[:1]] == ["hello"]
            assert listens.send(encode(Differ("and back")), b"numbers")
            answers = [each for _ in range(50) for each in friend.receive(0.05)]
            assert [(message, bytes(payload)) for message, payload in answers] == [(Differ("and back"), b"numbers")]
        finally:
            friend.close()
    finally:
        listens.close()


def test_a_listening_home_that_is_resumed_knows_of_one_that_is_at_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is at its steps says nothing, and was taken for gone: the exchange was given up after --home-wait."""
    monkeypatch.setenv("RINGTMP_CONFIG", str(tmp_path / "a"))
    told: list[str] = []
    port = free_port()
    listens = ListeningHome(Rings(), "homes", "127.0.0.1", port, told.append)
    monkeypatch.setenv("RINGTMP_CONFIG", str(tmp_path / "b"))
    joins = JoiningHome(decode(told[0].split()[-1]), told.append)
    try:
        assert not listens.connected
        for _ in range(400):
            listens.receive(0.01)
            joins.receive(0.01)
            if joins.connected and joins.send(encode(Differ("hello"))):
                break
        assert _until(listens, True)
        listens.close()
        monkeypatch.setenv("RINGTMP_CONFIG", str(tmp_path / "a"))
        listens = ListeningHome(Rings(), "homes", "127.0.0.1", port, told.append)
        assert _until(listens, True), "it waits for nobody"
    finally:
        joins.close()
    try:
        assert _until(listens, False), "it waits for one that is gone"
    finally:
        listens.close()


def _until(listens: ListeningHome, connected: bool, limit_s: float = 30.0) -> bool:
    until = time.monotonic() + limit_s
    while listens.connected is not connected and time.monotonic() < until:
        listens.receive(0.02)
        listens.send(encode(Differ("are you there?")))
    return listens.connected is connected


def _talk(listens: ListeningHome, joins: JoiningHome) -> None:
    for _ in range(200):
        listens.receive(0.02)
        joins.receive(0.02)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_home_that_is_resumed_ends_with_the_bits_of_homes_that_were_never_disturbed(tmp_path: Path) -> None:
    flags = (*DIGITS, "--steps", 60, "--local-steps", 10, "--nodes", 2, "--set", "width=64", "--checkpoint-every", 5)
    calm = Homes(tmp_path)
    undisturbed = [
        calm.begin("a", *flags, "--run-dir", "calm-a"),
        calm.begin("b", *flags, "--seed", 3, "--run-dir", "calm-b"),
    ]
    wanted = [summary(each)["weights_sha256"] for each in undisturbed]
    listens = calm.begin("a", *flags, "--run-dir", "a")
    joins = calm.begin("b", *flags, "--seed", 3, "--run-dir", "b")
    wait_for_step(tmp_path / "b", 23, joins, 250)
    joins.kill()
    joins.communicate()
    again = calm.begin("b", "--resume", "b", "--json", "--quiet")
    assert [summary(listens)["weights_sha256"], summary(again)["weights_sha256"]] == wanted
    assert wanted[0] == wanted[1]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_after_as_many_samples_two_homes_have_learned_about_as_much_as_one_in_lock_step(tmp_path: Path) -> None:
    """Every home on half of a batch, against one ring on the whole of it: the same data, the same number of updates."""
    homes = Homes(tmp_path)
    common = ("--data", "digits", "--json", "--quiet", "--nodes", 1, "--steps", 400, "--set", "width=64")
    flags = (*common, "--batch-size", 16, "--local-steps", 20)
    begun = [homes.begin("a", *flags, "--run-dir", "a"), homes.begin("b", *flags, "--seed", 5, "--run-dir", "b")]
    found = [summary(each) for each in begun]
    step_by_step = json.loads(homes.said("c", "train", *common, "--batch-size", 32, "--run-dir", "c"))
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
    assert found[0]["test_loss"] < step_by_step["test_loss"] + 0.1, (found[0]["test_loss"], step_by_step["test_loss"])
    assert found[0]["accuracy"] > step_by_step["accuracy"] - 0.03
    kinds = [each.kind for each in events.read(tmp_path / "a" / "events.jsonl") if isinstance(each, events.HomesMet)]
    assert kinds == ["served", *["exchanged"] * 20]
