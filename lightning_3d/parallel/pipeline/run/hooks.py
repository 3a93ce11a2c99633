"""Forward hooks of the user: who has some, what modules return to them, and calling them without the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

# A module inside a running one has returned: its name, and its output.
Returned = Callable[[str, Any], None]


def forward_hooks(module: nn.Module) -> Mapping[str, frozenset[int]]:
    """Returns the keys of all forward hooks by the names of their modules."""
    return {name: frozenset(child._forward_hooks) for name, child in module.named_modules() if child._forward_hooks}


class UserHooks:
    """The forward hooks that are not those of the sharding of parameters; those set later count too.

    Args:
        module: The whole module, as it is now.
        before: `forward_hooks` of it before it was rewritten.
    """

    def __init__(self, module: nn.Module, before: Mapping[str, frozenset[int]]) -> None:
        self._modules = dict(module.named_modules())
        self._others = {
            module.get_submodule(name): keys - before.get(name, frozenset())
            for name, keys in forward_hooks(module).items()
        }
        self._names = {child: name for name, child in self._modules.items()}

    def inside(self, name: str) -> tuple[str, ...]:
        """Returns the modules inside a module that have hooks of the user."""
        outer = self._modules[name]
        return tuple(self._names[child] for child in outer.modules() if child is not outer and self._keys(child))

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Calls the hooks of a module that was not run; what they return is known to be in ``output`` already."""
        module = self._modules[name]
        for key in self._keys(module):
            hook = module._forward_hooks[key]
            if key in module._forward_hooks_with_kwargs:
                hook(module, args, kwargs, output)
            else:
                hook(module, args, output)

    @contextmanager
    def heard(self, names: tuple[str, ...], returned: Returned) -> Iterator[None]:
        """Context in which one hears what modules return, before their hooks do."""
        handles = [self._modules[name].register_forward_hook(_tells(name, returned), prepend=True) for name in names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keys(self, module: nn.Module) -> tuple[int, ...]:
        others = self._others.get(module, frozenset())
        return tuple(key for key in module._forward_hooks if key not in others)


def _tells(name: str, returned: Returned) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        returned(name, output)

    return hook
