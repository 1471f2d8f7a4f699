"""What one exchange of the model cannot be faster than, by the pattern in which it is made. Pure.

After M. Langer et al., Distributed Training of Deep Learning Models: A Taxonomic Perspective, 2020. n workers and k servers
exchange a model; T, R and U are the seconds it takes to transmit, to reduce and to update all of it once, and what stands in
a row happens one after the other:

    one server, synchronous             2 n T                  + (n-1) R         + U
    binomial tree below one server      2 ceil(log2(n+1)) T    + ceil(log2 n) R  + U
    scatter-reduce to one server        (2 + 2 (n-1)/n) T      + (n-1)/n R       + U
    one server, asynchronous            n T                                      + U      a worker alone: 2 T + U
    all-reduce of whole models          ceil(log2 n) (T + R)                     + U
    all-reduce around a ring            2 (n-1)/n T            + (n-1)/n R       + U

Those are the paper's. What it says in words (k servers share the work of one; with k = n a node transmits 2 (n-1)/n models;
a worker sends its model to both neighbours; there is an exchange every tau steps) stands below as a formula and is marked
as ours.

The first two let the server send only after it has received. A full-duplex link does both at once, key by key, so a server
that overlaps them may be below the paper's figure. What no overlap can undercut is `busiest`: the models that pass the fullest
direction of any node's link.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = [
    "Exchange",
    "Speeds",
    "around_a_ring",
    "asynchronous",
    "below_a_tree",
    "between_pairs",
    "in_one_node",
    "on_all_workers",
    "one_of_all",
    "scatter_reduce",
    "synchronous",
    "to_neighbours",
    "up_a_tree",
    "whole_models",
]

PAPER, OURS = "Langer et al. 2020", "ours"


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds for the whole model once."""

    transmit_s: float
    reduce_s: float = 0.0
    update_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """Of one step, in models."""

    pattern: str
    formula: str
    transmit: float
    reduce: float
    update: float
    busiest: float  # through the fullest direction of a full-duplex link
    source: str = PAPER

    def apart(self, steps: float) -> Exchange:
        """The same once in so many steps, per step."""
        if steps == 1:
            return self
        shares = (each / steps for each in (self.transmit, self.reduce, self.update, self.busiest))
        transmit, reduce, update, busiest = shares
        return replace(
            self, pattern=f"{self.pattern}, every {steps:g} steps", formula=f"1/{steps:g} ({self.formula})",
            transmit=transmit, reduce=reduce, update=update, busiest=busiest, source=OURS,
        )  # fmt: skip

    def in_turn_s(self, speeds: Speeds) -> float:
        """The paper's bound: one after the other."""
        return self.transmit * speeds.transmit_s + self.reduce * speeds.reduce_s + self.update * speeds.update_s

    def floor_s(self, speeds: Speeds) -> float:
        """What remains however much is overlapped."""
        return self.busiest * speeds.transmit_s


def in_one_node() -> Exchange:
    """There is nobody to exchange with."""
    return Exchange("one node", "U", 0.0, 0.0, 1.0, 0.0, OURS)


def synchronous(workers: int, servers: int = 1) -> Exchange:
    """Every worker sends a gradient to the servers and gets parameters back. A worker's own link carries a model each way."""
    n, k = workers, servers
    if k == 1:
        return Exchange("one server, synchronous", "2n T + (n-1) R + U", 2.0 * n, n - 1.0, 1.0, float(n))
    return Exchange(
        f"{k} servers, synchronous", "max(2n/k, 2) T + (n-1)/k R + U/k", max(2 * n / k, 2.0), (n - 1) / k, 1 / k,
        max(n / k, 1.0), OURS,
    )  # fmt: skip


def on_all_workers(nodes: int) -> Exchange:
    """Every node serves 1/n of the model, which it need not send to itself."""
    away = (nodes - 1) / nodes
    return Exchange("servers on all workers", "2(n-1)/n T + (n-1)/n R + U/n", 2 * away, away, 1 / nodes, 2 * away, OURS)


def asynchronous(workers: int, servers: int = 1) -> Exchange:
    """All workers once, whenever each comes: one sends while another receives. Every gradient is an update."""
    n, k = workers, servers
    if k == 1:
        return Exchange("one server, asynchronous", "n T + U", float(n), 0.0, 1.0, float(n))
    through = max(n / k, 1.0)
    return Exchange(f"{k} servers, asynchronous", "max(n/k, 1) T + U/k", through, 0.0, 1 / k, through, OURS)


def below_a_tree(workers: int) -> Exchange:
    """Workers add up on the way to a server, along a binomial tree, and the parameters come down the same way."""
    up = float(workers.bit_length())  # ceil(log2(n + 1))
    return Exchange(
        "binomial tree", "2 ceil(log2(n+1)) T + ceil(log2 n) R + U", 2 * up, float((workers - 1).bit_length()), 1.0, up
    )


def up_a_tree(nodes: int) -> Exchange:
    """The root works too, as the paper's server below a tree does not: n - 1 workers and it."""
    return in_one_node() if nodes == 1 else below_a_tree(nodes - 1)


def scatter_reduce(workers: int) -> Exchange:
    """Workers add up parts among each other, the server gathers them, and scatters and spreads the parameters."""
    away = (workers - 1) / workers
    return Exchange("scatter-reduce to one server", "(2 + 2(n-1)/n) T + (n-1)/n R + U", 2 + 2 * away, away, 1.0, 1.0)


def whole_models(nodes: int) -> Exchange:
    """Everybody adds up whole models with a partner at distance 1, 2, 4, ..."""
    rounds = float((nodes - 1).bit_length())
    return Exchange("all-reduce of whole models", "ceil(log2 n) (T + R) + U", rounds, rounds, 1.0, rounds)


def around_a_ring(nodes: int) -> Exchange:
    away = (nodes - 1) / nodes
    return Exchange("all-reduce around a ring", "2(n-1)/n T + (n-1)/n R + U", 2 * away, away, 1.0, 2 * away)


def between_pairs(nodes: int) -> Exchange:
    """Halves, quarters, ... with partners at distance 1, 2, 4, ...: as much as around a ring, in fewer messages. No sum of
    all at every node takes less (Patarasuk and Yuan 2009)."""
    away = (nodes - 1) / nodes
    formula = "2(n-1)/n T + (n-1)/n R + U"
    return Exchange("all-reduce by halving and doubling", formula, 2 * away, away, 1.0, 2 * away, OURS)


def to_neighbours(models: float) -> Exchange:
    """The node with most neighbours sends them so many models a step, and mixes theirs with its own: one to each of two
    makes a 2:1 reduce."""
    return Exchange(f"neighbours' models, {models:g} a step", "d T + d R + U", models, models, 1.0, models, OURS)


def one_of_all(chance: float) -> Exchange:
    """Every node sends its model to one other with such a chance; on average as many arrive."""
    return Exchange("a model to one other node", "p T + p R + U", chance, chance, 1.0, chance, OURS)
