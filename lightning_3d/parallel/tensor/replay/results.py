"""What a block returns, as tensors and as the text that puts them together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_3d.parallel.tensor.replay.writer import Constants, mapping_text, plain_text, sequence_text
from lightning_3d.shards.partial import PartialTensor
from lightning_3d.shards.tensor import ShardTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """The plain tensors of a result, and what is around them.

    Attributes:
        tensors: Plain tensors, in order; of shards the local parts.
        text: Builds the result from a tuple of them called ``r``.
    """

    tensors: tuple[Tensor, ...]
    text: str

    @property
    def bare(self) -> bool:
        """Whether the result is one plain tensor and nothing else."""
        return self.text == "r[0]"


def take_apart(result: Any, constants: Constants) -> Results:
    """Returns the tensors of a block's result and how they are put together.

    Args:
        result: What the block returned.
        constants: Gets what the text names.

    Raises:
        Unwritable: Something in it is neither a tensor, nor a plain value, nor a container that torch knows.
    """
    tensors: list[Tensor] = []

    def placed(tensor: Tensor) -> str:
        tensors.append(tensor)
        return f"r[{len(tensors) - 1}]"

    def text(value: Any) -> str:
        if isinstance(value, ShardTensor):
            kind = constants.name(type(value), type(value).__name__)
            group = constants.name(value._group, "group")
            return f"{kind}({text(value._local)}, {value._dim}, {value._segments!r}, {group})"
        if isinstance(value, PartialTensor):
            kind, group = constants.name(PartialTensor, "PartialTensor"), constants.name(value._group, "group")
            return f"{kind}({placed(value._value)}, {group})"
        if isinstance(value, Tensor):
            return placed(value)
        if type(value) in (tuple, list):
            return sequence_text(value, text)
        if type(value) is dict:
            return mapping_text(value, text)
        leaves, spec = pytree.tree_flatten(value)
        if len(leaves) == 1 and leaves[0] is value:
            return plain_text(value, constants)
        return f"{constants.name(_Tree(spec), type(value).__name__)}({sequence_text(leaves, text)})"

    return Results(text=text(result), tensors=tuple(tensors))


@dataclass(frozen=True, slots=True)
class _Tree:
    """Builds a container that torch knows."""

    spec: pytree.TreeSpec

    def __call__(self, leaves: list[Any]) -> Any:
        return pytree.tree_unflatten(leaves, self.spec)
