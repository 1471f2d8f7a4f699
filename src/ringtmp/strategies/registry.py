"""Every strategy by name: its settings, its place in the taxonomy, the systems it stands for, its parts on the nodes.

Pure but for `plan` and `member`, which load a strategy only when it is needed. The taxonomy is that of Langer et al.,
Distributed Training of Deep Learning Models: A Taxonomic Perspective (2020), and Verbraeken et al., A Survey on
Distributed Machine Learning (2020): what is split (parallelism), where the update is made (optimisation), who waits for
whom (scheduling), what is exchanged, and who talks to whom (topology).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringtmp.errors import UsageError, unknown
from ringtmp.strategies.ps.settings import AllReduceSettings, PsSettings, Roles, checked_allreduce, checked_ps
from ringtmp.wire.formats import wire_format

if TYPE_CHECKING:
    from ringtmp.runtime.endpoint import Endpoint
    from ringtmp.runtime.member import Member
    from ringtmp.strategies.base import Brief, Plan
    from ringtmp.wire.messages import Message


@dataclass(frozen=True)
class Setting:
    name: str
    values: str
    default: str
    meaning: str
    systems: str = ""


@dataclass(frozen=True)
class Entry:
    name: str
    title: str
    parallelism: str
    optimisation: str
    scheduling: str
    exchange: str
    topology: str
    source: str
    settings: tuple[Setting, ...] = ()
    #: The setting a short name gives: `ps:ssp:3` is consistency=ssp:3.
    short: str | None = None


RING = Entry(
    "ring", "Ring Topological Model Parallel: each node holds a run of adjacent layers",
    "model (vertical)", "decentralised by layer, one owner each", "synchronous", "activations and their gradients",
    "ring", "the project's own",
)  # fmt: skip
PS = Entry(
    "ps", "Parameter server: servers hold the parameters as keys, workers push gradients and pull parameters",
    "data", "centralised", "synchronous, asynchronous or bounded", "gradients up, parameters down",
    "k servers : n workers", "Smola and Narayanamurthy 2010; Ho et al. 2013; Li et al. 2014",
    (
        Setting("servers", "1..nodes-1 | workers", "1", "dedicated shards, or every node serves 1/n of the keys and works",
                "dedicated: DistBelief, Project Adam, Petuum; workers: BigDL, CaffeOnSpark, TensorFlow, MXNet"),
        Setting("consistency", "bsp | async | ssp:S", "bsp", "who waits: all, nobody, whoever is more than S steps ahead",
                "bsp: Spark MLlib; async: Downpour SGD, MXNet KVStore; ssp: Petuum, SINGA"),
        Setting("quorum", "1..workers", "all workers", "gradients a step needs; late ones are dropped and counted",
                "backup workers: Chen et al. 2016, TensorFlow"),
        Setting("replicas", "0 | 1", "0", "1: every shard is also kept by the next server, so that a server may die",
                "Li et al. 2014, Project Adam"),
        Setting("fetch", "all | layerwise", "all", "layerwise: a worker holds the layer it works on and the one ahead",
                ""),
    ),
    "consistency",
)  # fmt: skip
ALLREDUCE = Entry(
    "allreduce", "All-reduce: every node has the whole model and ends every step with the same sum of gradients",
    "data", "centralised, replicated in every worker", "synchronous", "gradients",
    "ring or tree of workers", "Patarasuk and Yuan 2009; Iandola et al. 2016",
    (
        Setting("algorithm", "ring | tree", "ring", "chunks around a ring, or whole gradients up and down a binomial tree",
                "ring: Baidu, Horovod; tree: FireCaffe"),
    ),
    "algorithm",
)  # fmt: skip
ENTRIES = {entry.name: entry for entry in (RING, PS, ALLREDUCE)}


def named(text: str) -> tuple[str, dict[str, Any]]:
    """`ps:ssp:3` -> ('ps', {'consistency': 'ssp:3'})"""
    name, colon, rest = text.partition(":")
    if name not in ENTRIES:
        raise unknown("strategy", name, ENTRIES)
    short = ENTRIES[name].short
    if not colon:
        return name, {}
    if short is None or not rest:
        raise UsageError(f"strategy {name} has no short form {text!r}: write --strategy {name} --with key=value")
    return name, {short: rest}


def checked(name: str, given: Mapping[str, Any], nodes: int, wire: str) -> dict[str, Any]:
    """The settings that were given, each in its range; refuses what the strategy does not have."""
    entry = ENTRIES[name]
    names = [setting.name for setting in entry.settings]
    for key in given:
        if key not in names:
            if not names:
                raise UsageError(f"strategy {name} has no setting {key!r}: it takes none")
            raise unknown(f"setting of strategy {name}", key, names)
    if name == "ps":
        checked_ps(given, nodes, wire)
    elif name == "allreduce":
        checked_allreduce(given, nodes)
    return dict(given)


def roles(name: str, given: Mapping[str, Any], nodes: int) -> Roles:
    """Who serves and who works. Of the ring every node works."""
    everyone = tuple(range(nodes))
    if name != "ps":
        return Roles((), everyone)
    servers = PsSettings(**given).servers
    if servers == "workers" or nodes == 1:
        return Roles(everyone, everyone)
    assert isinstance(servers, int)
    return Roles(everyone[:servers], everyone[servers:])


def exactness(name: str, given: Mapping[str, Any], wire: str) -> str:
    """`bits`: those of one process; `replay`: the same bits every time; `steps`: the same batches, other rounding."""
    if not wire_format(wire).exact:
        return "steps"
    if name == "ring":
        return "bits"
    return "replay" if name == "allreduce" or PsSettings(**given).deterministic else "steps"


def plan(brief: Brief) -> Plan:
    """The strategy of a run's settings, laid out for the nodes that are there."""
    if brief.config.ring.strategy == "ring":
        from ringtmp.strategies.ring import plan as ring_plan

        return ring_plan.plan(brief)
    from ringtmp.model.written_parameters import refuse_written
    from ringtmp.strategies.data_parallel import plan as parallel_plan

    refuse_written(brief.layers, brief.config.ring.strategy)
    return parallel_plan.plan(brief)


def member(endpoint: Endpoint, message: Message) -> Member | None:
    """The part a plan from the master gives this node; None if the message is not a plan."""
    from ringtmp.wire.messages import Enlist, Setup

    if isinstance(message, Setup):
        from ringtmp.strategies.ring.node import Node

        return Node(endpoint, message)
    if not isinstance(message, Enlist):
        return None
    who = roles(message.strategy, message.settings, message.nodes)
    if message.strategy == "ps":
        from ringtmp.strategies.ps.member import PsMember

        return PsMember(endpoint, message, PsSettings(**message.settings), who)
    from ringtmp.strategies.allreduce.member import AllReduceMember

    return AllReduceMember(endpoint, message, AllReduceSettings(**message.settings), who)
