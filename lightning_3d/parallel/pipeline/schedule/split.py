"""Where the two halves of a backward are exact, that for a stage's input and that for its weights.

torch makes them from the autograd graph of a stage's output (torch.distributed.pipelining._backward). It finds the
weights by the nodes at which they meet the way from the input, runs those nodes in both halves, and writes the
gradients itself. So there must be one input and one output, a way between them, and nothing that works by being run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge


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
    # Python's functions are nodes too, which torch's types do not say.
    nodes: set[Any] = _nodes(get_gradient_edge(sent[0]).node)
    if get_gradient_edge(inputs[0]).node not in nodes:
        return "what it returns does not depend on what it receives"
    known = {id(parameter) for parameter in parameters}
    for node in nodes:
        # Functions written in Python would run twice; checkpoints of the reentrant kind and compiled parts are such.
        if isinstance(node, BackwardCFunction):
            return f"{type(node).__name__.removesuffix('Backward')} is an autograd function written in Python"
        leaf = getattr(node, "variable", None)
        if leaf is None or leaf is inputs[0]:
            continue
        if id(leaf) not in known:
            return f"a tensor of shape {list(leaf.shape)} that is no parameter of the stage gets a gradient"
        if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
            return f"a parameter of shape {list(leaf.shape)} has hooks on its gradient"
    return None


def _nodes(root: Node) -> set[Any]:
    """All nodes of the graph below a root, itself included."""
    found = {root}
    waiting = [root]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                waiting.append(node)
    return found
