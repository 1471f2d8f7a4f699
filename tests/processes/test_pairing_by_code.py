"""A master that announces itself and shows a code, over real sockets on loopback: found, paired with, guessed at, recorded."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

pytest.importorskip("spake2", reason="needs spake2 (the extra discovery)")
pytest.importorskip("zeroconf", reason="needs zeroconf (the extra discovery)")

from commands import here
from ringtmp.errors import UsageError
from ringtmp.launch import agent, announce
from ringtmp.launch import agent_messages as messages
from ringtmp.launch.agent import at_the_door
from ringtmp.launch.announce import Found
from ringtmp.launch.authenticate_devices import Hub
from ringtmp.launch.device_facts import device_facts
from ringtmp.launch.key_store import Rings
from ringtmp.launch.pair_device import WrongCode, pair, pair_with
from ringtmp.launch.pairing_code import MasterSide, shown
from ringtmp.transport.encryption import new_key_pair
from test_join_security import free_port

HOST = "127.0.0.1"


class Master:
    def __init__(self, folder: Path, discovery: bool = True) -> None:
        self.said: list[str] = []
        self.rings = Rings(folder)
        self.key = self.rings.open("home", create=True).public
        self.port = free_port()
        self.pairing = MasterSide(
            "home", self.key, lambda: self.rings.new_secret("home", 1), self.said.append, clock=time.monotonic
        )
        self.hub = Hub("home", self.rings, HOST, self.port, pairing=self.pairing if discovery else None)
        self.found = Found("home", f"{HOST}:{self.port}", self.key)


@contextmanager
def waiting(folder: Path, discovery: bool = True) -> Iterator[Master]:
    """A master that takes what comes."""
    master, stop = Master(folder, discovery), threading.Event()

    def serve() -> None:
        while not stop.is_set():
            master.hub.poll(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield master
    finally:
        stop.set()
        thread.join()
        master.hub.close()


def test_a_ring_is_found_paired_with_by_its_code_and_joined(tmp_path: Path) -> None:
    with waiting(tmp_path) as master:
        limit = time.monotonic() + 20
        found: list[Found] = []
        while master.found not in found and time.monotonic() < limit:
            found = announce.look(0.5, hosts=[HOST])
        assert master.found in found
        keys, said = new_key_pair(), list[str]()
        answers = iter(["000-000" if master.pairing.code != "000000" else "1-1-1-1-1-1", shown(master.pairing.code)])
        token = pair_with(master.found, keys, lambda question: next(answers), said.append)
        assert "that is not the code the master shows now" in said[0]
        assert agent.join(token, keys, device_facts("pi-1")).endswith(str(master.port + 1))
        # The secret was for one device.
        with pytest.raises(UsageError, match="the token is used up"):
            agent.join(token, new_key_pair(), device_facts("pi-2"))


def test_three_wrong_codes_change_it_and_pause_everybody_for_a_while(tmp_path: Path) -> None:
    with waiting(tmp_path) as master:
        before = master.pairing.code
        wrong = f"{(int(before) + 1) % 10**6:06d}"
        for _ in range(3):
            with pytest.raises(WrongCode, match="that is not the code"):
                pair(master.found, wrong, new_key_pair())
        assert master.pairing.code != before
        assert shown(master.pairing.code) in master.said[0]
        with pytest.raises(WrongCode, match="too many wrong codes: try again in 5 s"):
            pair(master.found, master.pairing.code, new_key_pair())
        master.pairing._not_before = 0.0  # the pause is over
        assert pair(master.found, master.pairing.code, new_key_pair()).ring == "home"


def test_a_master_without_discovery_takes_tokens_only_and_one_of_another_key_hears_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with waiting(tmp_path, discovery=False) as master:
        with pytest.raises(WrongCode, match=r"this master takes tokens only \(--no-discovery\)"):
            pair(master.found, "123456", new_key_pair())
        monkeypatch.setattr("ringtmp.launch.pair_device.ANSWER_LIMIT_S", 0.5)
        with pytest.raises(UsageError, match="does not answer within"):
            pair(Found("home", master.found.address, new_key_pair().public), "123456", new_key_pair())


def test_a_crowded_door_drops_requests_and_pairing_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests in a second than are read: the first exchange is lost, the second is not."""
    monkeypatch.setattr("ringtmp.launch.pair_device.ANSWER_LIMIT_S", 1.2)
    with waiting(tmp_path) as master:
        door = master.hub._door
        assert door is not None
        door._recent.extend([time.monotonic()] * 10)
        assert pair(master.found, master.pairing.code, new_key_pair()).ring == "home"


def test_what_is_sent_again_word_for_word_is_refused(tmp_path: Path) -> None:
    """A whole recorded exchange, even with the device's own keys."""
    with waiting(tmp_path) as master:
        keys, sent = new_key_pair(), list[bytes]()
        real = zmq.Socket.send
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zmq.Socket, "send", lambda self, data, *more, **rest: (sent.append(bytes(data)), real(self, data, *more, **rest))[1])  # fmt: skip  # noqa: E501
            token = pair(master.found, master.pairing.code, keys)
        with at_the_door(token, keys, zmq.EVENT_HANDSHAKE_SUCCEEDED) as (door, _):
            answers = []
            for each in sent[:2]:
                door.send(each)
                assert door.poll(5000)
                answers.append(messages.decode(messages.from_master, door.recv(), messages.Heard.STRANGER))
        assert isinstance(answers[0], messages.PairReply)
        assert isinstance(answers[1], messages.Refused)


def test_a_node_without_a_token_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGTMP_CONFIG", str(tmp_path))
    monkeypatch.setattr("ringtmp.launch.announce.LOOK_S", 0.1)
    monkeypatch.delenv("RINGTMP_TOKEN", raising=False)
    said = here("node", "--no-discovery", cwd=tmp_path, code=2).stderr
    assert "no join token: give --join TOKEN" in said
    assert (
        "--ring is for joining without a token"
        in here("node", "--ring", "a", "--no-discovery", cwd=tmp_path, code=2).stderr
    )
    assert "leave out --once" in here("node", "--install", "--once", cwd=tmp_path, code=2).stderr
    monkeypatch.setattr(announce, "look", lambda **given: [])
    said = here("node", "--ring", "garden", cwd=tmp_path, code=2).stderr
    assert "no ring called garden answers on this network" in said
    monkeypatch.setattr(announce, "available", lambda: False)
    assert "pip install 'ringtmp[discovery]'" in here("node", cwd=tmp_path, code=2).stderr
    assert "--qr goes with --listen" in here("train", "--qr", cwd=tmp_path, code=2).stderr
    assert not os.listdir(tmp_path)
