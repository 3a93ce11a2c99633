"""Less of a model and of a batch: one block of each kind, few samples, few tokens, so that a proof takes seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_3d.batches.split import split_batch
from lightning_3d.graph.blocks import find_stacks
from lightning_3d.graph.repeats import block_kinds

# Two, because with one sample a normalisation over the batch or a contrast of samples has nothing to do.
_SAMPLES = 2
_TOKENS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a model, and what its step is called with.

    Attributes:
        kept: Blocks that stay, by the name of their stack; other stacks stay whole.
        args: Arguments of the step.
        text: What it is, in words.
    """

    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    args: tuple[Any, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def pieces(module: nn.Module, args: tuple[Any, ...], degree: int) -> Iterator[Piece]:
    """Returns pieces, the smallest first; a step may not run on those, the last one is all there is.

    Args:
        module: The whole module.
        args: Arguments of the step, the first one is the batch.
        degree: Number of ranks; the tokens that are left can be cut over it.
    """
    kept = one_of_each_kind(module)
    tokens = degree * -(-_TOKENS // degree)
    few = fewer_samples(args, _SAMPLES)
    blocks = "one block of each kind" if kept else "all blocks"
    batches = (
        (fewer_tokens(few, tokens), "few samples and tokens"),
        (few, "few samples"),
        (args, "the whole batch"),
    )
    for index, (batch, words) in enumerate(batches):
        # A batch of few samples is the whole one, and one of few tokens as it is.
        if all(_shapes(batch) != _shapes(larger) for larger, _ in batches[index + 1 :]):
            yield Piece(kept=kept, args=batch, text=f"{blocks}, {words}")
    if kept:
        yield Piece(args=few, text="all blocks, few samples")


def one_of_each_kind(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns the names of blocks of which each does what no other one does, by stacks that have more than those."""
    found = {}
    for stack in find_stacks(module):
        kinds = block_kinds(module, (stack,))
        first = {kind: name for name, kind in reversed(kinds.items())}
        kept = tuple(name for name in stack.blocks if name in first.values())
        if len(kept) < len(stack.blocks):
            found[stack.name] = kept
    return found


@contextmanager
def fewer_blocks(module: nn.Module, kept: Mapping[str, tuple[str, ...]]) -> Iterator[None]:
    """Context in which stacks hold fewer blocks; those that are left count from 0.

    Args:
        module: The whole module.
        kept: Names of the blocks that stay, by the name of their stack.
    """
    before = []
    try:
        for name, blocks in kept.items():
            children = module.get_submodule(name)._modules
            before.append((children, dict(children)))
            left = {block.rpartition(".")[2]: module.get_submodule(block) for block in blocks}
            numbered = all(key.isdigit() for key in left)
            children.clear()
            children.update({str(index) if numbered else key: left[key] for index, key in enumerate(left)})
        yield
    finally:
        for children, all_of_them in before:
            children.clear()
            children.update(all_of_them)


def fewer_samples(args: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Returns a step's arguments with the first samples of the batch."""
    sizes = [leaf.size(0) for leaf in pytree.tree_leaves(args[:1]) if isinstance(leaf, Tensor) and leaf.dim()]
    if not sizes or sizes[0] <= count:
        return args
    return (split_batch(args[0], (count, sizes[0] - count))[0], *args[1:])


def fewer_tokens(args: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Returns a step's arguments with the first tokens of each sample; whatever is as long as those is cut."""
    length = _length(args)
    if length <= count:
        return args

    def cut(leaf: Tensor) -> Tensor:
        for dim in range(1, leaf.dim()):
            leaf = leaf.narrow(dim, 0, count) if leaf.size(dim) == length else leaf
        return leaf

    batch = pytree.tree_map_only(Tensor, cut, args[0])
    return (batch, *args[1:])


def positions(args: tuple[Any, ...]) -> int:
    """Returns how many positions a step computes on: samples times tokens."""
    shapes = [leaf.shape for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor) and leaf.dim()]
    return max([shape[:1].numel() for shape in shapes], default=1) * max(_length(args), 1)


def _length(args: tuple[Any, ...]) -> int:
    """How many tokens the samples have; 0 if they have none."""
    tokens = [
        leaf.size(1)
        for leaf in pytree.tree_leaves(args[:1])
        if isinstance(leaf, Tensor) and leaf.dim() > 1 and not leaf.is_floating_point()
    ]
    return tokens[0] if tokens else 0


def _shapes(args: tuple[Any, ...]) -> list[Any]:
    return [tuple(leaf.shape) for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
