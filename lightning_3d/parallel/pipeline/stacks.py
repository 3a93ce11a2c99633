"""Which lists of a module a pipeline cuts, and which modules beside their blocks it watches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torchmetrics import Metric

from lightning_3d.errors import PlanError, nearest
from lightning_3d.graph.blocks import Stack, outer_modules

# Blocks of two classes are cut alike if one has at most so many times the parameters of the other.
_COMPARABLE = 2.0
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def pipeline_stacks(
    module: nn.Module, stacks: Sequence[Stack], wanted: str | Sequence[str] | None = None
) -> tuple[Stack, ...]:
    """Returns the lists that are cut, in module order.

    Without a wish these are the largest list, lists of the same class of blocks, and lists of blocks of comparable
    size, as an encoder's beside a decoder's. A ``nn.Sequential`` of layers of several classes serves if there is none.

    Args:
        module: The whole module.
        stacks: Its lists of equal blocks.
        wanted: Names of the lists that the user wants to be cut.

    Raises:
        PlanError: There is nothing to cut, or a name is not that of a list.
    """
    if wanted is not None:
        return _by_name(module, stacks, [wanted] if isinstance(wanted, str) else wanted)
    if stacks:
        return _alike(module, stacks)
    mixed = [stack for stack in _mixed(module) if len(stack.blocks) > 1]
    if not mixed:
        lists = (_list(child, name) for name, child in module.named_modules() if name)
        others = [stack.name for stack in lists if stack is not None and len(stack.blocks) > 1]
        named = f"pipeline_stack={others[0]!r}, or " if others else ""
        raise PlanError(
            "the module has no list of two or more layers of one class with parameters that a pipeline could cut "
            "(nn.ModuleList or nn.Sequential; a layer that stands in it several times counts once).",
            valid=others or None,
            fix=f"{named}keep the layers in an nn.ModuleList, or leave pipeline_parallel_size=1",
        )
    return (max(mixed, key=lambda stack: _size(module, stack)),)


def tracked_modules(module: nn.Module, stacks: Sequence[Stack]) -> tuple[str, ...]:
    """Returns the modules beside the blocks whose calls a pipeline watches, in module order.

    They are the largest sub-modules with parameters that hold no block. Those that cannot be called, as lists, are
    walked into.
    """
    parts = ((name, module.get_submodule(name)) for name in _outer_parts(module, tuple(stacks)))
    return tuple(
        name for name, part in parts if not isinstance(part, Metric) and next(part.parameters(), None) is not None
    )


def drawing_modules(
    module: nn.Module, stacks: Sequence[Stack], wanted: str | Sequence[str] | None = None
) -> tuple[str, ...]:
    """Returns the modules that have random streams of their own: what a pipeline would watch, and what has no weights.

    They are the same on every mesh, also where no pipeline is, so that what they draw does not depend on it.

    Args:
        module: The whole module.
        stacks: Its lists of equal blocks.
        wanted: Names of the lists that the user wants to be cut.

    Raises:
        PlanError: A name is not that of a list.
    """
    try:
        cut = pipeline_stacks(module, stacks, wanted)
    except PlanError:
        if wanted is not None:
            raise
        cut = ()
    blocks = (block for stack in cut for block in stack.blocks)
    return (*blocks, *_outer_parts(module, cut))


def _outer_parts(module: nn.Module, stacks: tuple[Stack, ...]) -> Iterator[str]:
    """The largest sub-modules that hold no block and can be called."""
    for name in outer_modules(module, stacks):
        yield from _listed(module.get_submodule(name), name)


def _listed(module: nn.Module, name: str) -> Iterator[str]:
    """The module, or what a list holds that cannot be called."""
    if type(module).forward is not nn.Module.forward:
        yield name
        return
    for key, child in module.named_children():
        yield from _listed(child, f"{name}.{key}")


def _alike(module: nn.Module, stacks: Sequence[Stack]) -> tuple[Stack, ...]:
    largest = max(stacks, key=lambda stack: _size(module, stack))
    kind, size = _kind(module, largest), _block_size(module, largest)

    def fits(stack: Stack) -> bool:
        other = _block_size(module, stack)
        return _kind(module, stack) is kind or max(size, other) <= _COMPARABLE * min(size, other)

    return tuple(stack for stack in stacks if fits(stack))


def _by_name(module: nn.Module, stacks: Sequence[Stack], names: Sequence[str]) -> tuple[Stack, ...]:
    known = {stack.name: stack for stack in stacks}
    modules = dict(module.named_modules())
    found = []
    for name in names:
        stack = known.get(name) or _list(modules.get(name), name)
        if stack is None or len(stack.blocks) < 2:
            close = nearest(name, modules)
            raise PlanError(
                f"pipeline_stack={name!r} is no list of two or more layers with parameters"
                + (f" (did you mean {close}?)" if close and close != name else "")
                + ".",
                valid=known or None,
                fix="the name of an nn.ModuleList or nn.Sequential, as module.named_modules() gives it",
            )
        found.append(stack)
    again = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if again is not None:
        raise PlanError(f"pipeline_stack names {again} twice.", fix="each list once")
    inner = next((name for name in names for other in names if name.startswith(f"{other}.")), None)
    if inner is not None:
        raise PlanError(
            f"pipeline_stack names {inner}, which lies within another list that it names.",
            fix="lists that do not hold each other",
        )
    order = list(modules)
    return tuple(sorted(found, key=lambda stack: order.index(stack.name)))


def _list(module: nn.Module | None, name: str) -> Stack | None:
    """The layers with parameters of a list of whatever classes."""
    if not isinstance(module, _LISTS):
        return None
    blocks = [(key, child) for key, child in module.named_children() if next(child.parameters(), None) is not None]
    kinds = dict.fromkeys(type(child).__name__ for _, child in blocks)
    return Stack(name=name, blocks=tuple(f"{name}.{key}" for key, _ in blocks), kind="|".join(kinds))


def _mixed(module: nn.Module, name: str = "") -> Iterator[Stack]:
    """The outermost sequences of layers of several classes."""
    found = _list(module, name) if name and isinstance(module, nn.Sequential) else None
    if found is not None:
        yield found
        return
    for key, child in module.named_children():
        yield from _mixed(child, f"{name}.{key}" if name else key)


def _kind(module: nn.Module, stack: Stack) -> type:
    return type(module.get_submodule(stack.blocks[0]))


def _size(module: nn.Module, stack: Stack) -> int:
    return sum(parameter.numel() for parameter in module.get_submodule(stack.name).parameters())


def _block_size(module: nn.Module, stack: Stack) -> float:
    return _size(module, stack) / len(stack.blocks)
