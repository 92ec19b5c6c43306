"""From modules to rooms.

A room is a folder, together with the folders in it unless that would make a circle of imports.
Files beside folders, such as `batching/scheduler.py`, are rooms of their own.
"""

from collections.abc import Mapping
from graphlib import TopologicalSorter

from scripts.house.sources import FLOORS

# Which nodes import which; every node is a key.
Graph = dict[str, frozenset[str]]


def joined(graph: Graph, names: Mapping[str, str]) -> Graph:
    """Rename the nodes that `names` has; those that get the same name become one node."""
    edges: dict[str, set[str]] = {names.get(node, node): set() for node in graph}
    for node, targets in graph.items():
        edges[names.get(node, node)] |= {names.get(target, target) for target in targets}
    return {node: frozenset(targets - {node}) for node, targets in edges.items()}


def leads_back(graph: Graph, node: str) -> bool:
    """Say whether a node is on a circle."""
    seen: set[str] = set()
    ahead = list(graph[node])
    while ahead:
        if (target := ahead.pop()) not in seen:
            seen.add(target)
            ahead += graph[target]
    return node in seen


def rooms(graph: Graph) -> Graph:
    """Join the modules of each folder to a room, inner folders first, where no circle comes of it."""
    packages = {name.rpartition(".")[0] for name in graph} - {"", *FLOORS}
    for package in sorted(packages, key=lambda name: (-name.count("."), name)):
        inside = {name: package for name in graph if name.startswith(f"{package}.")}
        if not leads_back(candidate := joined(graph, inside), package):
            graph = candidate
    return graph


def floor(room: str) -> str:
    """Return the package that is a room's floor."""
    return max((f for f in FLOORS if room == f or room.startswith(f"{f}.")), key=len)


def reachable(graph: Graph) -> Graph:
    """Return for each node all that it leads to."""
    found: dict[str, frozenset[str]] = {}
    for node in TopologicalSorter(graph).static_order():
        targets = graph[node]
        found[node] = targets.union(*(found[target] for target in targets))
    return found


def reduced(graph: Graph) -> Graph:
    """Leave out each edge that a longer way replaces."""
    beyond = reachable(graph)
    return {
        node: frozenset(t for t in targets if not any(t in beyond[other] for other in targets))
        for node, targets in graph.items()
    }
