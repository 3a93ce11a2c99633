"""Doors of units: nothing but plain local tensors crosses the hooks of a block.

FSDP2 and activation checkpointing pass a block's tensors through autograd functions of their own, which do not see
inside a shard: gradients of everything before the block would be lost without a sign. So shards in the arguments become
their local parts above all hooks, and shards again below them; results likewise on their way out. Partial gradients
end here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_3d.errors import ModuleError
from lightning_3d.graph.calls import Call, Handler, around_forward
from lightning_3d.graph.parameters import class_name
from lightning_3d.shards.gathered import gathered
from lightning_3d.shards.partial import PartialTensor
from lightning_3d.shards.tensor import ShardTensor

Wrap = Callable[[Tensor], Tensor]
Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Through = Callable[[Run, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Cuts:
    """Which tensors of nested containers are shards.

    Attributes:
        structure: The containers.
        wraps: For the place of each shard what makes a shard of its local part, outermost cut first.
    """

    structure: pytree.TreeSpec
    wraps: dict[int, tuple[Wrap, ...]]


def locals_of(tree: Any) -> tuple[Any, Cuts | None]:
    """Returns nested containers of plain tensors, of shards their local parts, and how these were cut, if any were."""
    leaves, structure = pytree.tree_flatten(tree)
    wraps, plain = {}, True
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, ShardTensor):
            leaves[at], wraps[at] = _opened(leaf)
        elif isinstance(leaf, PartialTensor):
            leaves[at], plain = leaf.share, False
    if plain and not wraps:
        return tree, None
    return pytree.tree_unflatten(leaves, structure), Cuts(structure, wraps) if wraps else None


def shards_again(tree: Any, cuts: Cuts | None, owner: nn.Module) -> Any:
    """Returns nested containers with shards in the places where they were.

    Args:
        tree: What `locals_of` returned, its tensors perhaps replaced on the way.
        cuts: How they were cut.
        owner: Whose hooks they came through, for the error.

    Raises:
        ModuleError: A hook has changed the containers, so that the places are lost.
    """
    if cuts is None:
        return tree
    leaves, structure = pytree.tree_flatten(tree)
    if structure != cuts.structure:
        raise ModuleError(
            f"a hook of a {class_name(owner)} changes the structure of arguments or results that are cut over the "
            "tensor-parallel ranks.",
            fix="change values only, or sequence_parallel=False",
        )
    for at, wraps in cuts.wraps.items():
        for wrap in reversed(wraps):
            leaves[at] = wrap(leaves[at])
    return pytree.tree_unflatten(leaves, structure)


def whole(tree: Any) -> Any:
    """Returns nested containers of plain tensors, with every shard gathered: what leaves a step."""
    return pytree.tree_map_only((ShardTensor, PartialTensor), replicated, tree)


def replicated(value: ShardTensor | PartialTensor) -> Tensor:
    """Returns what is no plain tensor as one, equal on all ranks as its gradient is."""
    return value.share if isinstance(value, PartialTensor) else gathered(value)


class BlockDoor:
    """The door of one block.

    Args:
        block: The block; its ``forward`` is shadowed.
        inner: Handles calls of ``forward`` inside the door.
    """

    def __init__(self, block: nn.Module, inner: Handler | None = None) -> None:
        self._block = block
        self._inner = inner or _made
        self._passages: list[_Passage] = []
        around_forward(block, self._inside)

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockDoor:
        """A copy of the block goes through this door too: the handler of its calls is the same."""
        return self

    def around(self, call: Call, through: Through | None = None) -> Any:
        """Makes a call of the block, outside of its hooks.

        Args:
            call: The call.
            through: Runs what lies inside the door, perhaps again in backward (activation checkpointing); by default
                it is run once.
        """
        passage = _Passage()
        (args, kwargs), passage.incoming = locals_of((call.args, call.kwargs))

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            passage.taken = False
            self._passages.append(passage)
            try:
                return call.function(*args, **kwargs)
            finally:
                self._passages.pop()

        result = run(args, kwargs) if through is None else through(run, args, kwargs)
        return shards_again(result, passage.outgoing, self._block)

    def _inside(self, call: Call) -> Any:
        """Runs ``forward``, inside of the hooks."""
        passage = self._passages[-1] if self._passages else None
        # A forward that calls itself is a call as any other.
        if passage is None or passage.taken:
            return self._inner(call)
        passage.taken = True
        args, kwargs = shards_again((call.args, call.kwargs), passage.incoming, self._block)
        result, passage.outgoing = locals_of(self._inner(Call(call.function, args, kwargs)))
        return result


def _made(call: Call) -> Any:
    return call()


@dataclass(slots=True)
class _Passage:
    """One call on its way through the hooks."""

    incoming: Cuts | None = None
    outgoing: Cuts | None = None
    taken: bool = False


def _opened(shard: ShardTensor) -> tuple[Tensor, tuple[Wrap, ...]]:
    """The plain tensor in a shard, which may hold a shard of another axis, and how to close it again."""
    wraps = []
    local: Tensor = shard
    while isinstance(local, ShardTensor):
        wraps.append(_Wrap(type(local), local._dim, local._segments, local._group))
        local = local._local
    return local, tuple(wraps)


@dataclass(frozen=True, slots=True)
class _Wrap:
    """Makes a local part a shard, without holding one."""

    kind: type[ShardTensor]
    dim: int
    segments: tuple[int, ...]
    group: Any

    def __call__(self, local: Tensor) -> Tensor:
        return self.kind(local, self.dim, self.segments, self.group)
