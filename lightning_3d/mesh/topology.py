"""Which node holds which rank, which groups cross nodes, and whether another rank order would keep more inside."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lightning_3d.errors import MeshError
from lightning_3d.mesh.spec import AXES, AXIS_KEYS, DATA_REPLICATE, DATA_SHARD, MeshSpec
from lightning_3d.units import counted

_MOST_RANK_ROWS = 32
_MOST_NODE_ROWS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpan:
    """How far the groups of one name reach.

    Args:
        name: Name of the groups.
        size: Ranks in each.
        count: Number of groups.
        crossing: Groups whose ranks are on more than one node.
        nodes: Most nodes that one group touches.
    """

    name: str
    size: int
    count: int
    crossing: int
    nodes: int

    def __str__(self) -> str:
        if self.size == 1:
            return f"{self.name:<18} size 1"
        reach = (
            "inside a node" if self.nodes == 1 else f"{self.crossing} of {self.count} cross nodes (up to {self.nodes})"
        )
        return f"{self.name:<18} size {self.size:<5} {counted(self.count, 'group')}, {reach}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """A mesh laid on nodes that hold ``devices_per_node`` consecutive ranks each.

    Args:
        spec: The mesh.
        devices_per_node: Ranks of one node; the last node may hold fewer.

    Raises:
        MeshError: A node would hold no rank.
    """

    spec: MeshSpec
    devices_per_node: int

    def __post_init__(self) -> None:
        if self.devices_per_node < 1:
            raise MeshError(f"a node with {self.devices_per_node} devices holds no rank.", valid="1, 2, 3, ...")

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.spec.world // self.devices_per_node)

    def node(self, rank: int) -> int:
        """Returns the node of a rank."""
        return rank // self.devices_per_node

    def ranks(self, node: int) -> range:
        """Returns the ranks of a node."""
        first = node * self.devices_per_node
        return range(first, min(first + self.devices_per_node, self.spec.world))

    def span(self, name: str) -> GroupSpan:
        """Returns how far the groups of a name reach."""
        groups = self.spec.groups(name)
        touched = [len({self.node(rank) for rank in group}) for group in groups]
        return GroupSpan(
            name=name,
            size=len(groups[0]),
            count=len(groups),
            crossing=sum(nodes > 1 for nodes in touched),
            nodes=max(touched),
        )

    def spans(self) -> tuple[GroupSpan, ...]:
        """Returns the reach of every axis, the one that suffers most from slow links first."""
        names = [axis.name for axis in reversed(AXES)]
        if self.spec.data_replicate > 1:
            names += [DATA_SHARD, DATA_REPLICATE]
        return tuple(self.span(name) for name in names)

    def advice(self) -> tuple[str, ...]:
        """Returns what would keep heavy traffic inside nodes, one line each; empty when the mesh lies well."""
        lines = []
        best = Topology(
            spec=dataclasses.replace(self.spec, rank_order=AXIS_KEYS), devices_per_node=self.devices_per_node
        )
        if _reach(best) < _reach(self):
            lines.append(
                f"rank_order={','.join(self.spec.rank_order)!r} sends heavy traffic over more nodes than needed: "
                f"set rank_order={','.join(AXIS_KEYS)!r}"
            )
        inner = AXES[-1]
        if best.span(inner.name).nodes > 1:
            lines.append(
                f"{inner.option}={self.spec.size(inner.key)} cannot stay inside nodes of {self.devices_per_node} "
                f"devices: use a divisor of {self.devices_per_node}"
            )
        return tuple(lines)

    def __str__(self) -> str:
        head = f"{self.spec} on {counted(self.nodes, 'node')} of {self.devices_per_node}"
        return "\n".join([head, *map(str, self.spans()), *self._map(), *(f"! {line}" for line in self.advice())])

    def _map(self) -> list[str]:
        if self.spec.world <= _MOST_RANK_ROWS:
            return [
                f"rank {rank:<5} node {self.node(rank):<4} {self.spec.coordinate(rank)}"
                for rank in range(self.spec.world)
            ]
        nodes = list(range(self.nodes))
        if self.nodes <= _MOST_NODE_ROWS:
            return [self._node_row(node) for node in nodes]
        head, tail = nodes[: _MOST_NODE_ROWS - 2], nodes[-1:]
        left_out = f"... {self.nodes - len(head) - len(tail)} more nodes"
        return [*map(self._node_row, head), left_out, *map(self._node_row, tail)]

    def _node_row(self, node: int) -> str:
        ranks = self.ranks(node)
        coordinates = [self.spec.coordinate(rank) for rank in ranks]
        positions = [f"{key} {_range_text([getattr(at, key) for at in coordinates])}" for key in AXIS_KEYS]
        return f"node {node:<5} ranks {_range_text(list(ranks)):<14} {'  '.join(positions)}"


def _reach(topology: Topology) -> tuple[int, ...]:
    """Nodes per group, the axis that suffers most from slow links first: smaller is better, in that order."""
    return tuple(topology.span(axis.name).nodes for axis in reversed(AXES))


def _range_text(values: list[int]) -> str:
    low, high = min(values), max(values)
    if low == high:
        return str(low)
    if len(set(values)) == high - low + 1:
        return f"{low}-{high}"
    return ",".join(map(str, sorted(set(values))))
