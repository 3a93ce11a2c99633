"""What a part of a traced step communicates, forward as counted, backward as its autograd graph says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_3d.graph.observer import Scene
from lightning_3d.shards.tensor import ShardTensor

_COPY = "_CopyBackward"
_LEAF = "AccumulateGrad"


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """All-reduces over the tensor axis in one micro-batch.

    Attributes:
        forward: In the forward pass.
        backward: In the backward pass, sums of weights' gradients left out.
    """

    forward: int
    backward: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(forward=self.forward + other.forward, backward=self.backward + other.backward)

    def __str__(self) -> str:
        return f"{self.forward} forward + {self.backward} backward"


def backward_traffic(outputs: Iterable[Any], inputs: Iterable[Any], scene: Scene) -> tuple[int, set[str]]:
    """Counts the sums of gradients between outputs and inputs.

    Args:
        outputs: Where the backward pass begins.
        inputs: Where it is somebody else's.
        scene: Knows the names of parameters.

    Returns:
        How many activations have their gradients summed, and the parameters that have: replicated ones that are used
        on parts.
    """
    seen = set(_histories(inputs))
    waiting = _histories(outputs)
    sums, names = 0, set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        following = [each for each, _ in node.next_functions if each is not None]
        if node.name() == _COPY:
            name = scene.name_of(following[0].variable) if following[0].name().endswith(_LEAF) else None
            if name is None:
                sums += 1
            else:
                names.add(name)
        waiting += following
    return sums, names


def _histories(values: Iterable[Any]) -> list[Any]:
    tensors = (value._local if isinstance(value, ShardTensor) else value for value in values)
    found = (value.grad_fn for value in tensors if isinstance(value, Tensor))
    return [history for history in found if history is not None]
