"""Who talks to whom: rings, complete graphs, trees and graphs of one's own, and weights to mix models with. Pure.

A graph is written as its edges: `0-1+1-2+2-0`. Metropolis weights, W_ij = 1 / (1 + max(d_i, d_j)) for neighbours of degrees
d_i and d_j and the rest to oneself, make any graph's mixing matrix symmetric and doubly stochastic: rows and columns of
weights from 0 to 1 that add up to 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ringtmp.errors import UsageError

#: node -> its neighbours
Graph = dict[int, frozenset[int]]
Matrix = tuple[tuple[float, ...], ...]
#: How far sums of weights may be from 1.
CLOSE = 1e-6


def ring(nodes: int) -> Graph:
    return {node: frozenset({(node - 1) % nodes, (node + 1) % nodes} - {node}) for node in range(nodes)}


def complete(nodes: int) -> Graph:
    return {node: frozenset(set(range(nodes)) - {node}) for node in range(nodes)}


def of_edges(name: str, text: str, nodes: int) -> Graph:
    """`name`: the setting, for whoever wrote it."""
    found: dict[int, set[int]] = {node: set() for node in range(nodes)}
    for word in text.split("+"):
        ends = word.strip().split("-")
        if len(ends) != 2 or not all(end.strip().isdigit() for end in ends):
            raise UsageError(
                f"{name}={text}: {word!r} is no edge; write edges as 0-1+1-2, with nodes from 0 to {nodes - 1}"
            )
        one, other = (int(end) for end in ends)
        if one == other or max(one, other) >= nodes:
            raise UsageError(f"{name}={text}: {word!r} must join two different nodes from 0 to {nodes - 1}")
        if other in found[one]:
            raise UsageError(f"{name}={text}: the edge {word} is there twice")
        found[one].add(other)
        found[other].add(one)
    return {node: frozenset(others) for node, others in found.items()}


def reached(graph: Mapping[int, Collection[int]], start: int, without: Collection[int] = ()) -> set[int]:
    found, new = {start}, [start]
    while new:
        new = [each for each in dict.fromkeys(other for node in new for other in graph[node]) if each not in found]
        new = [each for each in new if each not in without]
        found.update(new)
    return found


def connected(graph: Mapping[int, Collection[int]], without: Collection[int] = ()) -> bool:
    """Whether everyone, but for those `without`, reaches everyone else."""
    left = [node for node in graph if node not in without]
    return not left or reached(graph, left[0], without) == set(left)


def refuse_divided(name: str, text: str, graph: Graph) -> None:
    if not connected(graph):
        apart = min(set(graph) - reached(graph, 0))
        raise UsageError(
            f"{name}={text}: no way leads from node 0 to node {apart}: what one learns must reach all others"
        )


def metropolis(graph: Graph) -> Matrix:
    n = len(graph)
    rows = []
    for i in range(n):
        row = [1 / (1 + max(len(graph[i]), len(graph[j]))) if j in graph[i] else 0.0 for j in range(n)]
        row[i] = 1 - sum(row)
        rows.append(tuple(row))
    return tuple(rows)


def read_matrix(text: str, nodes: int) -> Matrix:
    """Rows separated by `/`, numbers by `_`: `0.5_0.5/0.5_0.5`. Refuses what mixes models unfairly."""
    try:
        rows = tuple(tuple(float(word) for word in row.split("_")) for row in text.split("/"))
    except ValueError:
        raise UsageError(
            f"matrix={text}: write numbers with _ between them and rows with /, as in 0.5_0.5/0.5_0.5"
        ) from None
    if len(rows) != nodes or any(len(row) != nodes for row in rows):
        lengths = sorted({len(row) for row in rows})
        raise UsageError(
            f"matrix has {len(rows)} rows of {lengths} weights: {nodes} nodes need {nodes} rows of {nodes}"
        )
    refuse_unfair(rows)
    return rows


def refuse_unfair(rows: Sequence[Sequence[float]]) -> None:
    """UsageError unless the matrix is symmetric and doubly stochastic."""
    for i, row in enumerate(rows):
        for j, weight in enumerate(row):
            if not 0 <= weight <= 1:
                raise UsageError(f"matrix is not doubly stochastic: weight {weight:g} of row {i} must be from 0 to 1")
            if abs(weight - rows[j][i]) > CLOSE:
                raise UsageError(
                    f"matrix must be symmetric: node {i} gives node {j} {weight:g} and gets {rows[j][i]:g}"
                )
    for what, lines in (("row", rows), ("column", list(zip(*rows, strict=True)))):
        for i, line in enumerate(lines):
            if abs(sum(line) - 1) > CLOSE:
                raise UsageError(f"matrix is not doubly stochastic: {what} {i} adds up to {sum(line):g} and must to 1")


def graph_of(matrix: Matrix) -> Graph:
    return {i: frozenset(j for j, weight in enumerate(row) if weight and j != i) for i, row in enumerate(matrix)}


def parents_in_tree(name: str, text: str, nodes: int) -> dict[int, int]:
    """Of every node but node 0, the root."""
    graph = of_edges(name, text, nodes)
    refuse_divided(name, text, graph)
    edges = sum(len(each) for each in graph.values()) // 2
    if edges != nodes - 1:
        raise UsageError(
            f"{name}={text} is not a tree: {nodes} nodes need {nodes - 1} edges without a circle, not {edges}"
        )
    found: dict[int, int] = {}
    new = [0]
    while new:
        below = {child: node for node in new for child in sorted(graph[node]) if child != found.get(node, -1)}
        found.update(below)
        new = list(below)
    return found


def binary_tree(nodes: int) -> dict[int, int]:
    return {node: (node - 1) // 2 for node in range(1, nodes)}


def living_parent(parents: Mapping[int, int], node: int, lost: Collection[int]) -> int | None:
    """The nearest one above that is there; None for the root."""
    above = parents.get(node)
    while above is not None and above in lost:
        above = parents.get(above)
    return above
