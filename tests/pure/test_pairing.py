"""Pairing by a short code: who knows it gets a secret, guesses are few, and what was recorded or bent is worth nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("spake2", reason="needs spake2 (the extra discovery)")

from ringtmp.errors import UsageError
from ringtmp.launch import agent_messages as messages
from ringtmp.launch import announce, system_service
from ringtmp.launch.announce import Found
from ringtmp.launch.join_token import Token
from ringtmp.launch.pair_device import choose
from ringtmp.launch.pairing_code import FIRST_PAUSE_S, LONGEST_PAUSE_S, MOST_OPEN, DeviceSide, MasterSide, shown, typed
from ringtmp.launch.ways_to_join import qr_code, ways_to_join
from ringtmp.transport.encryption import new_key_pair

MASTER, DEVICE = new_key_pair().public, new_key_pair().public
SECRET = b"a token's secret"


class Desk:
    """A master whose clock and codes are ours."""

    def __init__(self) -> None:
        self.now = 100.0
        self.said: list[str] = []
        self.given = 0
        codes = iter(f"{each:06d}" for each in range(111111, 999999, 111111))
        self.master = MasterSide(
            "home", MASTER, self._secret, self.said.append, clock=lambda: self.now, make_code=lambda: next(codes)
        )

    def _secret(self) -> bytes:
        self.given += 1
        return SECRET

    def try_code(self, code: str, key: str = DEVICE, claims: str | None = None, master: str = MASTER) -> Any:
        """A device's whole exchange: the secret, or why not. `claims`: the key it believes to speak with."""
        self.now += 0.3
        side = DeviceSide(code, "home", claims or key, master)
        reply = self.master.answer(side.begin, key)
        if isinstance(reply, messages.Refused):
            return reply.reason
        assert isinstance(reply, messages.PairReply)
        done = self.master.answer(side.confirm(reply), key)
        return side.secret(done) if isinstance(done, messages.PairDone) else done.reason


def test_the_right_code_gives_a_secret_and_a_wrong_one_does_not() -> None:
    desk = Desk()
    assert desk.try_code("111112") == "that is not the code the master shows now"
    assert desk.try_code("111111") == SECRET
    assert desk.given == 1
    assert desk.said == []


def test_three_wrong_guesses_change_the_code_and_honest_devices_still_join_after_a_pause() -> None:
    desk = Desk()
    for guess in ("000000", "000001", "000002"):
        assert "not the code" in desk.try_code(guess)
    assert desk.said == [f"3 wrong pairing codes: the code is now {shown('222222')}, and pairing pauses for 5 s"]
    assert desk.try_code("222222").startswith("too many wrong codes: try again in ")
    desk.now += FIRST_PAUSE_S
    assert "not the code" in desk.try_code("111111")  # the old one
    assert desk.try_code("222222") == SECRET


def test_pauses_grow_and_a_right_code_forgives() -> None:
    desk, pauses = Desk(), []
    for _ in range(5):
        for _ in range(3):
            assert "not the code" in desk.try_code("000000")
        pauses.append(desk.said[-1].rpartition("for ")[2])
        desk.now += LONGEST_PAUSE_S
    assert pauses == ["5 s", "10 s", "20 s", "40 s", "60 s"]
    assert desk.try_code(desk.master.code) == SECRET
    for _ in range(3):
        desk.try_code("000000")
    assert desk.said[-1].endswith("5 s")


def test_guesses_in_parallel_are_counted_one_by_one() -> None:
    """Eight exchanges begun under one code: the third wrong confirmation ends the rest."""
    desk = Desk()
    begun = []
    for number in range(8):
        key = new_key_pair().public
        side = DeviceSide(f"00000{number}", "home", key, MASTER)
        desk.now += 0.3
        reply = desk.master.answer(side.begin, key)
        assert isinstance(reply, messages.PairReply)
        begun.append((key, side.confirm(reply)))
    answers = [desk.master.answer(confirm, key) for key, confirm in begun]
    assert [getattr(each, "reason", "")[:8] for each in answers[:3]] == ["that is "] * 3
    assert all(each.reason.startswith("too many wrong codes") for each in answers[3:])  # type: ignore[union-attr]


def test_one_exchange_is_one_guess_and_a_recorded_one_does_not_help() -> None:
    desk = Desk()
    side = DeviceSide("111111", "home", DEVICE, MASTER)
    reply = desk.master.answer(side.begin, DEVICE)
    assert isinstance(reply, messages.PairReply)
    confirm = side.confirm(reply)
    done = desk.master.answer(confirm, DEVICE)
    assert isinstance(done, messages.PairDone)
    again = desk.master.answer(confirm, DEVICE)
    assert isinstance(again, messages.Refused)
    assert again.reason == "that pairing is over: begin again"
    # All of it once more, from the beginning: the master's half is another, so the confirmation fits no more.
    replayed = desk.master.answer(side.begin, DEVICE)
    assert isinstance(replayed, messages.PairReply)
    assert replayed.element != reply.element
    assert isinstance(desk.master.answer(confirm, DEVICE), messages.Refused)
    assert desk.given == 1


def test_whoever_stands_between_has_other_keys_and_gets_nothing() -> None:
    desk, between = Desk(), new_key_pair().public
    assert "not the code" in desk.try_code("111111", key=between, claims=DEVICE)
    assert "not the code" in desk.try_code("111111", master=between)


def test_a_false_master_is_found_out_before_its_secret_is_used() -> None:
    side = DeviceSide("111111", "home", DEVICE, MASTER)
    reply = Desk().master.answer(side.begin, DEVICE)
    assert isinstance(reply, messages.PairReply)
    side.confirm(reply)
    with pytest.raises(UsageError, match="does not know the code: it is not the master that shows it"):
        side.secret(messages.PairDone(b"x" * 32, SECRET))
    with pytest.raises(UsageError, match="makes no sense"):
        DeviceSide("111111", "home", DEVICE, MASTER).confirm(messages.PairReply(b"no point"))


def test_what_is_no_exchange_is_refused_and_the_open_ones_are_few() -> None:
    desk = Desk()
    for element in (b"", b"A", b"\x00" * 33, b"B" + b"\x01" * 32, b"A" + b"\xff" * 32):
        desk.now += 1
        assert isinstance(desk.master.answer(messages.PairBegin(element), DEVICE), messages.Refused)
    assert isinstance(desk.master.answer(messages.PairConfirm(b""), DEVICE), messages.Refused)
    assert desk.said == []  # no guess was made
    for _ in range(MOST_OPEN + 3):
        desk.now += 0.3
        key = new_key_pair().public
        desk.master.answer(DeviceSide("000000", "home", key, MASTER).begin, key)
    assert len(desk.master._open) == MOST_OPEN
    slow = DeviceSide("111111", "home", DEVICE, MASTER)
    desk.now += 1
    reply = desk.master.answer(slow.begin, DEVICE)
    assert isinstance(reply, messages.PairReply)
    desk.now += 60
    assert isinstance(desk.master.answer(slow.confirm(reply), DEVICE), messages.Refused)


def test_exchanges_begin_slowly() -> None:
    desk = Desk()
    answers = [
        desk.master.answer(DeviceSide("000000", "home", DEVICE, MASTER).begin, DEVICE) for _ in range(7)
    ]  # fmt: skip
    assert [isinstance(each, messages.PairReply) for each in answers] == [True] * 5 + [False] * 2


def test_codes_are_read_as_people_type_them() -> None:
    assert typed(" 483-920\n") == typed("483 920") == "483920"
    for wrong in ("48392", "4839200", "48392x", "४८३९२०", ""):
        with pytest.raises(UsageError, match="a pairing code has 6 digits, such as 000-000"):
            typed(wrong)


# -- what is announced and found ----------------------------------------------------------------------------------------


def announced(**changes: Any) -> Any:
    said = {
        "properties": {b"ring": b"home", b"key": MASTER.encode()}, "port": 47100, "addresses": [b"\x0a\x4d\x00\x01"],
        **changes,
    }  # fmt: skip
    return SimpleNamespace(**said)


def test_what_does_not_look_like_a_ring_is_passed_over() -> None:
    assert announce.read(announced()) == [Found("home", "10.77.0.1:47100", MASTER)]
    for wrong in (
        {"properties": {b"ring": b"\x1b[31mhome", b"key": MASTER.encode()}},
        {"properties": {b"ring": b"home", b"key": b"short"}},
        {"properties": {b"ring": None, b"key": MASTER.encode()}},
        {"properties": None},
        {"port": None},
        {"port": 65535},
        {"addresses": []},
        {"addresses": [b"\xe0\x00\x00\xfb"]},
        {"addresses": [b"\x00\x00\x00\x00"]},
    ):
        assert announce.read(announced(**wrong)) == []


def test_only_name_address_and_public_key_are_announced() -> None:
    service = announce._service("home", "10.77.0.1", 47100, MASTER)
    assert service.properties == {b"ring": b"home", b"key": MASTER.encode()}
    assert announce.read(service) == [Found("home", "10.77.0.1:47100", MASTER)]


def test_one_ring_is_taken_and_of_several_a_person_picks_one() -> None:
    home, work = Found("home", "10.0.0.1:1", MASTER), Found("work", "10.0.0.2:1", MASTER)
    said: list[str] = []

    def nobody(question: str) -> str:
        raise AssertionError(question)

    assert choose([home], None, nobody, said.append) is home
    assert choose([home, work], "work", nobody, said.append) is work
    assert choose([home, work], None, lambda question: "2\n", said.append) is work
    assert said[-2:] == ["1: ring home at 10.0.0.1:1", "2: ring work at 10.0.0.2:1"]
    with pytest.raises(UsageError, match="'3' is not a number from 1 to 2"):
        choose([home, work], None, lambda question: "3", said.append)
    with pytest.raises(UsageError, match=r"no ring called garden answers .*UDP port 5353"):
        choose([home], "garden", nobody, said.append)


def test_the_master_shows_line_code_and_picture() -> None:
    desk = Desk()
    text = ways_to_join("ringtmp node --join rt1.x", "home", desk.master, qr=True)
    assert "    ringtmp node --join rt1.x\n" in text
    assert "or run only: ringtmp node, and type the code 111-111 of ring home" in text
    assert text.isprintable() or set(text) <= {*"█▀▄ \n", *text[: text.index("█")]}
    assert "code" not in ways_to_join("line", "home", None, qr=False)
    rows = qr_code("x" * 150).splitlines()
    assert len(rows) * 2 - len(rows[0]) in (0, 1)
    assert set("".join(rows)) <= set("█▀▄ ")


# -- after a reboot ------------------------------------------------------------------------------------------------------


def test_install_writes_a_unit_and_a_token_only_the_user_reads(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("RINGTMP_CONFIG", str(tmp_path / "my % config"))
    (tmp_path / "my % config").mkdir()
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(system_service, "_systemctl", lambda *words: asked.append(words) or "")
    token = Token("home", "10.0.0.1:47100", MASTER, b"s" * 16)
    told = system_service.install(token, ["--name", "pi-1"])
    unit = (tmp_path / "systemd/user/ringtmp-node.service").read_text()
    assert "node --join '@" in unit
    assert "my %% config/node-token' --name pi-1\n" in unit
    assert "Restart=always" in unit
    assert (tmp_path / "my % config/node-token").stat().st_mode & 0o777 == 0o600
    assert asked == [("daemon-reload",), ("enable", "--now", "ringtmp-node.service")]
    assert told[0].startswith("wrote ")
    assert system_service.uninstall() == [f"removed {system_service.unit_path()}"]
    assert not (tmp_path / "my % config/node-token").exists()
    with pytest.raises(UsageError, match="nothing is installed here"):
        system_service.uninstall()
