"""What the backward pass of a traced step communicates, as its autograd graph says, and what of it can wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from lightning_3d.graph.observer import Function, Scene
from lightning_3d.parallel.tensor.trace.exchanges import Exchanges
from lightning_3d.parallel.tensor.trace.worth import is_vocabulary
from lightning_3d.shards.partial import PartialTensor
from lightning_3d.shards.protocol import writes_to_first
from lightning_3d.shards.tensor import ShardTensor

# A node of the autograd graph and the number of one of its results.
Edge = tuple[Any, int]

_COPY, _PART = "_CopyBackward", "_PartBackward"
# Where replicated values come to be used on parts.
_ENTRANCES = (_COPY, _PART)
_LEAF = "AccumulateGrad"
_TABLE = "EmbeddingBackward"


@dataclass(frozen=True, kw_only=True, slots=True)
class Backward:
    """What the backward pass of a part of a step communicates.

    Attributes:
        exchanges: Of activations and their gradients.
        candidates: For each place where gradients are summed the replicated parameters that could each have a partial
            gradient instead, because all that they lead to is used on parts.
        replicated: Parameters whose gradients, or a part of them, are the same on all ranks.
    """

    exchanges: Exchanges
    candidates: tuple[frozenset[str], ...]
    replicated: frozenset[str]


class Calls:
    """Functions of torch that were called on replicated values, as partial gradients will pass through them.

    Args:
        scene: Knows the names of parameters.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._known: dict[Any, _Call] = {}

    def note(self, function: Function, operands: Operands, result: Any) -> None:
        """Remembers how a result was computed.

        Args:
            function: A function of torch.
            operands: Its arguments, as `operands_of` gave them before the call.
            result: Of the call.
        """
        if operands.shards:
            return
        call = _Call(edges=operands.edges, frozen=operands.frozen, writes=writes_to_first(function))
        given = {node for node, _ in operands.edges}
        for leaf in pytree.tree_leaves(result):
            # What is given back was computed before.
            self._known.update((node, call) for node in histories(leaf) if node not in given)

    def operands_of(self, arguments: Any) -> Operands:
        """Returns what is to be known of the arguments of a call."""
        tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        names = (self._scene.name_of(each) for each in tensors if not each.requires_grad)
        shards = any(isinstance(each, ShardTensor) for each in tensors)
        plain = () if shards else tensors
        return Operands(
            edges=tuple(_edge(_plain(each)) for each in plain if each.requires_grad and not _is_cut_off(each)),
            frozen=frozenset(name for name in names if name is not None),
            shards=shards,
        )

    def computing(self, node: Any) -> _Call | None:
        """Returns the call that has made a node."""
        return self._known.get(node)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operands:
    """Arguments of a call.

    Attributes:
        edges: Node and number of each tensor that wants a gradient.
        frozen: Parameters that want none.
        shards: Whether there are any shards; nothing else is known then.
    """

    edges: tuple[Edge, ...]
    frozen: frozenset[str]
    shards: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    edges: tuple[Edge, ...]
    frozen: frozenset[str]
    writes: bool


def backward_traffic(outputs: Iterable[Any], inputs: Iterable[Any], scene: Scene, calls: Calls) -> Backward:
    """Reads the autograd graph between outputs and inputs.

    Args:
        outputs: Where the backward pass begins.
        inputs: Where it is somebody else's.
        scene: Knows the names of parameters.
        calls: What has made the nodes.
    """
    graph = _Graph(outputs, inputs, scene, calls)
    kinds = [node.name() for node in graph.nodes]
    starts = [(node.name(), node.next_functions[0]) for node in graph.nodes if node.name() in _ENTRANCES]
    summed = [kind for kind, edge in starts if graph.name(edge[0]) is None]
    return Backward(
        exchanges=Exchanges(
            sums=summed.count(_COPY),
            scatters=kinds.count("_GatherSumBackward"),
            gathers=summed.count(_PART) + kinds.count("_ReducePartBackward"),
        ),
        candidates=tuple(names for names in (graph.above(edge) for _, edge in starts) if names),
        replicated=frozenset(filter(None, map(graph.name, graph.replicated))),
    )


class _Graph:
    """The nodes between outputs and inputs.

    Attributes:
        nodes: All of them.
        replicated: Those whose gradients are the same on all ranks; it does not matter for what belongs to shards.
    """

    def __init__(self, outputs: Iterable[Any], inputs: Iterable[Any], scene: Scene, calls: Calls) -> None:
        starts = [node for value in outputs for node in histories(value)]
        self._scene, self._calls = scene, calls
        self._ends = {node for value in inputs for node in histories(value)}
        self.nodes = self._reached(starts, lambda node: True)
        self.replicated = self._reached(starts, lambda node: node.name() not in _ENTRANCES)
        self._copied = {node.next_functions[0] for node in self.nodes if node.name() == _COPY}
        self._above: dict[Edge, frozenset[str]] = {}

    def name(self, node: Any) -> str | None:
        """Returns the name of the parameter whose gradient a node accumulates."""
        return self._scene.name_of(node.variable) if node.name().endswith(_LEAF) else None

    def above(self, edge: Edge) -> frozenset[str]:
        """Returns the parameters that a value is computed from, whose gradients could be partial if its own is.

        All else that it is computed from must be copied anyway. None are returned if it does not come from any, or is
        used by more than parts.
        """
        if edge not in self._above:
            # What is asked for while it is computed is itself.
            self._above[edge] = frozenset()
            self._above[edge] = self._found_above(edge)
        return self._above[edge]

    def _found_above(self, edge: Edge) -> frozenset[str]:
        node, none = edge[0], frozenset[str]()
        name = self.name(node)
        if name is not None:
            return frozenset({name})
        call = self._calls.computing(node)
        if call is None or node in self._ends or node in self.replicated or self._is_vocabulary(node):
            return none
        found = [self.above(each) for each in call.edges]
        if call.writes and not (found and found[0]):
            return none
        if any(not names and each not in self._copied for names, each in zip(found, call.edges, strict=True)):
            return none
        return call.frozen.union(*found)

    def _is_vocabulary(self, node: Any) -> bool:
        """Whether a node is the look-up in a table whose gradient is too large to be summed with others."""
        if not node.name().startswith(_TABLE):
            return False
        tables = (each.variable for each, _ in node.next_functions if self.name(each) is not None)
        return any(is_vocabulary(*table.shape) for table in tables)

    def _reached(self, starts: Iterable[Any], through: Callable[[Any], bool]) -> set[Any]:
        reached: set[Any] = set()
        waiting = list(starts)
        while waiting:
            node = waiting.pop()
            if node in reached or node in self._ends:
                continue
            reached.add(node)
            if through(node):
                waiting += [each for each, _ in node.next_functions if each is not None]
        return reached


def _edge(value: Tensor) -> Edge:
    edge = get_gradient_edge(value)
    return edge.node, edge.output_nr


def _is_cut_off(value: Tensor) -> bool:
    """Whether a value is a view made without a graph: torch says that it wants a gradient, and none arrives."""
    base = value._base
    return value.grad_fn is None and base is not None and base.requires_grad


def _plain(value: Tensor) -> Tensor:
    return value.value if isinstance(value, PartialTensor) else value


def histories(value: Any) -> Iterator[Any]:
    """Yields the node that has computed a value, if it has one."""
    value = value._local if isinstance(value, ShardTensor) else _plain(value)
    if isinstance(value, Tensor) and value.grad_fn is not None:
        yield value.grad_fn
