"""Copies of a module, or of its tensors, that others keep beside it, as callbacks that average weights do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

# Where a tensor is kept: a list or dict, and its place there.
Place: TypeAlias = tuple[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """What is kept beside a module.

    Attributes:
        modules: Copies of the module or of parts of it, each with the name of its original.
        tensors: Where copies of parameters are kept, with the names of the parameters.
    """

    modules: tuple[tuple[nn.Module, str], ...] = ()
    tensors: tuple[tuple[Place, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """What they are copies of, in order."""
        return tuple(name for _, name in (*self.modules, *self.tensors))


def kept_beside(owners: Iterable[object], module: nn.Module) -> Beside:
    """Returns the copies that some objects keep in their attributes, or in lists and dicts there.

    A copy of a module has the class, the names and the shapes of its original. One of a part must have its values too,
    if it is not in torch's AveragedModel, and is no single layer: a probe may look like a part by chance. Copies of
    parameters are dicts that have parameters' names for keys, and lists that hold one tensor for each parameter.

    Args:
        owners: The objects.
        module: The whole module.
    """
    inside = set(module.modules())
    known = {id(module), *map(id, inside), *map(id, module.parameters())}
    found = [value for owner in owners for value in _values(vars(owner), known)]
    search = _Originals(module)
    return Beside(
        modules=tuple(
            pair for value in found if isinstance(value, nn.Module) for pair in search.copies(value, average=False)
        ),
        tensors=tuple(place for value in found if not isinstance(value, nn.Module) for place in search.places(value)),
    )


def _values(value: Any, known: set[int]) -> Iterator[Any]:
    """Modules, and collections of tensors, each once."""
    if id(value) in known:
        return
    if isinstance(value, nn.Module):
        known.add(id(value))
        yield value
    elif isinstance(value, dict | list | tuple | set):
        known.add(id(value))
        parts = list(value.values() if isinstance(value, Mapping) else value)
        if any(isinstance(part, Tensor) for part in parts):
            yield value
        for part in parts:
            yield from _values(part, known)


class _Originals:
    """The parts of a module, to compare others with.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts = {name: part for name, part in module.named_modules() if not name or part._modules}
        self._forms = {name: _form(part) for name, part in self._parts.items()}
        self._shapes = {name: parameter.shape for name, parameter in module.named_parameters(remove_duplicate=False)}

    def copies(self, other: nn.Module, *, average: bool) -> Iterator[tuple[nn.Module, str]]:
        """The outermost copies in another module.

        Args:
            other: The other module.
            average: It is in torch's AveragedModel.
        """
        form = _form(other)
        for name, part in self._parts.items() if form else ():
            is_alike = type(part) is type(other) and self._forms[name] == form
            if is_alike and (average or not name or (other._modules and _equal(part, other))):
                yield other, name
                return
        for child in other.children():
            yield from self.copies(child, average=isinstance(other, AveragedModel))

    def places(self, kept: Any) -> Iterator[tuple[Place, str]]:
        """The places of copies of parameters in a collection."""
        if isinstance(kept, MutableMapping):
            shapes = {key: value.shape for key, value in kept.items() if isinstance(value, Tensor)}
            if all(shape == self._shapes.get(key, shape) for key, shape in shapes.items()):
                yield from (((kept, key), key) for key in shapes if key in self._shapes)
        elif isinstance(kept, MutableSequence):
            named = dict(self._module.named_parameters())
            if [getattr(value, "shape", None) for value in kept] == [each.shape for each in named.values()]:
                yield from (((kept, index), name) for index, name in enumerate(named))


def _form(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}


def _equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(mine.dtype == yours.dtype and not mine.is_meta and torch.equal(mine, yours) for mine, yours in pairs)
