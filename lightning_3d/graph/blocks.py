"""Finding the stacks of repeated blocks in a module, and what lies beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric

_CONTAINERS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """A list of repeated layers.

    Attributes:
        name: Name of the list in the module.
        blocks: Names of its blocks, in order.
        kind: Class of the blocks.
    """

    name: str
    blocks: tuple[str, ...]
    kind: str

    def __str__(self) -> str:
        return f"{self.name}: {len(self.blocks)} x {self.kind}"


def find_stacks(module: nn.Module) -> tuple[Stack, ...]:
    """Returns the outermost lists of two or more blocks of one class that own parameters, in module order."""
    found: list[Stack] = []
    _collect_stacks(module, "", found)
    return tuple(found)


def outer_modules(module: nn.Module, stacks: tuple[Stack, ...]) -> tuple[str, ...]:
    """Returns the largest sub-modules that hold no block and lie in none, in module order.

    Together with the blocks they are what a step calls at the level of its containers. Metrics are left out: they
    compute nothing that the loss depends on.
    """
    blocks = {name for stack in stacks for name in stack.blocks}
    found: list[str] = []
    _collect_outer(module, "", blocks, found)
    return tuple(found)


def modules_with_statistics(module: nn.Module) -> tuple[str, ...]:
    """Returns the normalisations that keep running statistics, which have to compute in the statistics' precision."""
    return tuple(name for name, child in module.named_modules() if isinstance(child, _NormBase) and _has_both(child))


def _has_both(normalisation: _NormBase) -> bool:
    return normalisation.track_running_stats and normalisation.affine


def containers(module: nn.Module, stacks: tuple[Stack, ...]) -> tuple[str, ...]:
    """Returns the sub-modules that hold blocks, without the module itself, outermost first."""
    holding = parents(block for stack in stacks for block in stack.blocks)
    return tuple(name for name, _ in module.named_modules() if name in holding)


def parents(names: Iterable[str]) -> frozenset[str]:
    """Returns the names of all modules that hold some modules, without the one that holds everything."""
    return frozenset(around for name in names for around in outwards(name))


def outwards(name: str) -> Iterator[str]:
    """Yields the names of the modules that something lies in, innermost first, without that which holds everything."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _collect_stacks(module: nn.Module, name: str, found: list[Stack]) -> None:
    if name and _is_stack(module):
        blocks = tuple(f"{name}.{key}" for key, _ in module.named_children())
        kind = type(next(module.children())).__name__
        found.append(Stack(name=name, blocks=blocks, kind=kind))
        return
    for key, child in module.named_children():
        _collect_stacks(child, f"{name}.{key}" if name else key, found)


def _is_stack(module: nn.Module) -> bool:
    if not isinstance(module, _CONTAINERS):
        return False
    children = list(module.children())
    same = len({type(child) for child in children}) == 1
    return len(children) > 1 and same and all(next(child.parameters(), None) is not None for child in children)


def _collect_outer(module: nn.Module, name: str, blocks: set[str], found: list[str]) -> None:
    if name in blocks or isinstance(module, Metric):
        return
    holds_blocks = not name or any(block.startswith(f"{name}.") for block in blocks)
    if not holds_blocks:
        found.append(name)
        return
    for key, child in module.named_children():
        _collect_outer(child, f"{name}.{key}" if name else key, blocks, found)
