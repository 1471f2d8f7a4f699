"""Who may say what to whom, and when: every message class, from every sender, in every phase; and what it costs."""

from __future__ import annotations

import runpy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch
import zmq

from crooked import Crooked
from ringtmp.errors import ProtocolError
from ringtmp.launch import agent_messages, authenticate_devices
from ringtmp.launch.agent_messages import Died, Heartbeat, Join, Started
from ringtmp.launch.device_facts import device_facts
from ringtmp.launch.key_store import Rings
from ringtmp.plan.route import plain_ring
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.strategies import registry
from ringtmp.strategies.data_parallel import sum_over_workers
from ringtmp.transport.encryption import connect_securely, new_key_pair
from ringtmp.transport.in_process import Hub
from ringtmp.transport.zeromq import ZeroMQTransport
from ringtmp.wire import messages as messages
from ringtmp.wire.address import NOWHERE, Address
from ringtmp.wire.messages import MESSAGES, Crossing, Message, Recipe
from ringtmp.wire.who_may_send import ALWAYS, CONTROL, MEETING, PLAN, TENSOR, NodeMessage, Phase, Who, told
from test_data_parallel_healing import Base
from test_join_security import free_port

pytestmark = pytest.mark.usefixtures("offenders")
NODES = 3
RECIPE = Recipe(0, 1, "sgd", {"lr": 0.1}, {"kind": "constant", "warmup": 0}, 1.0)
SETUP = messages.Setup(plain_ring(NODES, [(0, 1), (1, 2), (2, 3), (3, 4)]), RECIPE, 2, "1f1b", 0, {}, 0)
NEAR = dict.fromkeys(range(NODES), NOWHERE)
PLANS: dict[str, Any] = {
    "ring": messages.Setup(SETUP.route, RECIPE, 2, "1f1b", 0, NEAR, 0),
    "ps": messages.Enlist("ps", {"servers": 2}, NODES, RECIPE, "float32", "mse", (4, 4), 0, NEAR, 0),
    "allreduce": messages.Enlist("allreduce", {}, NODES, RECIPE, "float32", "mse", (4, 4), 0, NEAR, 0),
}
#: One of every class.
EXAMPLES: dict[type, Message] = {
    type(each): each
    for each in (
        messages.Activations(1, 0, 1, 0, 2, True, True, ()), messages.Gradients(1, 0, 1, 0), messages.Norms(1, 1),
        messages.Scale(1, 1), messages.GroupSum(1, 1, 0, 2, 0),
        messages.GroupNorms(1, 1), messages.GroupWeights(1, 1, 0), messages.GroupState(0, 1, 0, ()),
        messages.GroupChange(0, 1, 0),
        messages.Hello(1, "2", "x"), SETUP, messages.Place(1, b"", ()), messages.Placed(1),
        messages.Fetch(1, 0), messages.LayerState(1, ()), messages.Report(()), messages.Inspect(0),
        messages.Inspected(()), messages.Failed(0, "", ""), messages.Accused(2, ""), messages.Stop(""), messages.Bye(b""),
        messages.Renew(2), messages.Keep(0, 1, 0, 0.0, b""), messages.Held(0, 1, 1, 0.0, 0.0), messages.Whole(0),
        messages.Detail(0),
        messages.Void(0), messages.Recall(0, 1), messages.Restore(0, 1, b""), messages.Missing(1, ""),
        messages.Sample(b"", (), 1), messages.Timed(1.0, 1, 1), messages.Echo(0, 0), messages.Echoed(0),
        messages.Meet({}), messages.Try(2, 1.0), messages.Tried(2, 1.0, 1.0, 0.0), PLANS["ps"],
        messages.Work(0, True, True, 1, 0, (1,), ""), messages.WorkDone(0, 0.0, 1.0), messages.Scored(0.0, 1, 1, 1),
        messages.Predicted(), messages.Enough(0),
        messages.Store(0, ()), messages.Kept(0, ()), messages.Push(0, 0, 1.0, True), messages.Pull(0, 0),
        messages.Pulled(0, 0, 0), messages.Copy(0, 0, 0, 1.0), messages.Copied(0, 0), messages.Lost(2),
        messages.Squares(0, 0.0, 1), messages.Total(0, 0.0), messages.GradientPart(0, 0, 0, 0, False),
        messages.PeerModel(0, 0, 1.0), messages.Factors(0, 0, 1), messages.Lend(0),
        messages.ServeTables((), 1, 0), messages.FirstRows(0), messages.PushRows(0, 0, 0), messages.Tick(0, 1),
        messages.PullRows(0, 0, 0, 0), messages.PulledRows(0, 0),
    )
}  # fmt: skip


def at(node: int, strategy: str | None) -> Endpoint:
    """A node's endpoint, with a plan of this strategy or none."""
    endpoint = Endpoint(Hub().transport(node), "ring", 1, limit_bytes=2**20)
    if strategy is not None:
        assert registry.member(endpoint, PLANS[strategy]) is not None
    return endpoint


def said(by: int, to: Endpoint, message: Message) -> tuple[bool, str]:
    """Whether it got through as far as its sender is concerned, and why not."""
    hub = Hub()
    receiver = Endpoint(hub.transport(to.node), "ring", 1, limit_bytes=2**20)
    receiver._is_a, receiver._inspectors, receiver._ending = to._is_a, to._inspectors, to._ending
    sender = Endpoint(hub.transport(by), "ring", 1, limit_bytes=2**20)
    sender.post(to.node, message)
    mail = receiver.collect()
    offences = receiver.offences()
    assert len(mail) + len(offences) == 1, "either handled or an offence"
    text = offences[0].text if offences else ""
    return not ("which is said by" in text or ("out of turn" in text and type(message).__name__ + " out" in text)), text


def test_there_is_an_example_of_every_message() -> None:
    assert set(EXAMPLES) == set(MESSAGES)


#: By hand, not from the classes: who is what in a ring of three, and under a parameter server with two servers.
ROLES = {
    "ring": {0: {Who.MASTER}, 1: {Who.NODE}, 2: {Who.NODE}},
    "ps": {0: {Who.MASTER, Who.SERVER}, 1: {Who.NODE, Who.SERVER}, 2: {Who.NODE, Who.WORKER}},
    "allreduce": {0: {Who.MASTER, Who.WORKER}, 1: {Who.NODE, Who.WORKER}, 2: {Who.NODE, Who.WORKER}},
}
#: To the visit in the example, which lies on node 1.
ABOUT_VISIT_1 = {Who.BEFORE: 0, Who.AFTER: 2}


def may(message: Message, by: int, to: int, strategy: str | None, phase: Phase) -> bool:
    rule = message.RULE
    for group, node, other in ((rule.by, by, to), (rule.to, to, by)):
        known = ROLES[strategy or "ring"][node]
        if strategy is None:  # who will be a neighbour, a server or a worker is not known yet
            known = known | {Who.BEFORE, Who.AFTER, Who.MEMBER, Who.SERVER, Who.WORKER}
        elif strategy == "ring":
            known = known | {who for who, there in ABOUT_VISIT_1.items() if node == there and other == 1}
            if isinstance(message, messages.Keep):  # of node 1 to node 2, of node 2 to the master
                known = (known - {Who.BEFORE, Who.AFTER}) | ({Who.BEFORE} if (by, to) in ((1, 2), (2, 0)) else set())
        if not known & set(group):
            return False
    overtook = strategy is None and to != 0 and bool(rule.when & PLAN)
    return bool(rule.when & phase) or overtook


@pytest.mark.parametrize("strategy", [None, "ring", "ps", "allreduce"])
@pytest.mark.parametrize("to", range(NODES))
def test_every_message_from_every_sender_is_handled_only_where_its_class_says_so(strategy: str | None, to: int) -> None:
    phase = MEETING if strategy is None else PLAN
    receiver = at(to, strategy)
    refused = 0
    for by in set(range(NODES)) - {to}:
        for message in EXAMPLES.values():
            through, text = said(by, receiver, message)
            assert through == may(message, by, to, strategy, phase), f"{message} from {by} to {to}: {text}"
            refused += not through
    assert refused > 20


@pytest.mark.parametrize(
    "kind", ["Place", "Restore", "Whole", "Void", "Stop", "Renew", "Setup", "Enlist", "Lost", "Fetch"]
)
def test_only_the_master_gives_orders_and_nobody_orders_the_master(kind: str) -> None:
    message = EXAMPLES[getattr(messages, kind)]
    for strategy in (None, *PLANS):
        assert not said(1, at(0, strategy), message)[0]
        assert not said(1, at(2, strategy), message)[0]


def test_a_goodbye_is_said_when_the_run_ends_and_not_before() -> None:
    master = at(0, "ring")
    assert not said(1, master, EXAMPLES[messages.Bye])[0]
    master.end()
    assert said(1, master, EXAMPLES[messages.Bye])[0]
    assert said(1, master, EXAMPLES[messages.Hello])[0], "what was under way may still come"
    assert not said(1, master, EXAMPLES[messages.Stop])[0]


def test_a_message_on_another_channel_than_its_own_is_an_offence() -> None:
    hub = Hub()
    receiver = Endpoint(hub.transport(0), "ring", 1, limit_bytes=2**20)
    sender = Endpoint(hub.transport(1), "ring", 1, limit_bytes=2**20)
    link = sender._link(0, TENSOR)
    link.send(EXAMPLES[messages.Hello], (), 0.0)
    sender._flush(0, TENSOR, link)
    assert not receiver.collect()
    assert "on the tensor channel" in receiver.offences()[0].text


def test_a_message_class_without_a_channel_or_with_tensors_on_the_control_channel_cannot_be_defined() -> None:
    assert all(isinstance(each.RULE.when, Phase) and each.RULE.when & ALWAYS for each in MESSAGES)
    assert {each for each in NodeMessage.__subclasses__() if each.__module__.startswith("ringtmp.wire.")} == set(
        MESSAGES
    )
    with pytest.raises(TypeError, match="Mute has no RULE: say its channel"):
        type("Mute", (NodeMessage,), {"__annotations__": {"step": int}})
    with pytest.raises(TypeError, match="Heavy has tensors"):
        type("Heavy", (NodeMessage,), {"__annotations__": {"tensors": tuple}, "RULE": told(CONTROL, PLAN)})


def test_what_overtook_the_plan_is_judged_when_the_plan_is_there() -> None:
    """Node 2 sends activations for a visit whose neighbour it is not: that shows only under the plan."""
    waiting, stray = at(1, None), messages.Activations(1, 0, 1, 0, 2, True, True, ())
    waiting.judge(2, stray)
    with pytest.raises(ProtocolError, match="neighbour before"):
        at(1, "ring").judge(2, stray)


def test_tensors_are_refused_before_memory_is_taken_for_them() -> None:
    setup = messages.Setup(SETUP.route, RECIPE, 2, "1f1b", 0, NEAR, 0, {1: (Crossing("float32", (4,), True),)})
    hub = Hub()
    receiver = Endpoint(hub.transport(1), "ring", 1, limit_bytes=2**40)
    registry.member(receiver, setup)
    sender = Endpoint(hub.transport(0), "ring", 1, limit_bytes=2**20)
    huge = torch.zeros(1).expand(2**33)  # 32 GiB to whoever takes it
    spec = messages.Activations(1, 0, 1, 0, 1, True, True, (True,), (_spec(huge),))
    link = sender._link(1, TENSOR)
    link.send(spec, (), 0.0)
    sender._flush(1, TENSOR, link)
    assert not receiver.collect()
    assert "the plan says" in receiver.offences()[0].text


def _spec(tensor: torch.Tensor) -> Any:
    from ringtmp.wire.tensors import TensorSpec

    return TensorSpec("float32", tuple(tensor.shape), (1,))


def test_the_tables_in_the_docs_are_current() -> None:
    """python scripts/write_message_tables.py makes them anew."""
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "write_message_tables.py"))
    text = script["PAGE"].read_text()
    assert script["page"](text) == text


# -- what it costs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Base]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sum_over_workers, "BUCKET", 32)
        yield Base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def calm(base: Base) -> str:
    return str(base.run(Crooked(3, 1, lambda *_: None), "ring", steps=4).summary.weights_sha256)


def slipped_in(message: Message, to: int, moment: type) -> Any:
    """Instead of the first message of a class; the honest one is never sent."""
    return lambda peer, sent, tensors: (to, message, []) if isinstance(sent, moment) else None


ORDERS = [each for each in MESSAGES if set(each.RULE.by) == {Who.MASTER}]


@pytest.mark.parametrize("to", [0, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ORDERS, ids=lambda kind: kind.__name__)
def test_a_worker_that_gives_orders_is_dropped_and_named_and_no_bit_changes(
    kind: type, to: int, base: Base, calm: str, tmp_path: Path
) -> None:
    pool = Crooked(3, 1, slipped_in(EXAMPLES[kind], to, messages.Gradients))
    done = base.run(pool, "ring", steps=4).summary
    assert pool.spoke
    assert done.weights_sha256 == calm
    (recovery,) = done.recoveries
    assert recovery.lost == (1,)
    assert f"node 1 broke the protocol in step 1: it sent {kind.__name__}" in recovery.reason


# -- over real sockets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Place", "Stop", "Renew"])
def test_over_encrypted_links_too_a_workers_orders_are_an_offence(kind: str) -> None:
    master, worker = (ZeroMQTransport(node, ("tcp://127.0.0.1:*",) * 3, new_key_pair()) for node in (0, 1))
    receiver = Endpoint(master, "ring", 1, limit_bytes=2**20)
    sender = Endpoint(worker, "ring", 1, limit_bytes=2**20)
    try:
        registry.member(receiver, PLANS["ring"])
        receiver.connect(1, worker.address)
        sender.connect(0, master.address)
        sender.post(0, EXAMPLES[getattr(messages, kind)])
        limit = time.monotonic() + 20
        while not (offences := receiver.offences()) and time.monotonic() < limit:
            sender.collect()
            assert not receiver.collect(), "it was handled"
            receiver.wait(0.05)
        assert [each.node for each in offences] == [1]
        assert f"sent {kind}" in offences[0].text
    finally:
        sender.close()
        receiver.close()


FACTS = device_facts("board")


@pytest.mark.parametrize(
    "said",
    [
        Heartbeat("i", msgspec.structs.replace(FACTS, cores=0)),
        Heartbeat("i", msgspec.structs.replace(FACTS, cores=10**9)),
        Heartbeat("i", msgspec.structs.replace(FACTS, memory_bytes=-1)),
        Heartbeat("i", msgspec.structs.replace(FACTS, name="\x1b[2J")),
        Join(b"s" * 16, FACTS),
        Started("run", 1, Address(("tcp://127.0.0.1:1", "tcp://127.0.0.1:1", "file:///etc/passwd"), "k" * 40), 1),
        Died("run", -1, 0, ""),
        b"\xc1 noise",
    ],
    ids=lambda said: type(said).__name__,
)
def test_a_device_that_says_what_cannot_be_is_told_so_and_has_no_part_in_the_run(said: Any, table: Table) -> None:
    table.hub.run = "run"
    table.say(Heartbeat("i", FACTS))
    assert table.until(lambda: bool(table.hub.present())), "an honest device is here"
    table.say(said)
    assert table.until(lambda: not table.hub.present()), "and after that it is not"
    (device,) = table.hub.devices.values()
    assert device.broke
    assert "broke the protocol" in table.heard()


class Table:
    """A hub, and a device at its table."""

    def __init__(self, folder: Path) -> None:
        rings, keys = Rings(folder), new_key_pair()
        rings.open("home", create=True)
        port = free_port()
        assert rings.admit("home", rings.new_secret("home", 1), keys.public, "board") is None
        self.hub = authenticate_devices.Hub("home", rings, "127.0.0.1", port)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        connect_securely(self._dealer, keys, rings.open("home").public, "ring")
        self._dealer.connect(f"tcp://127.0.0.1:{port + 1}")

    def say(self, what: Any) -> None:
        self._dealer.send(what if isinstance(what, bytes) else agent_messages.encode(what))

    def until(self, true: Callable[[], bool]) -> bool:
        limit = time.monotonic() + 20
        while not true() and time.monotonic() < limit:
            self.hub.poll(0.05)
        return true()

    def heard(self) -> str:
        assert self._dealer.poll(20_000)
        answer = agent_messages.decode(agent_messages.from_master, self._dealer.recv(), agent_messages.Heard.AGENT)
        return answer.reason if isinstance(answer, agent_messages.Refused) else ""

    def close(self) -> None:
        self._dealer.close(linger=0)
        self._context.term()
        self.hub.close()


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    made = Table(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("kind", [*get_args(agent_messages.FromAgent), *get_args(agent_messages.FromMaster)])
def test_agents_and_the_master_say_everything_in_its_place_alone(kind: type) -> None:
    address = Address(("tcp://127.0.0.1:1",) * 3, "k" * 40)
    examples: list[Any] = [
        Join(b"s", FACTS), agent_messages.JoinCheck(b"s"), Heartbeat("i", FACTS), Started("r", 1, address, 1),
        Died("r", 1, 0, ""),
        agent_messages.Leaving(), agent_messages.Welcome("x"), agent_messages.Refused("x"), agent_messages.JoinCheckAnswer("x"),
        agent_messages.Prepare("r", 1, 1, address, 1), agent_messages.End(1), agent_messages.PairBegin(b"e"),
        agent_messages.PairConfirm(b"p"), agent_messages.PairReply(b"e"), agent_messages.PairDone(b"p", b"s"),
    ]  # fmt: skip
    (example,) = [each for each in examples if type(each) is kind]
    decoder: Any = (
        agent_messages.from_agent if kind in get_args(agent_messages.FromAgent) else agent_messages.from_master
    )
    for at in agent_messages.Heard:
        if at in kind.AT:  # type: ignore[attr-defined]
            assert agent_messages.decode(decoder, agent_messages.encode(example), at) == example
        else:
            with pytest.raises(ProtocolError, match="is not said by"):
                agent_messages.decode(decoder, agent_messages.encode(example), at)
