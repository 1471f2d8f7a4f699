"""Published systems as rows of a taxonomy: what is split, who updates, who waits, what travels, who talks to whom.

The first seventeen are the table of Langer et al. (2020) as it was printed; the others are those that the survey of
Verbraeken et al. (2020) adds. How one runs here is said by the strategy that runs it (`Strategy.runs`); one that no strategy
names is "not yet". Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ringtmp.strategies.base import Runs, Strategy

NOT_YET = "not yet"
COLUMNS = ("system", "parallelism", "optimisation", "scheduling", "exchange", "topology", "here")


class System(msgspec.Struct, frozen=True):
    name: str
    parallelism: str
    optimisation: str
    scheduling: str
    exchange: str
    topology: str
    source: str


TAXONOMY = (
    System("BigDL", "data", "central", "sync.", "scatter-reduce", "distributed PS, k = n", "Dai et al. 2019"),
    System("CaffeOnSpark", "data", "central", "sync.", "scatter-reduce", "distributed PS, k = n", "Feng et al. 2016"),
    System("COTS HPC", "model", "central", "sync.", "-", "distributed arrays", "Coates et al. 2013"),
    System("D-PSGD", "data", "decentral", "sync.", "2:1 reduce", "closed ring", "Lian et al. 2017"),
    System("DistBelief", "model + data", "central", "async.", "ad hoc", "distributed PS", "Dean et al. 2012"),
    System("EASGD", "data", "decentral", "async.", "ad hoc", "single master", "Zhang et al. 2015"),
    System("FireCaffe", "data", "central", "sync.", "binomial tree", "single PS", "Iandola et al. 2016"),
    System("GoSGD", "data", "decentral", "soft-bounded async.", "ad hoc", "p2p mesh", "Blot et al. 2016"),
    System("MPCA-SGD", "data", "decentral", "soft-bounded async.", "binomial tree", "dedicated master", "Langer et al. 2018"),
    System("MXNet", "model + data", "central", "bounded async.", "scatter-reduce; async.: ad hoc",
           "distributed PS, default k = n", "Chen et al. 2015"),
    System("Parameter Server", "model + data", "central", "bounded async.", "reduce; async.: ad hoc", "distributed PS",
           "Li et al. 2014"),
    System("Petuum", "model + data", "central", "bounded async.", "ad hoc with eager scatter", "distributed PS",
           "Xing et al. 2015"),
    System("Project Adam", "model + data", "central", "async.", "ad hoc", "distributed PS", "Chilimbi et al. 2014"),
    System("PyTorch", "model + data", "central", "sync.", "all-reduce", "single PS or replicated PS", "Ketkar 2017"),
    System("SparkNet", "data", "decentral", "sync.", "reduce", "dedicated master", "Moritz et al. 2016"),
    System("TensorFlow", "model + data", "central", "bounded async.", "scatter or all-reduce; async.: ad hoc",
           "distributed PS, default k = n", "Abadi et al. 2016"),
    System("TreeEASGD", "data", "decentral", "bounded async.", "ad hoc", "tree", "Zhang 2016"),
)  # fmt: skip
SURVEY = (
    System("Baidu AllReduce", "data", "central", "sync.", "all-reduce", "ring of workers", "Gibiansky 2017"),
    System("Horovod", "data", "central", "sync.", "all-reduce", "ring of workers", "Sergeev and Del Balso 2018"),
    System("Caffe2", "data", "central", "sync.", "all-reduce", "ring, or halving and doubling", "Goyal et al. 2017"),
    System("CNTK, 1-bit SGD", "data", "central", "sync.", "all-reduce of 1-bit gradients", "ring of workers",
           "Seide et al. 2014"),
    System("CNTK, block momentum", "data", "decentral", "sync.", "all-reduce of models", "ring of workers",
           "Chen and Huo 2016"),
    System("DIANNE", "model + data", "central", "async.", "ad hoc", "distributed PS", "De Coninck et al. 2018"),
    System("DMTK (Multiverso)", "data", "central", "async.", "ad hoc", "distributed PS", "Microsoft 2015"),
    System("MXNet-MPI", "data", "central", "sync. in teams, async. between", "all-reduce; ad hoc", "teams on a distributed PS",
           "Mamidala et al. 2018"),
    System("Poseidon (HybComm)", "data", "central", "sync.", "scatter-reduce or factors, by layer",
           "distributed PS, k = n; p2p", "Zhang et al. 2017"),
    System("Sufficient factor broadcasting", "data", "central", "sync.", "activations and errors", "p2p mesh",
           "Xie et al. 2016"),
    System("STRADS", "model", "central", "sync., scheduled", "ad hoc", "scheduler and PS", "Kim et al. 2016"),
    System("GADMM", "data", "decentral", "sync., two groups in turn", "neighbours' models", "chain", "Elgabli et al. 2020"),
    System("Sandblaster L-BFGS", "model + data", "central", "sync., load balanced", "reduce", "coordinator and PS",
           "Dean et al. 2012"),
    System("Federated averaging", "data", "decentral", "sync. rounds", "reduce", "single master", "McMahan et al. 2016"),
    System("Gossip learning", "data", "decentral", "async.", "models walk and merge", "p2p mesh", "Ormandi et al. 2013"),
    System("Ensembles", "data", "decentral", "none", "predictions", "single master", "Verbraeken et al. 2020, 3.3"),
)  # fmt: skip
SYSTEMS = TAXONOMY + SURVEY


class Row(msgspec.Struct, frozen=True):
    """A system, and how it runs here; `runs` is empty for one that does not yet."""

    system: System
    runs: tuple[Runs, ...]


def all_rows(strategies: Iterable[Strategy]) -> list[Row]:
    """Every system, and how these strategies run it."""
    given = [how for each in strategies for how in each.runs]
    return [Row(system, tuple(how for how in given if how.system == system.name)) for system in SYSTEMS]


def rows_of(strategy: Strategy) -> list[Row]:
    """The systems that this strategy runs."""
    return [row for row in all_rows([strategy]) if row.runs]


def cells(row: Row, code: str = "") -> tuple[str, ...]:
    """A row's text by column; `code` is put around a setting."""
    system = row.system
    here = "; or ".join(
        f"{code}--strategy {how.options}{code}" + (f" ({NOT_YET}: {how.lacks})" if how.lacks else "")
        for how in row.runs
    )
    return (
        system.name, system.parallelism, system.optimisation, system.scheduling, system.exchange, system.topology,
        here or NOT_YET,
    )  # fmt: skip


def markdown(found: Iterable[Row]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    return "\n".join([*lines, *(f"| {' | '.join(cells(row, '`'))} |" for row in found)]) + "\n"
