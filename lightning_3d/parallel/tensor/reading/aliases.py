"""Plain attributes that hold parameters, such as the list of weights of an LSTM: they follow the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

_ALIASES = "_mesh_3d_aliases"
_REGISTRIES = ("_parameters", "_buffers", "_modules")


class Place:
    """Where a parameter is registered.

    Args:
        module: Its owner.
        name: Its name there.
    """

    __slots__ = ("module", "name")

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name

    @property
    def parameter(self) -> nn.Parameter:
        """What is registered there now."""
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        return parameter

    def read(self) -> Any:
        """Returns what the owner shows at the moment."""
        return getattr(self.module, self.name)


def find_aliases(module: nn.Module, places: Mapping[int, Place]) -> dict[str, Any]:
    """Returns the plain attributes of a module that hold parameters, with places instead of them.

    Args:
        module: The module.
        places: The places of parameters, by the identity of the parameter.
    """
    found = {}
    for name, value in vars(module).items():
        if name not in _REGISTRIES:
            placed = _placed(value, places)
            if any(isinstance(leaf, Place) for leaf in pytree.tree_leaves(placed)):
                found[name] = placed
    return found


def alias_properties(module: nn.Module, aliases: dict[str, Any]) -> dict[str, property]:
    """Takes attributes out of a module and returns properties for its class in their place."""
    if aliases:
        module.__dict__[_ALIASES] = aliases
    for name in aliases:
        del module.__dict__[name]
    return {name: _property(name) for name in aliases}


def aliases_of(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes that were taken out of a module, as it shows them."""
    return {name: getattr(module, name) for name in module.__dict__.get(_ALIASES, ())}


def _property(name: str) -> property:
    def read(self: nn.Module) -> Any:
        return pytree.tree_map_only(Place, Place.read, self.__dict__[_ALIASES][name])

    def write(self: nn.Module, value: Any) -> None:
        known = pytree.tree_leaves(self.__dict__[_ALIASES][name])
        places = {id(place.parameter): place for place in known if isinstance(place, Place)}
        self.__dict__[_ALIASES][name] = _placed(value, places)

    return property(read, write)


def _placed(value: Any, places: Mapping[int, Place]) -> Any:
    return pytree.tree_map(lambda leaf: places.get(id(leaf), leaf), value)
