"""Where the two halves of a backward are exact, that for a stage's input and that for its weights.

torch makes them from the autograd graph of a stage's output (torch.distributed.pipelining._backward). It finds the
weights by the functions at which they meet the way from the input, goes backward to the input first and later from
those functions to the weights, and writes the gradients itself. So there must be one input, one output and a way
between them; nothing may be used by two of those functions, or count how often it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

# Python's functions are nodes of the graph too, which torch's types do not say.
Node: TypeAlias = Any


def why_whole(
    outputs: Sequence[Tensor], received: Sequence[Tensor], parameters: Collection[nn.Parameter]
) -> str | None:
    """Returns why the backward of a stage must not be split; None if both halves are exact.

    Args:
        outputs: What the stage returned.
        received: What it was given.
        parameters: All parameters that it registers.
    """
    sent = [value for value in outputs if value.requires_grad]
    inputs = [value for value in received if value.requires_grad]
    if len(inputs) != 1 or len(sent) != 1:
        return f"it receives {len(inputs)} and returns {len(sent)} tensors with gradients, not one each"
    users = _users(get_gradient_edge(sent[0]).node)
    source = get_gradient_edge(inputs[0]).node
    if source not in users:
        return "what it returns does not depend on what it receives"
    way = _above(source, users)
    return _why_not(users.keys() - {source}, {id(parameter) for parameter in parameters}) or _shared(way)


def _why_not(nodes: Iterable[Node], parameters: Collection[int]) -> str | None:
    """What in the graph works by being run, or gets a gradient that torch would not write."""
    for node in nodes:
        # Checkpoints of the reentrant kind and compiled parts are such functions.
        if isinstance(node, BackwardCFunction):
            return f"{type(node).__name__.removesuffix('Backward')} is an autograd function written in Python"
        leaf = getattr(node, "variable", None)
        if leaf is None:
            continue
        if id(leaf) not in parameters:
            return f"a tensor of shape {list(leaf.shape)} that is no parameter of the stage gets a gradient"
        if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
            return f"a parameter of shape {list(leaf.shape)} has hooks on its gradient"
    return None


def _shared(way: Collection[Node]) -> str | None:
    """Which parameter meets the way from input to output at two functions, by itself or by what is made of it.

    torch goes back from each of the functions; the second time it finds the graph freed, or counts twice.
    """
    seen: set[Node] = set()
    for node in way:
        waiting = [child for child in _children(node) if child not in way]
        # One function may use a thing twice.
        own: set[Node] = set()
        while waiting:
            below = waiting.pop()
            if below in own:
                continue
            if below in seen:
                return "a parameter, or what is computed from it, is used in two places"
            own.add(below)
            waiting.extend(_children(below))
        seen |= own
    return None


def _users(root: Node) -> dict[Node, list[Node]]:
    """All functions below a root, itself included, with those that use them."""
    found: dict[Node, list[Node]] = {root: []}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        for child in _children(node):
            if child not in found:
                found[child] = []
                waiting.append(child)
            found[child].append(node)
    return found


def _above(source: Node, users: dict[Node, list[Node]]) -> set[Node]:
    """The functions that depend on a source, itself included."""
    found = {source}
    waiting = [source]
    while waiting:
        for node in users[waiting.pop()]:
            if node not in found:
                found.add(node)
                waiting.append(node)
    return found


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]
